"""Membership advantage against shared entries and against a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import TINY, changed
from helpers import images, setup

from fedblend.analysis.advice import Limits, read_advice
from fedblend.analysis.privacy import membership
from fedblend.analysis.privacy.leak_report import leak_report
from fedblend.experiment.config import resolve
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory

GROUPS = [list(range(0, 20)), list(range(20, 40))]


def test_raw_samples_give_their_members_away() -> None:
    made = setup(images(n=60), groups=GROUPS)
    raw = made.scale(made.data.train.x[torch.from_numpy(made.population.order)])

    assert membership.of_entries(made, raw) == 1.0


def test_entries_that_have_nothing_of_a_sample_tell_nothing() -> None:
    made = setup(images(n=60), groups=GROUPS)

    far = torch.full((1, *made.data.train.x.shape[1:]), 1e6)

    assert abs(membership.of_entries(made, far)) < 0.5


def test_a_model_that_is_right_on_members_alone_gives_them_away() -> None:
    """All members have the class that the model always says, and no other sample has it."""
    made = setup(images(n=60), groups=GROUPS, model={"name": "mlp", "hidden": []})
    halves = {
        name: replace(half, y=torch.full_like(half.y, label))
        for name, half, label in (("train", made.data.train, 0), ("test", made.data.test, 1))
    }
    weights = {name: torch.zeros_like(tensor) for name, tensor in made.weights().items()}
    says_0 = {name: torch.tensor([1.0, 0, 0]) if tensor.shape == (3,) else tensor for name, tensor in weights.items()}

    known = replace(made, data=replace(made.data, **halves))

    assert membership.of_model(known, weights) == 0.0  # all classes are as likely
    assert membership.of_model(known, says_0) == 1.0


def test_chance_is_zero_on_average() -> None:
    rng = np.random.default_rng(0)
    found = [membership.advantage(rng.random(40), rng.random(40)) for _ in range(300)]

    # Each has a deviation of about sqrt(2 * 0.25 / 40) at most, so their mean stays within five standard errors.
    assert abs(np.mean(found)) < 5 * np.sqrt(0.5 / 40 / 300)


def test_the_larger_scores_of_members_are_no_advantage() -> None:
    scores = np.arange(10.0)
    assert membership.advantage(scores, scores + 100) == 1.0
    assert membership.advantage(scores + 100, scores) == 0.0


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("vhl", None),
        ("statmix", "statistics"),
        ({"name": "statmix", "sharing": {"samples": "all"}}, "statistics"),
        ("virtual-seeds", "seeds"),
        ("virtual-xor", "seeds"),
        ("shared-set", "raw"),
    ],
)
def test_leak_cards_say_what_left_a_client_beside_its_model(method: Any, kind: str | None, tmp_path: Path) -> None:
    settings = {"name": "leaks", "method": method, "unsafe": method == "shared-set", "rounds": 1}
    api.run(resolve(changed(TINY, {**settings, "partition": {"name": "iid", "clients": 4}})), tmp_path / "run")

    leaks = leak_report(RunDirectory(tmp_path / "run")).leaks

    assert {leak.kind for leak in leaks} - {"weights"} == ({kind} if kind else set())
    shared = {leak.kind: leak for leak in leaks}.get(str(kind))
    if kind == "statistics":
        everything = isinstance(method, dict)
        assert shared is not None
        assert shared.membership > 0.3 if everything else shared.membership > -1
        assert "mean 1, std 1" in shared.shape
        assert np.isnan(shared.recognised), "statistics show no picture that could be recognised"
    if kind == "raw":
        assert shared is not None
        assert (shared.recognised, shared.how) == (1.0, "raw samples")


def test_advice_says_who_receives_what_clients_share(tmp_path: Path) -> None:
    for method in ("fedavg", "vhl", "statmix", "virtual-seeds"):
        api.run(resolve(changed(TINY, {"name": method, "method": method, "rounds": 1})), tmp_path / method)
    runs = [RunDirectory(tmp_path / method) for method in ("fedavg", "vhl", "statmix", "virtual-seeds")]
    advice = read_advice(runs, "accuracy", True, Limits(), {})
    found = {option.method: (option.leaves, option.to_clients) for option in advice.options}
    assert found == {
        "fedavg": ((), False),
        "vhl": ((), False),
        "statmix": (("statistics",), True),
        "virtual-seeds": (("seeds",), True),
    }
