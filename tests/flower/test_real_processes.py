"""One federation of real processes: SuperLink and SuperNodes on loopback, TLS, authenticated nodes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli_helpers import call, status, succeeded, write
from flower_helpers import by_loop, experiment
from flower_sites import audit, site_files

from fedblend.flower.app_folder import FederationLimits, write_app
from fedblend.flower.credentials import make_site_key
from fedblend.flower.trial import LoopbackTrial
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

LIMIT_S = 1800
"""Bound on the whole run, far more than a loaded machine needs; the test waits for the run's end."""


@pytest.mark.slow
def test_real_sites_give_the_loops_weights_and_an_unknown_key_is_refused(tmp_path: Path) -> None:
    asked = experiment(partition={"name": "iid", "clients": 2}, train={"cohort": 2, "lr": 0.1}, rounds=1)
    configs = site_files(tmp_path, 2)
    with LoopbackTrial(tmp_path / "trial", 2) as trial:
        trial.begin()
        write_app(tmp_path / "app", asked, tmp_path / "run", FederationLimits(deadline=LIMIT_S))
        for client, config in enumerate(configs):
            trial.start_node(client, {"site": config["site"]})
        # It claims to be client 1, with a key that is not registered.
        make_site_key(tmp_path / "stranger")
        shutil.copy(configs[1]["site"], tmp_path / "stranger.toml")
        trial.start_node(1, {"site": str(tmp_path / "stranger.toml")}, tmp_path / "stranger.key", "stranger")
        trial.submit(tmp_path / "app").wait(LIMIT_S)
        listed = trial.flwr("supernode", "list", "trial", "--format", "json")
        stranger = trial.log_of("stranger")

    directory = RunDirectory(tmp_path / "run")
    assert directory.status()["state"] == "done", trial.log_of("run")
    state = checkpoint.read(directory.path)
    assert state is not None
    loop, records = by_loop(asked)
    for name, tensor in loop.weights.items():
        assert (state.weights[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert directory.metrics()[1]["bytes_up"] == records[1]["bytes_up"]
    for client in range(2):
        sent = [(line["kind"], line["round"], line["client"]) for line in audit(tmp_path, client)]
        assert sent == [("weights", 0, client), ("loss", 0, client), ("weights", 0, client)]
    assert listed.count('"node-id"') == 2, listed
    assert "message" not in stranger


@pytest.mark.slow
def test_the_command_for_a_trial_makes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(Path("trial.toml"), {"method": "fedmix", "rounds": 1})

    # From a folder of its own, with paths that are relative to it.
    shown = succeeded(call("federation", "up", file, "--sites", 2)).out

    assert "round 1" in shown
    run = next(Path("runs").rglob("metrics.jsonl")).parent
    assert status(run)["state"] == "done"
    kinds = [
        json.loads(line)["kind"] for line in next(Path("runs").rglob("site-0/*.audit.jsonl")).read_text().splitlines()
    ]
    assert {"means", "weights"} <= set(kinds)
