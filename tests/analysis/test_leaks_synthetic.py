"""Leak report cards of statistics of features and of synthetic samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import TINY, changed
from helpers import images, setup

from fedblend.analysis.privacy import membership
from fedblend.analysis.privacy.leak_report import Leak, leak_report
from fedblend.analysis.privacy.similarity import similarity_of_entries
from fedblend.core.sharing import Pool
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory

TWO = {"name": "classes", "clients": 5, "classes_per_client": 2}


def leaks(folder: Path, method: Any) -> dict[str, Leak]:
    api.run(resolve(changed(TINY, {"partition": TWO, "method": method})), folder)
    return {leak.kind: leak for leak in leak_report(RunDirectory(folder)).leaks}


def test_statistics_have_a_card_without_measures(tmp_path: Path) -> None:
    card = leaks(tmp_path / "run", "ccvr")["statistics"]

    assert (card.senders, card.times, card.how) == (5, 5, "no measure available")
    assert "covariance 36" in card.shape
    assert math.isnan(card.membership)


@pytest.mark.parametrize(("method", "times"), [("feddm", 10), ("server-matched", 5)])
def test_synthetic_samples_are_compared_with_raw_ones(method: str, times: int, tmp_path: Path) -> None:
    found = leaks(tmp_path / "run", {"name": method, "sharing": {"steps": 2}})
    card, state = found["synthetic"], checkpoint.read(tmp_path / "run")
    made = make_setup(RunDirectory(tmp_path / "run").experiment())

    assert (card.senders, card.times) == (5, times)
    assert card.how == "synthetic samples, compared with the nearest raw sample"
    assert 0 <= card.recognised <= 1
    assert card.membership == membership.of_entries(made, state.entries.tensors["x"]), "x is on the model's scale"


def test_a_raw_sample_is_recognised_as_its_clients_alone() -> None:
    """Two of four entries are raw samples under their own client and class."""
    made = setup(images(), groups=[list(range(20)), list(range(20, 40))])
    x, y = made.data.train.x[[0, 1, 21, 22]], made.data.train.y[[0, 1, 21, 22]]
    target = torch.nn.functional.one_hot(y, 3).float()
    target[1] = target[1].roll(1)
    entries = Pool({"x": made.scale(x), "y": target}, torch.tensor([0, 0, 1, 0]).numpy())

    found = similarity_of_entries(made, entries)

    assert (found.samples, found.recognised) == (4, 0.5)
    assert found.mse == pytest.approx(0, abs=1e-10)
