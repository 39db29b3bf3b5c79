"""Baselines for non-IID data: combined with mixing, in loop and stacks; neutral settings that are the base."""

from __future__ import annotations

from typing import Any

import pytest
from baselines_helpers import GROUPS, skewed
from helpers import run, same, same_up_to_rounding, setup

from fedblend.core.loop import RoundLoop
from fedblend.engines.loop import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine

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
    return run(RoundLoop(made, LoopEngine(made)), rounds)[0].weights


COMBINED: dict[str, Any] = {
    **{f"{name} on {mix}": with_objective(name, mix) for name in ("fedlc", "fedrs") for mix in MIXES},
    **{f"fedntd on {mix}": {"name": mix, "terms": ["fedntd"]} for mix in MIXES},
    **{f"pfedme on {mix}": {"name": mix, "personal": {"name": "pfedme", "steps": 2}} for mix in MIXES},
    "fednova on scaffold": {"name": "scaffold", "aggregator": "fednova"},
    "fednova on fedmix with terms": {"name": "fedmix", "aggregator": "fednova", "terms": ["fedntd", "proximal"]},
    "all terms": {"name": "fedmix", "terms": ["fedntd", "moon", "proximal"]},
}


@pytest.mark.parametrize("name", COMBINED)
def test_combinations_run_alike_in_the_loop_and_in_stacks(name: str) -> None:
    made = setup(groups=GROUPS, method=COMBINED[name], model=DEEP, train={"cohort": 3, "lr": 0.02})

    loop, stacked = (run(RoundLoop(made, engine), 1)[0] for engine in (LoopEngine(made), StackedEngine(made, stack=2)))

    same_up_to_rounding(stacked.weights, loop.weights, steps=1000)
