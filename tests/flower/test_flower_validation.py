"""Validation and metrics at real sites: equal to the loop's, and only where the site's file allows them."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from flower_helpers import by_loop, experiment, federate, fields_only, nodes, spoiling, weights_of
from flower_sites import OwnSite
from helpers import without_machine

from fedblend.core.errors import FedblendError
from fedblend.core.trees import digest_of
from fedblend.data.partitions.prepare import divided
from fedblend.flower.audit import audit_rows
from fedblend.flower.messages import unpack

ASKED: dict[str, Any] = {
    "holdout": 0.2,
    "validation": {"server": 0.1, "clients": 0.2},
    "metrics": ["f1", "auc"],
    "rounds": 1,
}


def close(made: Any, wanted: Any) -> None:
    """Numbers are means of other orders."""
    if isinstance(wanted, dict):
        assert made.keys() == wanted.keys()
        for name, value in wanted.items():
            close(made[name], value)
    else:
        assert made == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_sites_send_the_metrics_that_the_loop_computes(tmp_path: Path) -> None:
    asked = experiment(**ASKED)
    records = federate(nodes(), asked, tmp_path / "run").directory.metrics()

    for made, wanted in zip(without_machine(records), without_machine(by_loop(asked)[1]), strict=True):
        for field in ("accuracy", "metrics", "clients", "client_metrics", "validation"):
            close(made[field], wanted[field])
        assert made["best_round"] == wanted["best_round"]


def test_a_client_that_sends_invalid_metrics_is_counted_without_them(tmp_path: Path) -> None:
    asked = experiment(**{**ASKED, "rounds": 0})

    lie = fields_only(metrics={"f1": "best", "auc": True})
    (record,) = federate(spoiling(2, "evaluate", lie), asked, tmp_path / "run").directory.metrics()
    (honest,) = federate(nodes(), asked, tmp_path / "other").directory.metrics()
    assert record["client_metrics"]["f1"]["tested"] == honest["client_metrics"]["f1"]["tested"] - 1
    assert record["validation"]["clients"]["accuracy"] == honest["validation"]["clients"]["accuracy"]


def test_metrics_leave_only_where_the_sites_file_names_them(site: OwnSite) -> None:
    asked = site.experiment(method="fedavg", **{**ASKED, "holdout": 0.25, "validation": {"clients": 0.25}})
    weights = weights_of(asked)

    def told(split: str) -> dict[str, Any]:
        return site.reply("evaluate", asked, tensors=weights, own=None, split=split)[0]

    assert told("validation").keys() == {"right", "samples"}
    assert [line["kind"] for line in site.log()] == ["scores"]
    # Two samples of each class, of which a mean over classes would tell.
    site.write(allow=["scores", "metrics"])
    assert told("validation")["metrics"].keys() == {"loss"}
    site.write(allow=["scores", "metrics"], min_mean=1)
    assert told("holdout")["metrics"].keys() == {"loss", "f1", "auc"}
    assert [line["kind"] for line in site.log()] == ["scores", "metrics", "scores", "metrics", "scores"]
    site.write(allow=["weights", "metrics"])
    assert "this site's policy lets no scores out" in told("validation")["fault"]
    site.write(allow=["scores", "metrics"], min_mean=21)
    assert told("validation")["fault"].startswith("it keeps for validation 20 samples, and tells of 21 or more")
    assert told("all")["fault"] == "a request that is none: split: 'all' is not valid: input should be " + (
        "'test', 'holdout' or 'validation'"
    )


def test_the_servers_own_samples_are_no_samples_of_the_sites(site: OwnSite) -> None:
    shares = {"server": 0.5, "clients": 0.25}
    told = site.reply("query.hello", site.experiment(method="fedavg", validation=shares))[0]
    assert (told["samples"], told["holds_out"], told["validates"]) == (60, 0, 20)


def test_a_run_with_sites_own_data_validates_at_both_ends(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["weights", "scores", "metrics"])
    grid = site.grid()
    asked = site.experiment(
        method="fedavg", **{**ASKED, "holdout": 0.0, "validation": {"server": 0.25, "clients": 0.25}}
    )
    records = federate(grid, asked, tmp_path / "run").directory.metrics()
    assert records[-1]["validation"]["server"]["samples"] == 20
    clients = records[-1]["validation"]["clients"]
    assert (clients["tested"], clients["samples"]) == (4, 80)
    assert clients["metrics"].keys() == {"f1", "auc"}


@pytest.mark.slow
def test_the_number_of_samples_that_a_site_states_costs_the_server_no_memory(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["weights", "scores"])
    asked = site.experiment(method="fedavg", holdout=0.25, validation={"clients": 0.25}, rounds=1)
    stated = divided(10**8, 0.25, 0.25)
    numbers = dict(zip(("samples", "holds_out", "validates"), stated, strict=True))
    grid = site.grid().lying("query.hello", {2}, fields_only(**numbers))
    grid.lying("evaluate", {2}, fields_only(samples=stated[1], right=7))
    tracemalloc.start()
    try:
        records = federate(grid, asked, tmp_path / "run").directory.metrics()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Less than a byte a sample that the site holds out.
    assert peak < stated[1]
    clients = records[-1]["validation"]["clients"]
    assert (clients["tested"], clients["samples"]) == (4, stated[2] + 3 * 20)
    assert clients["accuracy"] < 1e-5


@pytest.mark.slow
def test_the_audit_log_tells_which_scores_of_which_round_left(tmp_path: Path) -> None:
    site = OwnSite(tmp_path, allow=["weights", "scores", "metrics"])
    grid = site.grid()
    asked = site.experiment(method="fedavg", holdout=0.25, validation={"clients": 0.25}, rounds=2)
    federate(grid, asked, tmp_path / "run")
    sent = [unpack(reply.content)[0] for _, kind, _, reply in grid.kept if kind == "evaluate"]
    lines = [line for line in site.log() if line["kind"] == "scores"]
    # The untrained model is evaluated at the beginning of the first round.
    order = {(split, round): 0 for split in ("holdout", "validation") for round in (0, 1)}
    for line in lines:
        order[line["split"], line["round"]] += 1
    assert order == {("holdout", 0): 8, ("holdout", 1): 4, ("validation", 0): 8, ("validation", 1): 4}
    for line, told in zip(lines, sent, strict=True):
        counts = {"right": torch.tensor(told["right"]), "samples": torch.tensor(told["samples"])}
        assert (line["bytes"], line["sha256"]) == (16, digest_of(counts))
    assert {line["split"] for line in site.log() if line["kind"] == "metrics"} == {"holdout", "validation"}
    assert audit_rows(lines)[0][4] == f"{lines[0]['split']}: right 1, samples 1"


def test_a_devices_model_has_no_metrics(tmp_path: Path) -> None:
    asked = experiment("fd", metrics=["f1"])
    with pytest.raises(FedblendError, match="evaluate_model: a device's model stays at its site"):
        federate(nodes(), asked, tmp_path / "run")
