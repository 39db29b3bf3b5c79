"""Training of the aggregate on shared class means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines_helpers import GROUPS
from helpers import experiment, federation, images, run, same, same_up_to_rounding, setup
from torch.func import functional_call
from torch.nn import functional as F

from fedblend.core.errors import FedblendError

SHARING = {"name": "means", "split": "class", "samples_per_mean": 4}
STEP = {"name": "train-on-means", "epochs": 2, "batch_size": 64, "lr": 0.05}


def trained(step: Any, sharing: Any = SHARING, **changes: Any) -> tuple[Any, Any, Any]:
    """Setup, state and record after one round."""
    method = {"sharing": sharing, "server_step": step}
    made = setup(**{"groups": GROUPS, "method": method, "train": {"cohort": 3}, **changes})
    state, (record,) = run(made, 1)
    return made, state, record


@pytest.mark.parametrize("split", ["class", "random"])
def test_the_aggregate_takes_gradient_steps_on_the_means(split: str) -> None:
    """Means of random groups have soft targets."""
    made, state, _ = trained(STEP, {**SHARING, "split": split})
    _, aggregate, _ = trained("none", "none")
    x, y = (state.entries.tensors[name] for name in ("x", "y"))
    assert len(x) <= STEP["batch_size"]  # one batch an epoch, so that order does not matter

    weights = {name: tensor.clone().requires_grad_() for name, tensor in aggregate.weights.items()}
    for _ in range(STEP["epochs"]):
        loss = F.cross_entropy(functional_call(made.model.eval(), weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()))
        pairs = zip(weights.items(), slopes, strict=True)
        weights = {name: (old - STEP["lr"] * slope).detach().requires_grad_() for (name, old), slope in pairs}

    same_up_to_rounding(state.weights, {name: tensor.detach() for name, tensor in weights.items()}, steps=1000)
    assert not same(state.weights, aggregate.weights)


def test_the_means_go_to_the_server_once_and_to_no_client() -> None:
    made = setup(groups=GROUPS, method={"sharing": SHARING, "server_step": STEP}, train={"cohort": 3})
    state, records = run(made, 3)
    sent = 4 * sum(tensor.numel() for tensor in state.entries.tensors.values())
    assert [record["bytes_up"].get("means", 0) for record in records] == [sent, 0, 0]
    assert not any(record["bytes_down"].get("means") for record in records)


def test_clients_that_mix_with_the_means_receive_them() -> None:
    method = {"sharing": SHARING, "server_step": STEP, "objective": "virtual-samples"}
    made = setup(groups=GROUPS, method=method, train={"cohort": 3})
    state, (record,) = run(made, 1)
    assert record["bytes_down"]["means"] == 3 * 4 * sum(tensor.numel() for tensor in state.entries.tensors.values())


@pytest.mark.parametrize(
    ("step", "sharing", "needs"),
    [
        ("train-on-means", "mixed-seeds", "the model's inputs"),
        ("train-on-means", {"name": "raw"}, "the model's inputs"),
        ("train-on-seeds", SHARING, "samples as stored"),
    ],
)
def test_entries_on_another_scale_are_refused(step: str, sharing: Any, needs: str) -> None:
    with pytest.raises(FedblendError, match=f"method.server_step '{step}' reads {needs}"):
        experiment(method={"sharing": sharing, "server_step": step}, unsafe=True)


def test_hidden_states_are_refused() -> None:
    method = {"sharing": "hidden-means", "objective": "hidden-mix", "server_step": "train-on-means"}
    with pytest.raises(FedblendError, match=r"'hidden-means' shares hidden states, but method.server_step"):
        experiment(method=method)


def test_a_server_without_means_says_what_to_change() -> None:
    sharing = {**SHARING, "samples_per_mean": 2}
    with pytest.raises(FedblendError, match=r"nothing to work on; let clients make larger means"):
        trained(STEP, sharing, groups=[list(range(3)), list(range(3, 6))], policy={"min_mean": 2}, train={"cohort": 2})


def test_means_that_stay_at_clients_cannot_train_the_server() -> None:
    with pytest.raises(FedblendError, match="'train-on-means' trains on shared data, but those of 'local-means' never"):
        trained(STEP, {"name": "local-means", "split": "class"})


def test_the_server_waits_where_a_channel_loses_all_means() -> None:
    lossy = {"name": "wireless", "t_max": 0.001, "power_up": -50}
    _, state, _ = trained(STEP, channel=lossy, min_uploads=0)
    assert not len(state.entries)
    assert same(state.weights, setup(groups=GROUPS).weights())


@pytest.mark.parametrize("step", ["fedavgm", "fedadam", "aggenhance"])
def test_a_round_without_uploads_changes_nothing(step: str) -> None:
    reaches, lost = {"name": "wireless", "t_max": 10.0}, {"name": "wireless", "power_up": -100}
    first, later = (
        federation(images(), method={"server_step": step}, channel=one, min_uploads=0) for one in (reaches, lost)
    )
    state, (record,) = run(first, 1)

    after, (missed,) = run(later, 1, state)

    assert record["uploads"] > 0
    assert missed["uploads"] == 0
    assert same(after.weights, state.weights)
    assert same(after.server_state, state.server_state)
