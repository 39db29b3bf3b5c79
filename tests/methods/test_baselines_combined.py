"""Baselines for non-IID data: combined with mixing, in loop and stacks; neutral settings that are the base."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from baselines_helpers import GROUPS, skewed
from federation_helpers import stacks_agree
from helpers import federation, federation_of, run, same, same_up_to_rounding, setup, slow_after_first, slow_except

from fedblend.core.engine import TrainTask, aggregator_of
from fedblend.core.loop import RoundLoop
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.aggregators.fednova import NormalisedMean

MIXES = ("localmix", "naivemix", "fedmix", "fedmix-hidden", "fed-augmix")


def with_objective(name: str, mix: str) -> dict[str, Any]:
    """A mixing method whose objective is the base of another one."""
    parts = setup(method=mix, model=DEEP).experiment.method.model_dump()
    base = parts["objective"]
    return {"name": mix, "objective": {"name": name, "base": base}}


DEEP = {"name": "mlp", "hidden": [8, 6]}
NEUTRAL: dict[str, tuple[Any, Any]] = {
    "fedntd": ({"name": "fedntd", "terms": [{"name": "fedntd", "beta": 0.0}]}, "fedavg"),
    "fedlc": ({"name": "fedlc", "objective": {"tau": 0.0}}, "fedavg"),
    "fedrs": ({"name": "fedrs", "objective": {"alpha": 1.0}}, "fedavg"),
    "fedlc on fedmix": (
        {"name": "fedmix", "objective": {"name": "fedlc", "tau": 0.0, "base": {"name": "fedmix"}}},
        "fedmix",
    ),
}
"""By name: a method with the setting that takes its effect away, and the method that it then is."""


@pytest.mark.parametrize("base", ["fedavg", "fedmix"])
def test_fednova_with_clients_of_equal_steps_is_the_base_method(base: str) -> None:
    equal = {"groups": [list(range(i, i + 9)) for i in (0, 10, 20, 30)], "train": {"cohort": 3, "momentum": 0.5}}
    made, wanted = (weights_after({"name": base, **part}, **equal) for part in ({"aggregator": "fednova"}, {}))
    same_up_to_rounding(made, wanted, steps=1)


@pytest.mark.parametrize("base", ["fedavg", "fedmix"])
def test_pfedme_with_one_step_to_the_gradient_is_the_base_method(base: str) -> None:
    own = {"personal": {"name": "pfedme", "steps": 1, "lambda": 4.0, "personal_lr": 0.25}}
    made, wanted = (weights_after({"name": base, **part}, 2) for part in (own, {}))
    same_up_to_rounding(made, wanted, steps=100)


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_neutral_setting_is_the_base_method(name: str) -> None:
    method, base = NEUTRAL[name]
    made, wanted = (weights_after(one) for one in (method, base))
    assert same(made, wanted)


def weights_after(method: Any, rounds: int = 3, **changes: Any) -> dict[str, Any]:
    made = setup(**{"groups": skewed(), "method": method, "model": DEEP, "train": {"cohort": 3}, **changes})
    return run(made, rounds)[0].weights


COMBINED: dict[str, Any] = {
    **{f"{name} on {mix}": with_objective(name, mix) for name in ("fedlc", "fedrs") for mix in MIXES},
    **{f"fedntd on {mix}": {"name": mix, "terms": ["fedntd"]} for mix in MIXES},
    **{f"pfedme on {mix}": {"name": mix, "personal": {"name": "pfedme", "steps": 2}} for mix in MIXES},
    "fednova on scaffold": {"name": "scaffold", "aggregator": "fednova"},
    "fednova on fedmix with terms": {"name": "fedmix", "aggregator": "fednova", "terms": ["fedntd", "proximal"]},
    "all terms": {"name": "fedmix", "terms": ["fedntd", "moon", "proximal"]},
}


FEW = ["fedlc on fedmix", "fednova on scaffold"]


@pytest.mark.parametrize("name", slow_except(FEW, COMBINED))
def test_combinations_run_alike_in_the_loop_and_in_stacks(name: str) -> None:
    made = setup(groups=GROUPS, method=COMBINED[name], model=DEEP, train={"cohort": 3, "lr": 0.02})
    stacks_agree(made)


@pytest.mark.parametrize("term", [{"name": "fedntd", "beta": 0.0}, {"name": "moon", "mu": 0.0}], ids=["fedntd", "moon"])
def test_a_fixed_model_keeps_its_running_statistics(term: Any) -> None:
    net = {"name": "module", "path": "helpers:BatchNormNet"}
    fed, plain = (federation(method={"terms": terms}, model=net, train={"cohort": 3}) for terms in ([term], []))
    state, _ = run(fed, 1)
    before = {name: tensor.clone() for name, tensor in state.weights.items()}

    made, wanted = run(fed, 2, state)[0], run(plain, 3)[0]

    assert same(state.weights, before)
    assert same(made.weights, wanted.weights)


def test_fednova_and_scaffold_count_the_steps_of_shared_layers() -> None:
    """With FedRep, half of a client's two steps train its head alone, whose gradients the others do not see."""
    rep = {"name": "fedrep", "head_share": 0.5}
    world = {
        "groups": [list(range(i, i + 8)) for i in (0, 10, 20)],
        "train": {"cohort": 3},
        "model": DEEP,
        "holdout": 0.2,
    }

    nova, mean = (federation(method={"personal": rep, "aggregator": one}, **world) for one in ("fednova", "mean"))
    same_up_to_rounding(run(nova, 2)[0].weights, run(mean, 2)[0].weights, steps=10)

    made = setup(method={"name": "scaffold", "personal": rep}, **world)
    begun = federation_of(made).start()[0]
    state, _ = run(made, 1)
    alone = setup(method={"personal": rep}, **world)
    for client in range(3):
        (update,) = LoopEngine(alone).train(TrainTask(0, begun.weights, None, alone.sizes(0)), [client])
        for name in (n for n in update.weights if n not in made.own_layers):
            slope = (begun.weights[name] - update.weights[name]) / made.experiment.train.lr
            torch.testing.assert_close(
                state.client_states[client].parts[f"terms.0/{name}"], slope, rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("method", slow_after_first(["flea", "vhl"]))
def test_pfedme_takes_objectives_that_read_the_rounds_model_or_encode_classes(method: str) -> None:
    made = setup(method={"name": method, "personal": {"name": "pfedme", "steps": 1}}, model=DEEP, holdout=0.2)
    starts = []

    class Spy(LoopEngine):
        def _step(self, loss: Any, *more: Any) -> Any:
            starts.append(len(loss.context.start))
            return super()._step(loss, *more)

    loop, stacked = (run(RoundLoop(made, engine), 1)[0] for engine in (Spy(made), StackedEngine(made, stack=2)))

    assert set(starts) == ({len(made.weights())} if method == "flea" else {0})
    same_up_to_rounding(stacked.weights, loop.weights, steps=1000)


def test_fednova_counts_every_step_of_an_objective_that_makes_several_a_batch() -> None:
    plain = setup(method={"name": "fedavg", "aggregator": "fednova"})
    layer = {"sharing": {"layer": 1}, "objective": {"layer": 1}}
    hidden = setup(method={"name": "naivemix-hidden", "aggregator": "fednova", **layer})
    train = plain.experiment.train
    for made, steps in ((plain, train.batches_of(25)), (hidden, 2 * train.batches_of(25))):
        aggregator = aggregator_of(made, 0)
        assert isinstance(aggregator, NormalisedMean)
        assert aggregator.work.steps_of(0, 25) == steps
