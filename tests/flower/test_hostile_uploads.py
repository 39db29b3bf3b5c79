"""Uploads of finite numbers that make a round's model, or its loss, overflow."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_helpers import ALL, experiment, federate, fields_only, is_loops, nodes, spoiling, tensors_only
from test_flower_faults import extras_only

from fedblend.core.errors import FedblendError
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import pack
from fedblend.flower.server import run

pytestmark = pytest.mark.usefixtures("no_waits")


def filled(value: float) -> Any:
    return tensors_only(lambda n, t: torch.full_like(t, value))


SQUARES = "the squares of the aggregate's numbers are not finite"
OVERFLOWING = {
    "model": ("fedavg", filled(3e38), SQUARES),
    "by steps": ({"name": "fedavg", "aggregator": "fednova"}, filled(3e38), SQUARES),
    "server step": ({"name": "fedavg", "server_step": "fedadam"}, filled(-3e30), SQUARES),
    "loss": ("fedavg", filled(1e18), "the model's loss is not finite"),
    "beside a model": ("scaffold", extras_only(lambda t: torch.full_like(t, 3e38)), SQUARES),
}


@pytest.mark.parametrize("case", OVERFLOWING)
def test_a_finite_upload_that_makes_the_model_overflow_is_left_out(case: str, tmp_path: Path) -> None:
    method, change, reason = OVERFLOWING[case]
    asked = experiment(method, train=ALL, rounds=2)

    finished = federate(spoiling(2, "train", change), asked, tmp_path / "run")

    for record in finished.directory.metrics()[1:]:
        ((client, told),) = [(one["client"], one["reason"]) for one in record["refused"]]
        assert (client, reason in told, record["uploads"]) == (2, True, 3)
    without = federate(spoiling(2, "train", lambda w, t: pack({"fault": "no"})), asked, tmp_path / "b")
    for table in ("weights", "server_state"):
        made, expected = getattr(finished.state, table), getattr(without.state, table)
        assert all(torch.equal(made[name], tensor) for name, tensor in expected.items())


def test_a_robust_aggregator_keeps_an_upload_that_it_bounds(tmp_path: Path) -> None:
    asked = experiment({"name": "fedavg", "aggregator": "median"}, train=ALL, rounds=1)
    record = federate(spoiling(2, "train", filled(3e38)), asked, tmp_path).directory.metrics()[1]
    assert record["uploads"] == 4
    assert "refused" not in record


def test_too_few_uploads_without_the_one_that_overflows_stop_the_run_before_the_round(tmp_path: Path) -> None:
    asked = experiment(train=ALL, rounds=2, min_uploads=4)
    told = (
        r"round 1: 3 good uploads of 4, but min_uploads is 4 \(client 2: with its changes of up to 3e\+38 .*\); earlier"
    )
    with pytest.raises(FedblendError, match=told):
        federate(spoiling(2, "train", filled(3e38)), asked, tmp_path)

    finished = federate(nodes(), asked, tmp_path)

    is_loops(finished, asked)


@pytest.mark.parametrize("value", [3e38, 1e18])
def test_a_round_whose_uploads_all_overflow_stops_the_run_before_it(value: float, tmp_path: Path) -> None:
    asked, grid = experiment(train=ALL, rounds=2), nodes()
    grid.changing("train", {0, 1, 2, 3}, lambda tensors: {n: torch.full_like(t, value) for n, t in tensors.items()})
    with pytest.raises(
        FedblendError, match=r"round 1: .* not finite, with the uploads of clients 0, 1, 2, 3 .*earlier"
    ):
        federate(grid, asked, tmp_path)

    finished = federate(nodes(), asked, tmp_path)

    is_loops(finished, asked)


def test_a_masked_sum_that_overflows_stops_the_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    method = {"name": "fedavg", "aggregator": {"name": "secure-mean", "range": 1e22}}
    asked = experiment(method, train=ALL, rounds=1)
    wrong = tensors_only(lambda n, t: t + 2**30 if n == "masked" else t)
    with pytest.raises(FedblendError) as raised:
        run(spoiling(2, "train", wrong), asked, tmp_path, FederationLimits(4, 5))
    told = r"round 1: the squares .* not finite, with the uploads of clients 0, 1, 2, 3, which are masked"
    assert re.match(told, str(raised.value))
    assert run(nodes(), asked, tmp_path, FederationLimits(4, 5)).state.round == 1


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ({"loss": "x" * 10**4}, "its loss is 'xxx"),
        ({"loss": "x" * 10**6}, "it sent 1,000,0.* characters beside its tensors; valid: 100,000 at most"),
        ({"more": "x" * 10**6}, "it sent 1,000,0.* characters beside its tensors; valid: 100,000 at most"),
    ],
)
def test_words_of_a_site_are_short_in_the_record(words: dict[str, str], reason: str, tmp_path: Path) -> None:
    made = federate(spoiling(2, "train", fields_only(**words)), experiment(train=ALL, rounds=1), tmp_path)
    ((client, told),) = [(one["client"], one["reason"]) for one in made.directory.metrics()[1]["refused"]]
    assert client == 2
    assert re.match(reason, told)
    assert len(told) < 400


@pytest.mark.parametrize("aggregator", ["mean", "median"])
def test_large_numbers_with_a_finite_loss_stop_the_next_round_of_a_mean(aggregator: str, tmp_path: Path) -> None:
    asked = experiment({"name": "fedavg", "aggregator": aggregator}, train=ALL, rounds=2, min_uploads=2)
    grid = spoiling(2, "train", filled(1e9))
    if aggregator == "median":
        assert federate(grid, asked, tmp_path).state.round == 2
    else:
        with pytest.raises(FedblendError, match=r"round 2: [01] good uploads of 4"):
            federate(grid, asked, tmp_path)
