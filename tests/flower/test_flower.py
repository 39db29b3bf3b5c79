"""A federation over Flower gives the loop engine's weights, and refuses what is wrong."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from flower_helpers import (
    ALL,
    POWER,
    TWO,
    Nodes,
    by_loop,
    experiment,
    federate,
    fields_only,
    is_loops,
    nodes,
    one_round,
    refusals,
    tensors_only,
    weights_of,
)
from flower_sites import OwnSite, audit, site_files, sites_with_data
from helpers import same

from fedblend import part
from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError
from fedblend.core.evaluation import over_clients
from fedblend.core.loop import RoundLoop
from fedblend.core.trees import digest_of
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.make_setup import make_setup
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.server import connect

KEPT: list[dict[int, Any]] = []


@part("callback", "keeps-uploads")
class KeepsUploads(Callback):
    """Keeps each round's uploads, by client."""

    reads_uploads = True

    def on_updates(self, task: Any, result: Any) -> None:
        """Keep them."""
        KEPT.append(dict(result.uploads))


def test_a_callback_at_the_server_reads_each_sites_upload(tmp_path: Path) -> None:
    KEPT.clear()
    asked = experiment(rounds=1, callbacks=["keeps-uploads"])
    federate(nodes(), asked, tmp_path)
    made = make_setup(asked)
    loop = RoundLoop(made, LoopEngine(made), asked.callbacks)
    loop.run(*loop.start())
    sites, alone = KEPT
    assert list(sites) == list(alone)
    assert all(same(sites[client], upload) for client, upload in alone.items())


def test_the_audit_log_records_every_payload_that_left(tmp_path: Path) -> None:
    grid = Nodes(site_files(tmp_path, 4))
    federate(grid, experiment("fedmix", train=ALL), tmp_path / "run")
    for client in range(4):
        left = [(kind, up) for who, kind, _, up in grid.sent if who == client and kind != "query.hello"]
        lines = audit(tmp_path, client)
        losses = [line for line in lines if line["kind"] == "loss"]
        assert [(line["round"], line["bytes"]) for line in losses] == [(0, 8), (1, 8)]
        begun = [(line["kind"], line["round"], line["bytes"]) for line in lines if line.get("begun")]
        assert begun == [("weights", 0, 0), ("weights", 1, 0)]
        lines = [line for line in lines if line["kind"] != "loss" and not line.get("begun")]
        kinds = {"query.share": "means", "train": "weights"}
        assert [(kinds[kind], up) for kind, up in left] == [(line["kind"], line["bytes"]) for line in lines]
        assert [line["round"] for line in lines] == [0, 0, 1]
        assert lines[0]["tensors"] == {"x": ["float32", 1, 1, 8, 8], "y": ["float32", 1, 10]}
        # Written anew from what the tensors are: name, type, shape, bytes.
        assert len({line["sha256"] for line in lines}) == 3


def test_a_digest_covers_names_shapes_types_and_numbers() -> None:
    tensor = torch.arange(4.0)
    text = b"a\0<f4\0[4]\0" + tensor.numpy().tobytes() + b"b\0<f4\0[4]\0" + tensor.numpy().tobytes()
    assert digest_of({"b": tensor, "a": tensor}) == hashlib.sha256(text).hexdigest()


def test_a_site_refuses_kinds_that_its_file_does_not_allow(tmp_path: Path) -> None:
    grid = Nodes(site_files(tmp_path, 4, allow=["weights"]))
    why = r"no site shares anything \(clients 0, 1, 2, 3: this site's policy lets no"
    with pytest.raises(FedblendError, match=why):
        federate(grid, experiment("fedmix"), tmp_path / "run")
    assert [(line["kind"], "lets no means out" in line["refused"]) for line in audit(tmp_path, 0)] == [("means", True)]
    assert not any(up for _, _, _, up in grid.sent)
    # One that refuses is left out.
    configs = site_files(tmp_path / "one", 4, {2: {"allow": ["weights"]}})
    assert federate(Nodes(configs), experiment("fedmix"), tmp_path / "b").state.entries.owner.tolist() == [0, 1, 3]


def test_a_site_shares_no_mean_of_fewer_samples_than_its_own_minimum(tmp_path: Path) -> None:
    method = {"name": "fedmix", "sharing": {"name": "means", "samples_per_mean": 10}}
    asked = experiment(method, policy={"min_mean": 1})
    sizes = make_setup(asked).population.sizes
    assert all(size % 10 for size in sizes)
    for minimum, each in ((1, -(-sizes // 10)), (10, sizes // 10)):
        folder = tmp_path / str(minimum)
        finished = federate(Nodes(site_files(folder, 4, min_mean=minimum)), asked, folder / "run")
        assert np.bincount(finished.state.entries.owner).tolist() == each.tolist()


def test_a_site_limits_its_rounds_over_all_runs(tmp_path: Path) -> None:
    configs = site_files(tmp_path, 4, {1: {"rounds": 2}})
    told = [refusals(federate(Nodes(configs, i), one_round(), tmp_path / f"run-{i}")) for i in range(3)]
    assert [list(one) for one in told] == [[], [], [1]]
    assert "has trained in 2 rounds" in told[2][1]


@pytest.mark.slow
def test_a_site_whose_file_has_no_rounds_trains_in_a_thousand_over_all_runs(tmp_path: Path) -> None:
    configs, two = site_files(tmp_path, 4), one_round(rounds=2)
    federate(Nodes(configs), one_round(), tmp_path / "first")
    # Client 0 has trained in 1,000 rounds of many runs, client 1 in 999 rounds, both with version 0.2.
    for client, number in ((0, 1000), (1, 999)):
        (line,) = [line for line in audit(tmp_path, client) if line.get("begun")]
        shutil.rmtree(tmp_path / f"audit-{client}.shared")
        line.pop("chain")
        lines = [{**line, "run": f"another name/{100 + i}"} for i in range(number)]
        (tmp_path / f"audit-{client}.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines))

    second = federate(Nodes(configs, 2), two, tmp_path / "second")
    assert [list(refusals(second, round)) for round in (1, 2)] == [[0], [0, 1]]
    told = "this site has trained in 1000 rounds, and takes part in no more (rounds in its site file; default: 1000)"
    assert refusals(second)[0] == told
    (tmp_path / "more.toml").write_text('rounds = 1002\naudit = "audit-0.jsonl"\n')
    configs[0]["site"] = str(tmp_path / "more.toml")
    third = federate(Nodes(configs, 3), two, tmp_path / "third")
    assert [list(refusals(third, round)) for round in (1, 2)] == [[1], [1]]


def test_a_site_applies_its_own_protection(tmp_path: Path) -> None:
    start = make_setup(one_round()).weights()

    def moved(folder: str, **table: Any) -> dict[str, torch.Tensor]:
        configs = site_files(tmp_path / folder, 4, protection={"name": "noise", "clip": 1e-3, **table})
        state = federate(Nodes(configs), one_round(), tmp_path / folder / "run").state
        return {name: state.weights[name] - start[name] for name in start}

    norm = torch.cat([t.flatten() for t in moved("clip").values()]).norm()
    assert 0 < float(norm) <= 1e-3
    # Its noise is not the run's own: two runs of one experiment get other noise.
    first, second = (moved(name, multiplier=1.0) for name in "ab")
    assert all(not torch.equal(first[name], second[name]) for name in first)


def test_noise_of_the_experiment_is_drawn_from_system_entropy(tmp_path: Path) -> None:
    noisy = [
        {"protection": {"name": "noise", "scale": 0.1}},
        {"protection": {"name": "noise", "clip": 1.0, "multiplier": 0.1, "side": "server"}},
        {"method": {"name": "fedmix", "sharing": {"name": "means", "noise": 0.1}}},
    ]
    for i, changes in enumerate(noisy):
        a, b = (federate(nodes(), experiment(**changes), tmp_path / f"{i}{k}").state.weights for k in "ab")
        assert not any(torch.equal(a[name], b[name]) for name in a), changes


def test_sites_with_their_own_data_equal_a_partition_of_the_same_data(tmp_path: Path) -> None:
    asked = experiment("fedmix", fraction=1.0)
    finished = federate(Nodes(sites_with_data(tmp_path, asked)), asked, tmp_path / "run")
    is_loops(finished, asked)
    assert finished.directory.split()["counts"] == []
    assert finished.directory.facts()["clients"]["largest"] == int(make_setup(asked).population.sizes.max())


def test_samples_that_clients_hold_out_are_scored_at_their_sites(tmp_path: Path) -> None:
    asked, grid = experiment(holdout=0.3, rounds=1), nodes()
    made = federate(grid, asked, tmp_path).directory.metrics()
    assert [line["clients"] for line in made] == [line["clients"] for line in by_loop(asked)[1]]
    assert {up for _, kind, _, up in grid.sent if kind == "evaluate"} == {0}


def test_invalid_scores_of_a_site_are_left_out(tmp_path: Path) -> None:
    asked = experiment(holdout=0.3, rounds=0)
    setup = make_setup(asked)
    owner, right = setup.population.owners("holdout"), LoopEngine(setup).score(setup.weights(), "holdout").right
    others = over_clients(owner[owner != 2], right[owner != 2], setup.population.sizes)
    no_count = {"right": None, "metrics": {"loss": 1.0}}
    lies = [{"samples": 1}, {"right": -1}, {"right": 10**6}, {"right": True}, {"fault": "no"}, no_count]
    for number, lie in enumerate(lies):
        grid = nodes().lying("evaluate", {2}, fields_only(**lie))
        (record,) = federate(grid, asked, tmp_path / str(number)).directory.metrics()
        assert record["clients"] == others, lie
        with pytest.raises(FedblendError, match="holdout: no client sent valid scores"):
            federate(nodes().lying("evaluate", range(4), fields_only(**lie)), asked, tmp_path / f"{number}-all")


def test_invalid_scores_of_a_devices_own_model_end_the_run(tmp_path: Path) -> None:
    asked = experiment("fd", evaluate_model="device", rounds=1)
    for number, change in enumerate((lambda n, t: t[:-1], lambda n, t: t.double())):
        grid = nodes().lying("evaluate", range(4), tensors_only(change))
        with pytest.raises(FedblendError, match="could not be evaluated: its scores are not of this"):
            federate(grid, asked, tmp_path / str(number))


def test_sites_that_begin_with_models_of_their_own_cannot_begin_with_an_earlier_run() -> None:
    made = make_setup(experiment(method="fd", start="earlier"))
    with pytest.raises(FedblendError, match="start: sites that begin with models of their own"):
        connect(cast(Any, None), made, FederationLimits())


# Sites are chosen and asked for losses as simulated clients are -------------------------------------------


ALLOWED = ["weights", "loss", "local-loss"]


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
