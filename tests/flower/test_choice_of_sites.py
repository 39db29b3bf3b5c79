"""Sites are chosen and asked for losses as simulated clients are; what a site allows, counts and refuses of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flower_helpers import ALL, Counting, Nodes, by_loop, experiment, federate, is_loops, nodes, refusals, weights_of
from flower_sites import OwnSite, audit, site_files
from flwr.app import RecordDict

from fedblend import part
from fedblend.core.errors import FedblendError
from fedblend.core.selection import Selection, SelectionContext
from fedblend.flower.messages import unpack

pytestmark = pytest.mark.usefixtures("no_waits")

POWER = {"name": "power-of-choice", "candidates": 3}
TWO = {**ALL, "cohort": 2}
ALLOWED = ["weights", "loss", "local-loss"]


@part("selection", "last-first")
class LastFirst(Selection):
    """Takes the last clients."""

    def choose(self, context: SelectionContext) -> Any:
        return context.clients[-context.number :]


@pytest.mark.parametrize("selection", [POWER, "loss", "test_choice_of_sites:LastFirst"])
def test_sites_are_chosen_as_simulated_clients_are(selection: Any, tmp_path: Path) -> None:
    asked, grid = experiment(selection=selection, rounds=3, train=TWO), nodes(kind=Counting)
    finished = federate(grid, asked, tmp_path)
    is_loops(finished, asked)
    by_sites, alone = finished.directory.metrics(), by_loop(asked)[1]
    for field in ("cohort", "asked", "bytes_up", "bytes_down"):
        assert [one.get(field) for one in by_sites] == [one.get(field) for one in alone]
    # What was counted was sent: sites that stated a loss have the round's model.
    counted = [sum(sum(one[field].values()) for one in by_sites) for field in ("bytes_down", "bytes_up")]
    losses = sum(kind == "query.loss" for _, kind, *_ in grid.kept)
    assert grid.exchanged() == counted
    assert losses == (9 if selection == POWER else 0)
    # A selection is the server's own: sites need not trust it.
    for _, _, message, _ in grid.kept:
        assert unpack(message.content)[0]["experiment"]["selection"] == "uniform"


def test_a_site_states_its_loss_only_if_its_file_allows_it(tmp_path: Path) -> None:
    asked = experiment(selection=POWER, train=TWO, fraction=1.0)
    with pytest.raises(FedblendError, match=r"round 1: no site states its loss \(.*lets no local-loss out"):
        federate(Nodes(site_files(tmp_path / "none", 4)), asked, tmp_path / "a")
    configs = site_files(tmp_path / "some", 4, {2: {}}, allow=ALLOWED)
    finished = federate(Nodes(configs), asked, tmp_path / "b")
    for record in finished.directory.metrics()[1:]:
        assert 2 not in record["cohort"]
        assert all(one["client"] == 2 for one in record["asked"].get("refused", ()))
    lines = [line for line in audit(tmp_path / "some", 0) if line["kind"] == "local-loss"]
    assert {(line["bytes"], tuple(line["tensors"]["loss"])) for line in lines} == {(8, ("float64",))}


def test_a_restarted_site_receives_the_model_again(tmp_path: Path) -> None:
    asked, grid = experiment(selection=POWER, train=TWO, rounds=1), nodes()
    answer = grid._answer

    def forgetting(node: int, message: Any) -> None:
        if message.metadata.message_type == "train":
            grid.contexts[node].state = RecordDict()
        answer(node, message)

    grid._answer = forgetting
    finished = federate(grid, asked, tmp_path)
    is_loops(finished, asked)
    assert refusals(finished) == {}


def test_what_a_site_with_data_of_its_own_states(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=ALLOWED, rounds=2)
    asked = site.experiment(selection=POWER, method="fedavg", train=TWO)
    weights = weights_of(asked)
    fields, tensors = site.reply("query.loss", asked, tensors=weights)
    assert "fault" not in fields
    assert float(tensors["loss"]) == float(f"{float(tensors['loss']):.3g}")
    assert "gives them once" in site.reply("query.loss", asked, tensors=weights)[0]["fault"]
    assert "fault" not in site.reply("query.loss", asked, round=1, tensors=weights)[0]
    assert "has sent 2 losses in all runs" in site.reply("query.loss", asked, round=2, tensors=weights)[0]["fault"]
    # A few samples more: the difference of two losses would tell of these.
    site.write(rounds=9)
    site.hold(79)
    assert "fault" in site.reply("query.loss", asked, round=3, tensors=weights)[0]
    few = OwnSite(tmp_path / "few", samples=19, allow=ALLOWED)
    told = few.reply("query.loss", few.experiment(method="fedavg"), tensors=weights)[0]["fault"]
    assert "its mean loss would be of 19 samples, and it tells of 20 or more together" in told


@pytest.mark.parametrize("late", ["partial", "drop", "next-round"])
def test_slow_clients_over_flower(late: str, tmp_path: Path) -> None:
    slow = {"epochs": [1, 2, 1.5, 2], "late": late}
    asked = experiment(slow=slow, train={**ALL, "epochs": 2}, rounds=3)
    finished = federate(nodes(), asked, tmp_path)
    is_loops(finished, asked)
    assert [one.get("late") for one in finished.directory.metrics()[1:]] == [
        one.get("late") for one in by_loop(asked)[1][1:]
    ]
