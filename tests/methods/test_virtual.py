"""Training on shared entries as samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines_helpers import GROUPS
from federation_helpers import stacks_agree
from helpers import loss_of, run, same, setup, slow_except, tanh_net, weight_gradient
from objectives_helpers import CLASSES, NUMBERS, draws, random_pool

from fedblend.core.objective import Batch, Plain, Task
from fedblend.methods.objectives.fedmix import FedMix
from fedblend.methods.objectives.virtual import VirtualSamples

DEEP = {"name": "mlp", "hidden": [8, 6]}


@pytest.mark.parametrize("task", [CLASSES, NUMBERS])
@pytest.mark.parametrize("base", [Plain(), FedMix(lam=0.2)])
def test_the_loss_on_the_drawn_entries_is_added_to_the_base(task: Task, base: Any) -> None:
    model, batch, pool = tanh_net(seed=1), Batch(*draws(task, 6, 1)), random_pool(task, 5)
    rows = torch.tensor([3, 1, 3])

    drawn = {"virtual": rows, "virtual_weight": torch.tensor(0.3)}
    made = loss_of(VirtualSamples(base=base), model, batch, task, 0.2, pool, **drawn)

    added = torch.stack([task.loss(model(pool["x"][[i]]), pool["y"][[i]]) for i in rows.tolist()]).mean()
    wanted = loss_of(base, model, batch, task, 0.2, pool) + 0.3 * added
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(weight_gradient(made, model), weight_gradient(wanted, model))


def weights_after(objective: Any, rounds: int = 2, **changes: Any) -> dict[str, torch.Tensor]:
    method: dict[str, Any] = {"objective": objective}
    if objective["name"] not in ("plain", "augmix"):
        method["sharing"] = {"name": "means", "split": "class", "samples_per_mean": 4}
    made = setup(**{"groups": GROUPS, "method": method, "model": DEEP, "train": {"cohort": 3}, **changes})
    return run(made, rounds)[0].weights


@pytest.mark.parametrize("base", ["plain", "fedmix", "augmix"])
def test_without_weight_it_is_the_base(base: str) -> None:
    made, wanted = (
        weights_after(objective)
        for objective in ({"name": "virtual-samples", "base": base, "weight": 0.0}, {"name": base})
    )
    assert same(made, wanted)


@pytest.mark.parametrize("base", slow_except(["fedmix"], ["plain", "fedmix", "hidden-mix"]))
def test_loop_and_stacks_agree(base: str) -> None:
    sharing = {"name": "hidden-means"} if base == "hidden-mix" else {"name": "means", "split": "class"}
    method = {"sharing": sharing, "objective": {"name": "virtual-samples", "base": base, "entries": 3}}
    made = setup(groups=GROUPS, method=method, model=DEEP, train={"cohort": 3, "lr": 0.02})
    stacks_agree(made)


def test_a_client_without_entries_of_others_takes_the_base() -> None:
    alone = {"groups": [list(range(20))], "train": {"cohort": 1}}
    made, wanted = (
        weights_after(objective, **alone)
        for objective in ({"name": "virtual-samples", "exclude_own": True}, {"name": "plain"})
    )
    assert same(made, wanted)


def test_a_stack_may_hold_a_client_that_alone_has_shared() -> None:
    """With ``exclude_own`` it has no entries to draw, unlike the others of its stack."""
    sharing = {"name": "means", "split": "class", "threshold": 20}
    objective = {"name": "virtual-samples", "exclude_own": True, "entries": 3}
    groups = [list(range(24)), list(range(24, 32)), list(range(32, 40))]
    made = setup(groups=groups, method={"sharing": sharing, "objective": objective}, train={"cohort": 3, "lr": 0.02})

    stacks_agree(made, stack=3)


def test_what_the_base_reads_is_read() -> None:
    assert VirtualSamples(base={"name": "fedlc"}).counts_labels
    assert not VirtualSamples().counts_labels
