"""Faults between real processes: a SuperLink and SuperNodes on loopback, sites that misbehave, and real kills."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
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

from fedblend.flower.app_folder import FederationLimits, write_app
from fedblend.flower.messages import pack, unpack
from fedblend.flower.server import run
from fedblend.flower.trial import LoopbackTrial
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.files import write_json

PATIENCE_S = 900
"""How long the test waits for an event before it gives up; far more than a loaded machine needs."""

SITES = 3
GONE = ("its site is not connected", "its site is no longer connected")
"""What is said of a site that left: before its message was sent, or after."""


class Stage:
    """A trial federation whose sites follow a plan, and the run that it makes."""

    def __init__(self, folder: Path, trial: LoopbackTrial) -> None:
        self.folder, self.trial, self.run = folder, trial, RunDirectory(folder / "run")
        self.asked = experiment(
            partition={"name": "iid", "clients": SITES}, train={"cohort": SITES, "lr": 0.1}, rounds=4, fraction=0.1
        )

    def plan(self, **told: str) -> None:
        """What sites do from now on: ``c1r0="nan"`` for client 1 in round 0."""
        table = {name[1:].replace("r", "-"): what for name, what in told.items()}
        for mark in self.folder.glob("at-work-*"):
            mark.unlink()
        write_json(self.folder / "plan.json", table)

    def at_work(self, client: int, round: int) -> Callable[[], bool]:
        return (self.folder / f"at-work-{client}-{round}").exists

    def made(self, round: int) -> Callable[[], bool]:
        """Whether a round is in the metrics."""
        return lambda: len(self.run.metrics()) > round

    def begin(self, min_sites: int, deadline: float) -> None:
        """Have the SuperLink run the app, in place of whatever ran before."""
        if "run" in self.trial.processes:
            self.trial.stop_one("run", kill=True)
        write_app(self.folder / "app", self.asked, self.run.path, FederationLimits(min_sites, deadline))
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

    def apps(self) -> list[int]:
        """The ClientApps that are at work."""
        return [pid for pid, words in commands() if any("flwr-clientapp" in word for word in words) and self._ours(pid)]

    def _ours(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return f"{flower_rogue.CUES}={self.folder}\0" in (Path("/proc") / str(pid) / "environ").read_text()
        return False

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
    return run(grid, stage.asked, folder, FederationLimits(deadline=5)).state.weights


@pytest.mark.slow
def test_a_run_goes_on_through_all_faults_of_sites_and_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("import flower_rogue\n")
    paths = [str(tmp_path), str(Path(flower_rogue.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    monkeypatch.setenv(flower_rogue.CUES, str(tmp_path))
    with LoopbackTrial(tmp_path / "trial", SITES) as trial:
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

        # Round 1: site 1 sends NaN, site 2 another shape. Round 2: the server's app is killed while site 0 works.
        stage.plan(c1r0="nan", c2r0="shape", c0r1="wait")
        for site in range(SITES):
            trial.start_node(site, {})
        stage.begin(2, deadline)
        stage.wait(stage.at_work(0, 1), "site 0 at work in round 2")
        stage.kill_server_app()
        stage.wait_for_end("killed")
        assert [line["round"] for line in stage.run.metrics()] == [0, 1]

        # Round 2 again, from the checkpoint. Round 3: site 2 is down. Round 4: the SuperLink is killed.
        stage.plan(c0r3="wait")
        stage.begin(2, deadline)
        stage.wait(stage.made(2), "round 2")
        trial.stop_one("site-2")
        stage.wait(stage.made(3), "round 3")
        trial.start_node(2, {})
        stage.wait(stage.at_work(0, 3), "site 0 at work in round 4")
        trial.stop_one("superlink", kill=True)
        stage.wait_for_end("killed", "stopped")
        assert [line["round"] for line in stage.run.metrics()] == [0, 1, 2, 3]
        stage.plan()
        stage.wait(lambda: not stage.apps(), "the sites' rest")

        # Round 4 again, with a new SuperLink that the sites find by themselves: one is too slow, one killed at work.
        trial.start_link()
        stage.plan(c1r3="wait", c2r3="wait")
        stage.begin(2, deadline)
        stage.wait(stage.at_work(2, 3), "site 2 at work in round 4")
        trial.stop_one("site-2", kill=True)
        stage.wait_for_end("done")

    late = f"no answer within {deadline:g} seconds (deadline)"
    lines = stage.run.metrics()
    rounds = [{one["client"]: one["reason"] for one in line.get("refused", ())} for line in lines]
    assert [list(refused) for refused in rounds] == [[], [1, 2], [], [2], [1, 2]]
    assert [line.get("uploads") for line in lines] == [None, 1, 3, 2, 1]
    assert "holds NaN or infinity" in rounds[1][1]
    assert "is of shape" in rounds[1][2]
    assert rounds[3][2] in GONE
    assert rounds[4][1] == late
    assert rounds[4][2] in (late, *GONE)
    state, expected = checkpoint.read(stage.run.path), in_memory(stage, tmp_path / "memory")
    assert state is not None
    for name, tensor in expected.items():
        assert (state.weights[name] - tensor).norm() <= 1e-6 * tensor.norm(), name


TRIAL = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # whatever runs the tests may ignore them
from fedblend.flower.trial import LoopbackTrial
from pathlib import Path
with LoopbackTrial(Path(sys.argv[1]), 0) as trial:
    trial.begin()
    print(trial.processes["superlink"].pid, flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_trial_that_is_told_to_end_ends_what_it_started(number: signal.Signals, tmp_path: Path) -> None:
    told = [sys.executable, "-c", TRIAL, str(tmp_path), str(PATIENCE_S)]
    with subprocess.Popen(told, stdout=subprocess.PIPE, text=True) as trial:
        assert trial.stdout is not None
        superlink = int(trial.stdout.readline())
        os.kill(superlink, 0)
        trial.send_signal(number)
        ended = trial.wait(PATIENCE_S)
    try:
        with pytest.raises(ProcessLookupError):
            os.killpg(superlink, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(superlink, signal.SIGKILL)
    assert ended == 128 + number
