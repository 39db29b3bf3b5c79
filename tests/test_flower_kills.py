"""Faults between real processes: a SuperLink and SuperNodes on loopback, sites that misbehave, and real kills."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import flower_rogue
import pytest
import torch

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flower_helpers import Nodes
from flwr.app import Message
from test_flower import experiment, nodes

from fedblend.engines.flower.appfolder import write_app
from fedblend.engines.flower.messages import pack, unpack
from fedblend.engines.flower.server import run
from fedblend.engines.flower.terms import Terms
from fedblend.engines.flower.trial import Trial
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

PATIENCE_S = 900
"""How long the test waits for an event before it gives up; far more than a loaded machine needs."""

SITES = 3
GONE = ("its site is not connected", "its site is no longer connected")
"""What is said of a site that left: before its message was sent, or after."""


class Stage:
    """A trial federation whose sites follow a plan, and the run that it makes."""

    def __init__(self, folder: Path, trial: Trial) -> None:
        self.folder, self.trial, self.run = folder, trial, RunDirectory(folder / "run")
        self.asked = experiment(
            partition={"name": "iid", "clients": SITES}, train={"cohort": SITES, "lr": 0.1}, rounds=4, fraction=0.1
        )

    def plan(self, **told: str) -> None:
        """What sites do: ``c1r0="nan"`` for client 1 in round 0."""
        table = {name[1:].replace("r", "-"): what for name, what in told.items()}
        (self.folder / "plan.json").write_text(json.dumps(table))

    def at_work(self, client: int, round: int) -> Callable[[], bool]:
        return (self.folder / f"at-work-{client}-{round}").exists

    def go(self, client: int, round: int) -> None:
        (self.folder / f"go-{client}-{round}").touch()

    def made(self, round: int) -> Callable[[], bool]:
        """Whether a round is in the metrics."""
        return lambda: len(self.run.metrics()) > round

    def begin(self, min_sites: int, deadline: float) -> None:
        """Have the SuperLink run the app, in place of whatever ran before."""
        if "run" in self.trial.processes:
            self.trial.stop_one("run", kill=True)
        write_app(self.folder / "app", self.asked, self.run.path, Terms(min_sites, deadline))
        self.trial.submit(self.folder / "app")

    def wait(self, event: Callable[[], bool], what: str) -> None:
        end = time.monotonic() + PATIENCE_S
        while not event():
            state = self.run.status()["state"] if RunDirectory.is_run(self.run.path) else ""
            assert time.monotonic() < end, f"{what}: waited in vain; {state}\n{self.trial.log_of('run')[-3000:]}"
            assert state != "failed", f"{what}: {self.run.status()}"
            time.sleep(0.1)

    def kill_server_app(self) -> None:
        """SIGKILL to the ServerApp alone; the SuperLink lives on."""
        where = f"127.0.0.1:{self.trial.port}"
        (found,) = [pid for pid, words in commands() if where in words and any("flwr-serverapp" in w for w in words)]
        os.kill(found, signal.SIGKILL)

    def wait_for_end(self, *states: str) -> None:
        """Wait until no process holds the run, and its state is one of these."""
        self.wait(lambda: self.run.status()["state"] in states and not self.run.is_held(), " or ".join(states))


def commands() -> list[tuple[int, list[str]]]:
    """All processes of this machine, with their command lines."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(entry.name), (entry / "cmdline").read_text().split("\0")))
    return found


def in_memory(stage: Stage, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of the same run in one process, whose server hears nothing of the uploads that were refused."""
    refused = {(one["client"], line["round"] - 1) for line in stage.run.metrics() for one in line.get("refused", ())}

    def spoil(who: int, message: Message, reply: Message) -> Message:
        words, _ = unpack(message.content)
        lost = message.metadata.message_type == "train" and (who, words["round"]) in refused
        return Message(pack({"fault": "refused"}), reply_to=message) if lost else reply

    grid: Nodes = nodes(SITES)
    grid.spoil = spoil
    return run(grid, stage.asked, folder, Terms(deadline=5)).state.weights


def test_a_run_goes_on_through_all_faults_of_sites_and_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import flower_rogue\n")
    paths = [str(tmp_path), str(Path(flower_rogue.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(flower_rogue.CUES, str(tmp_path))
    with Trial(tmp_path / "trial", SITES) as trial:
        stage = Stage(tmp_path, trial)
        trial.begin()
        began = time.monotonic()

        # All sites are down: the run stops, and says which are missing.
        stage.begin(min_sites=SITES, deadline=1)
        stage.wait(lambda: "missing: 0, 1, 2" in trial.log_of("run"), "all sites down")
        told = trial.log_of("run")
        assert "fedblend: error: min_sites: 3, but only 0 of 3 sites are connected after 1 seconds (deadline)" in told
        assert not RunDirectory.is_run(stage.run.path)
        # As slow as the machine is just now.
        deadline = max(15.0, 3 * (time.monotonic() - began))

        # Round 1: site 1 is too slow, site 2 is killed at work.
        stage.plan(c1r0="wait", c2r0="wait", c0r1="wait")
        for site in range(SITES):
            trial.start_node(site, {})
        stage.begin(2, deadline)
        stage.wait(stage.at_work(2, 0), "site 2 at work in round 1")
        trial.stop_one("site-2", kill=True)
        stage.wait(stage.made(1), "round 1")
        stage.go(1, 0)
        trial.start_node(2, {})

        # Round 2: the server's app is killed while site 0 works.
        stage.wait(stage.at_work(0, 1), "site 0 at work in round 2")
        stage.kill_server_app()
        stage.go(0, 1)
        stage.wait_for_end("killed")

        # Round 2 again, from the checkpoint: site 1 sends NaN, site 2 another shape.
        stage.plan(c1r1="nan", c2r1="shape", c0r2="wait")
        stage.begin(2, deadline)
        # Round 3: the SuperLink is killed with all that it started, and started again; sites find it by themselves.
        stage.wait(stage.at_work(0, 2), "site 0 at work in round 3")
        trial.stop_one("superlink", kill=True)
        stage.wait_for_end("killed", "stopped")
        assert stage.run.status()["round"] == 2
        stage.go(0, 2)
        trial.start_link()
        stage.begin(2, deadline)

        # Round 4: site 2 goes down.
        stage.wait(stage.made(3), "round 3")
        trial.stop_one("site-2")
        stage.wait_for_end("done")

    late = f"no answer within {deadline:g} seconds (deadline)"
    rounds = [{one["client"]: one["reason"] for one in line.get("refused", ())} for line in stage.run.metrics()]
    assert rounds[0] == rounds[3] == {}
    assert rounds[1].keys() == {1, 2}
    assert rounds[1][1] == late
    assert rounds[1][2] in (late, *GONE)
    assert rounds[2].keys() == {1, 2}
    assert "holds NaN or infinity" in rounds[2][1]
    assert "is of shape" in rounds[2][2]
    assert rounds[4].keys() == {2}
    assert rounds[4][2] in GONE
    assert [line.get("uploads") for line in stage.run.metrics()] == [None, 1, 1, 3, 2]
    state, expected = checkpoint.read(stage.run.path), in_memory(stage, tmp_path / "memory")
    assert state is not None
    for name, tensor in expected.items():
        assert (state.weights[name] - tensor).norm() <= 1e-6 * tensor.norm(), name
