"""`fedblend switches`: when loss scaling switched lambda, as a user reads it."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_helpers import PNG, contents, here, refused, succeeded, tiny_run

from fedblend.analysis.points.loss_scaling import (
    ClientSwitches,
    RoundSwitches,
    describe_switches,
    sum_by_round,
    switches,
)
from fedblend.cli import paper as command
from fedblend.core.engine import TrainTask
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.augment.augmix import augmix
from fedblend.methods.objectives.augmix import AugMix
from fedblend.runs.directory import RunDirectory

METHOD = {
    "name": "fed-augmix",
    "objective": {"severity": 10.0, "lambda": 1.0, "large_lambda": 20.0, "threshold": 400.0},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose outputs begin alike and part while it trains, so that lambda switches."""
    return tiny_run(tmp_path_factory.mktemp("runs"), method=METHOD, rounds=6, train={"lr": 0.5}).path


def rows_of(folder: Path) -> list[ClientSwitches]:
    with (folder / command.LOG).open() as file:
        return [ClientSwitches(*(int(value) for value in row.values())) for row in csv.DictReader(file)]


def test_the_command_prints_and_writes_what_the_run_did(made: Path, tmp_path: Path) -> None:
    before = contents(made)

    told = succeeded(here("switches", made, "--out", tmp_path / "s"))

    rows = rows_of(tmp_path / "s")
    totals = sum_by_round(rows)
    assert rows == switches(made)
    assert [one.round for one in totals] == [1, 2, 3, 4, 5, 6]
    assert 0 < sum(one.large for one in totals) < sum(one.batches for one in totals)
    for one in totals:
        assert f"{one.round}  " in told.out
        assert f"{100 * one.share:.1f}" in told.out
    assert describe_switches(totals) in told.out
    assert "20 in place of 1, where the loss is above 400 times the divergence" in told.out
    assert (tmp_path / "s" / command.FIGURE).read_bytes().startswith(PNG)
    assert contents(made) == before


def test_the_counts_are_those_of_the_rule_written_out(made: Path) -> None:
    """The first client of the first round, made again step by step with plain SGD."""
    setup = make_setup(RunDirectory(made).experiment())
    client = RunDirectory(made).metrics()[1]["cohort"][0]
    objective, train = setup.experiment.method.objective, setup.experiment.train
    assert isinstance(objective, AugMix)
    one = LoopEngine(setup).assign(TrainTask(0, setup.weights(), None, setup.sizes(0)), client)
    x, y = setup.samples(client, one.samples)
    model, large = setup.model, 0
    for step, (a, b) in enumerate(zip(one.bounds[:-1], one.bounds[1:], strict=True)):
        rows = torch.from_numpy(one.order[a:b])
        images, labels = setup.scale(x[rows]), y[rows]
        row = {name: torch.from_numpy(values[step][: b - a]) for name, values in one.drawn.items()}
        views = [setup.scale.from_unit(v) for v in augmix(setup.scale.to_unit(images), row)]
        p = [model(v).double().softmax(-1) for v in (images, *views)]
        q = sum(p) / 3
        divergence = sum((one * (one / q).log()).sum(-1) for one in p).mean() / 3
        own = torch.nn.functional.cross_entropy(model(images), labels)
        took = bool(own > objective.threshold * divergence)
        large += took
        loss = own + (objective.large_lambda if took else objective.lam) * divergence
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data.sub_(train.lr * gradient)

    first = switches(made)[0]

    assert (first.client, first.batches, first.large) == (client, len(one.bounds) - 1, large)


def test_totals_and_words() -> None:
    rows = [ClientSwitches(*row) for row in ((1, 0, 3, 3), (1, 4, 2, 2), (2, 1, 4, 1), (3, 0, 3, 0))]

    assert sum_by_round(rows) == [RoundSwitches(1, 5, 5), RoundSwitches(2, 4, 1), RoundSwitches(3, 3, 0)]
    assert (RoundSwitches(2, 4, 1).share, RoundSwitches(2, 0, 0).share) == (0.25, 0)
    for large, words in {
        (4, 1, 0): "large in all batches of rounds 1 to 1; last in round 2; 5 of 12 batches in all",
        (4, 4): "large in all batches of rounds 1 to 2; 8 of 8 batches in all",
        (1, 0): "last in round 1; 1 of 8 batches in all",
    }.items():
        assert describe_switches([RoundSwitches(i, 4, n) for i, n in enumerate(large, 1)]) == words


def test_ctrl_c_ends_it_with_the_rounds_so_far(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = switches(made)

    def stopping(path: Path, on_round: Any) -> None:
        on_round([row for row in whole if row.round == 1])
        on_round([row for row in whole if row.round == 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "switches", stopping)

    told = here("switches", made, "--out", tmp_path / "s")

    assert (told.code, "Traceback" in told.err) == (130, False)
    assert "stopped after 2 of 6 rounds" in told.err
    assert rows_of(tmp_path / "s") == [row for row in whole if row.round <= 2]


def test_a_base_that_mixes_is_counted_too(tmp_path: Path) -> None:
    method = {"name": "fedmix+fed-augmix", "sharing": {"samples_per_mean": 5}, "objective": METHOD["objective"]}

    rows = switches(tiny_run(tmp_path, method=method).path)

    assert [row.round for row in rows] == [1, 1, 2, 2]
    assert all(0 <= row.large <= row.batches for row in rows)


def test_runs_that_switch_nothing_are_refused(tmp_path: Path) -> None:
    tiny_run(tmp_path / "plain", rounds=0)

    refused(here("switches", tmp_path / "plain"), "'plain'", "switches no lambda")
    refused(here("switches", tmp_path / "nothing"), "no such run")
    refused(here("switches", tmp_path / "plain", "--out", "/proc/none"), "--out /proc/none")
