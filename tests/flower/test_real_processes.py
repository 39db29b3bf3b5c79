"""Federations of real processes on loopback: what they make, faulty sites, and real kills."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flower_rogue
import pytest
from cli_helpers import call, status, succeeded, write
from flower_helpers import by_loop, experiment, federate, nodes
from flower_sites import audit, site_files

from fedblend.core.files import write_json
from fedblend.flower.app_folder import FederationLimits, write_app
from fedblend.flower.credentials import make_site_key
from fedblend.flower.process_guard import PROC, marked_processes
from fedblend.flower.trial import LoopbackTrial
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

pytestmark = pytest.mark.slow
finds_processes = pytest.mark.skipif(not PROC.exists(), reason="finds processes in /proc")

BOUND_S = 3600
"""How long a whole test may take; all else follows events. Far more than a loaded machine needs."""

DEADLINE_S = 600
"""The federation's deadline. No exchange waits for it: the server's clock is set ahead where it is to pass."""

NOT_CONNECTED = ("its site is not connected", "its site is no longer connected")
"""Reasons for a site that left: before its message was sent, or after."""


def has_weights(run: RunDirectory, expected: dict[str, Any], tolerance: float = 0.0) -> None:
    """Assert that a run has ended with these weights, to the last bit without a tolerance."""
    state = checkpoint.read(run.path)
    assert state is not None
    assert set(state.weights) == set(expected)
    for name, tensor in expected.items():
        assert (state.weights[name] - tensor).norm() <= tolerance * tensor.norm(), name


def test_real_sites_give_the_loops_weights_and_an_unknown_key_is_refused(tmp_path: Path) -> None:
    asked = experiment(partition={"name": "iid", "clients": 2}, train={"cohort": 2, "lr": 0.1}, rounds=1)
    configs = site_files(tmp_path, 2)
    with LoopbackTrial(tmp_path / "trial", 2) as trial:
        trial.begin()
        write_app(tmp_path / "app", asked, tmp_path / "run", FederationLimits(deadline=BOUND_S))
        for client, config in enumerate(configs):
            trial.start_node(client, {"site": config["site"]})
        # It claims to be client 1, with a key that is not registered.
        make_site_key(tmp_path / "stranger")
        shutil.copy(configs[1]["site"], tmp_path / "stranger.toml")
        trial.start_node(1, {"site": str(tmp_path / "stranger.toml")}, tmp_path / "stranger.key", "stranger")
        trial.submit(tmp_path / "app").wait(BOUND_S)
        listed = trial.flwr("supernode", "list", "trial", "--format", "json")
        stranger = trial.log_of("stranger")

    directory = RunDirectory(tmp_path / "run")
    assert directory.status()["state"] == "done", trial.log_of("run")
    loop, records = by_loop(asked)
    has_weights(directory, loop.weights, 1e-5)
    assert directory.metrics()[1]["bytes_up"] == records[1]["bytes_up"]
    for client in range(2):
        sent = [(line["kind"], line["round"], line["client"]) for line in audit(tmp_path, client)]
        assert sent == [("weights", 0, client), ("loss", 0, client), ("weights", 0, client)]
    assert listed.count('"node-id"') == 2, listed
    assert "message" not in stranger


def test_the_command_for_a_trial_makes_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(Path("trial.toml"), {"method": "fedmix", "rounds": 1})
    # From a folder of its own, with paths that are relative to it.
    assert "round 1" in succeeded(call("federation", "up", file, "--sites", 2)).out
    assert status(next(Path("runs").rglob("metrics.jsonl")).parent)["state"] == "done"
    (log,) = Path("runs").rglob("site-0/*.audit.jsonl")
    assert {"means", "weights"} <= {json.loads(line)["kind"] for line in log.read_text().splitlines()}


def wait_for(event: Callable[[], bool], what: str, end: float, details: Callable[[], str] = str) -> None:
    """Wait for an event until ``end`` at most."""
    while not event():
        assert time.monotonic() < end, f"{what}: did not happen\n{details()}"
        time.sleep(0.1)


class PlannedTrial:
    """A trial federation whose sites and server follow a plan (:mod:`flower_rogue`), and its run."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, sites: int, rounds: int, **changes: Any) -> None:
        # Processes that start from now on read the plans in this folder.
        (folder / "sitecustomize.py").write_text("import flower_rogue\n")
        monkeypatch.syspath_prepend(str(folder))
        assert str(Path(flower_rogue.__file__).parent) in sys.path
        monkeypatch.setenv(flower_rogue.CUES, str(folder))
        self.folder, self.trial, self.sites = folder, LoopbackTrial(folder / "trial", sites), sites
        self.run, self.end = RunDirectory(folder / "run"), time.monotonic() + BOUND_S
        # Each message starts a process, which imports PyTorch: models are scored at the end only.
        self.asked = experiment(
            partition={"name": "iid", "clients": sites}, train={"cohort": sites, "lr": 0.1},
            rounds=rounds, eval_every=rounds, fraction=0.1, **changes,
        )  # fmt: skip

    def plan(self, **entries: str) -> None:
        """Write the plan: ``client1_0="nan"`` for client 1 in round 0, ``server_3="1"`` for the server in round 3."""
        for mark in self.folder.glob("at-work-*"):
            mark.unlink()
        table = {name.removeprefix("client").replace("_", "-"): entry for name, entry in entries.items()}
        write_json(self.folder / "plan.json", table)

    def at_work(self, client: int, round: int) -> Callable[[], bool]:
        return (self.folder / f"at-work-{client}-{round}").exists

    def recorded(self, round: int) -> Callable[[], bool]:
        """Whether a round is in the metrics."""
        return lambda: len(self.run.metrics()) > round

    def begin(self, min_sites: int, deadline: float = DEADLINE_S) -> None:
        """Submit the app again."""
        if "run" in self.trial.processes:
            self.trial.stop_one("run", kill=True)
        write_app(self.folder / "app", self.asked, self.run.path, FederationLimits(min_sites, deadline))
        self.trial.submit(self.folder / "app")

    def wait(self, event: Callable[[], bool], what: str, awaited: Sequence[str] = ()) -> None:
        """Wait for an event; a run that failed, or is done without it, ends the test, but for ``awaited`` states."""

        def details() -> str:
            refused = [line.get("refused") for line in self.run.metrics()]
            return f"refused: {refused}\n{self.trial.log_of('run')[-3000:]}"

        def happened() -> bool:
            state = self.run.status()["state"] if RunDirectory.is_run(self.run.path) else ""
            if event():
                return True
            assert state not in {"failed", "done"} - {*awaited}, f"{what}: the run is {state}\n{details()}"
            return False

        wait_for(happened, what, self.end, details)

    def kill_server_app(self) -> None:
        """SIGKILL the ServerApp; the SuperLink keeps running."""
        address = f"127.0.0.1:{self.trial.port}"
        (server_app,) = [pid for pid, words in self.commands("flwr-serverapp") if address in words]
        os.kill(server_app, signal.SIGKILL)

    def commands(self, program: str) -> list[tuple[int, list[str]]]:
        """This trial's processes of a program, with their command lines."""
        found = []
        for pid in marked_processes(self.trial.mark):
            with contextlib.suppress(OSError):
                words = (PROC / str(pid) / "cmdline").read_text().split("\0")
                if any(program in word for word in words):
                    found.append((pid, words))
        return found

    def wait_for_end(self, *states: str) -> None:
        """Wait until no process holds the run and its state is one of these."""

        def has_ended() -> bool:
            return self.run.status()["state"] in states and not self.run.is_locked()

        # The state is written while the process still holds the run.
        self.wait(has_ended, " or ".join(states), states)

    def ends_as_in_memory(self, tolerance: float = 0.0) -> None:
        """Assert the weights of the same run in one process, in which the refused uploads do not arrive."""
        grid = nodes(self.sites)
        for line in self.run.metrics():
            for one in line.get("refused", ()):
                grid.silent(one["client"], line["round"] - 1)
        has_weights(self.run, federate(grid, self.asked, self.folder / "memory").state.weights, tolerance)


@finds_processes
def test_a_run_continues_through_all_faults_of_sites_and_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = PlannedTrial(tmp_path, monkeypatch, sites=3, rounds=4)
    with planned.trial as trial:
        trial.begin()

        # All sites are down: the run stops, and its message names the missing sites.
        planned.begin(min_sites=3, deadline=1)
        planned.wait(lambda: "min_sites: 3, but" in trial.log_of("run"), "all sites down", ("failed",))
        log = trial.log_of("run")
        assert "fedblend: error: min_sites: 3, but only 0 of 3 sites are connected after 1 seconds (deadline)" in log
        assert planned.run.status()["state"] == "failed"
        assert not RunDirectory.has_begun(planned.run.path)
        (planned.run.path / "config.toml").unlink()
        # Until the next ServerApp writes its own, on a busy machine after a while.
        (planned.run.path / "status.json").unlink()

        # Round 1: site 1 sends NaN, site 2 another shape. Round 2: the ServerApp is killed while site 0 trains.
        planned.plan(client1_0="nan", client2_0="shape", client0_1="wait")
        for site in range(3):
            trial.start_node(site, {})
        planned.begin(2)
        planned.wait(planned.at_work(0, 1), "site 0 at work in round 2")
        planned.kill_server_app()
        planned.wait_for_end("killed")
        assert [line["round"] for line in planned.run.metrics()] == [0, 1]

        # Round 2 again, from the checkpoint. Round 3: site 2 is down. Round 4: the SuperLink is killed.
        planned.plan(client0_3="wait")
        planned.begin(2)
        planned.wait(planned.recorded(2), "round 2")
        trial.stop_one("site-2")
        planned.wait(planned.recorded(3), "round 3")
        trial.start_node(2, {})
        planned.wait(planned.at_work(0, 3), "site 0 at work in round 4")
        trial.stop_one("superlink", kill=True)
        planned.wait_for_end("killed", "stopped")
        assert [line["round"] for line in planned.run.metrics()] == [0, 1, 2, 3]
        planned.plan()
        planned.wait(lambda: not planned.commands("flwr-clientapp"), "no site at work")

        # Round 4 again, with a new SuperLink, to which the sites reconnect. Site 1 is too slow, site 2 is killed.
        trial.start_link()
        planned.plan(client1_3="wait", client2_3="wait", client0_3="wait")
        planned.begin(2)
        for site in range(3):
            planned.wait(planned.at_work(site, 3), f"site {site} at work in round 4")
        trial.stop_one("site-2", kill=True)
        planned.plan(client1_3="wait", server_3="1")
        planned.wait_for_end("done")

    assert not marked_processes(trial.mark)
    late = f"no answer within {DEADLINE_S:g} seconds (deadline)"
    lines = planned.run.metrics()
    rounds = [{one["client"]: one["reason"] for one in line.get("refused", ())} for line in lines]
    assert [list(refused) for refused in rounds] == [[], [1, 2], [], [2], [1, 2]]
    assert [line.get("uploads") for line in lines] == [None, 1, 3, 2, 1]
    assert "holds NaN or infinity" in rounds[1][1]
    assert "is of shape" in rounds[1][2]
    assert rounds[3][2] in NOT_CONNECTED
    assert rounds[4][1] == late
    assert rounds[4][2] in (late, *NOT_CONNECTED)
    planned.ends_as_in_memory(1e-6)


def times_trained(folder: Path, client: int, round: int) -> int:
    """How often a site has trained in a round, by its audit log."""
    lines = (line for line in audit(folder, client) if line.get("trained") and line["bytes"])
    return sum(line["round"] == round for line in lines)


@finds_processes
def test_a_killed_server_and_a_run_that_stops_for_want_of_uploads_go_on_with_control_variates_of_sites(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [{"site": config["site"]} for config in site_files(tmp_path, 2)]
    planned = PlannedTrial(tmp_path, monkeypatch, sites=2, rounds=4, method="scaffold", min_uploads=2)
    with planned.trial as trial:
        trial.begin()
        for site, config in enumerate(configs):
            trial.start_node(site, config)

        # Round 2: the ServerApp is killed while site 0 trains.
        planned.plan(client0_1="wait")
        planned.begin(2)
        planned.wait(planned.at_work(0, 1), "site 0 at work in round 2")
        planned.wait(lambda: times_trained(tmp_path, 1, 1) == 1, "site 1 has trained in round 2")
        planned.kill_server_app()
        planned.wait_for_end("killed")

        # Round 2 again. Round 3: site 1 is killed while it trains.
        planned.plan(client1_2="wait")
        planned.begin(2)
        planned.wait(planned.at_work(1, 2), "site 1 at work in round 3")
        planned.wait(lambda: times_trained(tmp_path, 0, 2) == 1, "site 0 has trained in round 3")
        trial.stop_one("site-1", kill=True)
        planned.wait_for_end("failed")
        status, kept = planned.run.status(), (planned.run.path / "metrics.jsonl").read_bytes()

        # The SuperLink has found that the site is gone, and accepts it again.
        planned.plan()
        trial.start_node(1, configs[1])
        planned.begin(2)
        trial.processes["run"].wait(BOUND_S)
        planned.wait_for_end("done")

    reason = "round 3: 1 good uploads of 2, but min_uploads is 2 (client 1: its site is no longer connected); "
    reason += "earlier rounds are kept: remove the cause or lower min_uploads, and continue the run"
    assert status == {"state": "failed", "round": 2, "reason": reason}
    assert (planned.run.path / "metrics.jsonl").read_bytes().startswith(kept)
    assert [line.get("uploads") for line in planned.run.metrics()] == [None, 2, 2, 2, 2]
    # Rounds that were not completed were trained again, from the states of the round before.
    assert [times_trained(tmp_path, 1, round) for round in (0, 1, 3)] == [1, 2, 1]
    assert times_trained(tmp_path, 0, 2) == 2
    planned.ends_as_in_memory()


TRIAL = """
import signal, sys, time
for number in (signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # a parent process may ignore them
from fedblend.flower.trial import LoopbackTrial
from pathlib import Path
from typing import Any
with LoopbackTrial(Path(sys.argv[1]), 1) as trial:
    trial.begin()
    trial.start_node(0, {})
    print(trial.mark, flush=True)
    time.sleep(float(sys.argv[2]))
"""


@finds_processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_no_process_of_a_trial_outlives_it(number: signal.Signals, tmp_path: Path) -> None:
    end = time.monotonic() + BOUND_S
    command = [sys.executable, "-c", TRIAL, str(tmp_path), str(BOUND_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trial:
        assert trial.stdout is not None
        mark = trial.stdout.readline().strip()
        try:
            # A SuperLink, a SuperNode and a SuperExec of each, of which the SuperLink's is in another session.
            wait_for(lambda: len(marked_processes(mark)) >= 4, "four processes", end)
            os.kill(trial.pid, number)
            exit_code = trial.wait(BOUND_S)
        finally:
            trial.kill()

    wait_for(lambda: not marked_processes(mark), "no process", end, lambda: str(marked_processes(mark)))
    assert exit_code == (-number if number == signal.SIGKILL else 128 + number)
