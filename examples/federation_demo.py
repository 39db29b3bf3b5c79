"""Run a real federation on this machine and compare it with the loop engine: `make federation-demo`.

A SuperLink and SuperNodes run as separate processes on loopback, with TLS and registered keys:

1. FedMix on 5,000 MNIST digits between three sites, 5 rounds (federation.toml);
2. the four hospitals of UCI Heart Disease, each with its own patients, 20 rounds (hospitals/). Without these data in
   FEDBLEND_DATA this part is left out.

Each part checks that the run is done, that its weights are the loop engine's, that a node with an unknown key is
refused, and that the sites' audit logs contain every byte that the server counted. The exit code is 1 if a check fails.

    python examples/federation_demo.py [--out FOLDER] [--only digits hospitals]
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fedblend.core.dataset import Population, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment
from fedblend.experiment.make_setup import make_setup
from fedblend.flower.app_folder import FederationLimits, write_app
from fedblend.flower.audit import AuditLog
from fedblend.flower.credentials import make_site_key
from fedblend.flower.site import read_site
from fedblend.flower.trial import LoopbackTrial
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import one_thread

HERE = Path(__file__).resolve().parent
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

TOLERANCE = 1e-5
"""Largest allowed difference of a weight tensor from the loop engine's, relative to its norm."""

SITE = 'allow = ["weights", "means"]\naudit = "audit.jsonl"\n'


class Checks:
    """Prints the checks of a federation and counts those that failed."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, passed: bool, what: str, figure: object = "") -> None:
        """Print one check."""
        self.failed += not passed
        print(f"  {'ok    ' if passed else 'FAILED'}  {what}{f': {figure}' if figure != '' else ''}", flush=True)


def digits(folder: Path, check: Checks) -> None:
    """Three sites, each with its part of one data set."""
    experiment = api.expand_file(HERE / "federation.toml", [], None).experiments
    (asked,) = experiment.values()
    paths = [folder / f"site-{site}" / "site.toml" for site in range(3)]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(SITE)
    federate(asked, paths, folder, check)
    compare(asked, make_setup(asked), paths, folder, check)


def hospitals(folder: Path, check: Checks) -> None:
    """Four sites, each with its own data."""
    (asked,) = api.expand_file(HERE / "hospitals" / "federation.toml", [], None).experiments.values()
    paths = [folder / name / "site.toml" for name in HOSPITALS]
    for name, path in zip(HOSPITALS, paths, strict=True):
        path.parent.mkdir(parents=True)
        shutil.copy(HERE / "hospitals" / f"{name}.toml", path)
    federate(asked, paths, folder, check)
    compare(asked, together(make_setup(asked), paths), paths, folder, check)


def together(server: Setup, paths: Sequence[Path]) -> Setup:
    """Return the setup of a simulation with all sites' samples, the server's scale and the server's test samples."""
    own = [read_site(path).data.load().train for path in paths]
    offsets = np.concatenate([[0], np.cumsum([len(samples) for samples in own])])
    train = Samples(torch.cat([samples.x for samples in own]), torch.cat([samples.y for samples in own]))
    population = Population(np.arange(offsets[-1]), offsets)
    return replace(server, data=replace(server.data, train=train), population=population)


def federate(asked: Experiment, paths: Sequence[Path], folder: Path, check: Checks) -> None:
    """Run an experiment between real processes; a node with an unknown key claims to be site 0."""
    run, start = RunDirectory(folder / "run"), time.monotonic()
    with LoopbackTrial(folder / "trial", len(paths)) as trial:
        trial.begin()
        check_tls(trial, check)
        for site, path in enumerate(paths):
            trial.start_node(site, {"site": str(path)})
        make_site_key(folder / "stranger")
        (folder / "stranger.toml").write_text('allow = []\naudit = "stranger.jsonl"\n')
        trial.start_node(0, {"site": str(folder / "stranger.toml")}, folder / "stranger.key", "stranger")
        write_app(folder / "app", asked, run.path, FederationLimits())
        show_rounds(trial, folder / "app", run)
        listed = json.loads(trial.flwr("supernode", "list", "trial", "--format", "json"))
        stranger = trial.log_of("stranger")
    state = run.status()["state"] if RunDirectory.is_run(run.path) else "not begun"
    took = f"{state} after {time.monotonic() - start:.0f} s"
    check(state == "done", f"{asked.rounds} rounds between {len(paths)} SuperNodes", took)
    nodes = len(listed.get("nodes", ()))
    check(nodes == len(paths), "SuperNodes that the SuperLink knows", nodes)
    refusal = next((line.strip() for line in stranger.splitlines() if "Failed to activate" in line), "")
    silent = "message (ID" not in stranger and not (folder / "stranger.jsonl").exists()
    check(silent and bool(refusal), "a SuperNode with an unknown key is refused and receives no message", refusal)


def show_rounds(trial: LoopbackTrial, app: Path, run: RunDirectory) -> None:
    """Submit the app, and print each round when it is recorded."""
    process, seen = trial.submit(app), 0
    while process.poll() is None or seen < len(run.metrics()):
        for record in run.metrics()[seen:]:
            took = sum(record["machine"]["seconds"].values())
            print(f"    round {record['round']:2}  accuracy {record['accuracy']:.4f}  {took:6.1f} s", flush=True)
            seen += 1
        time.sleep(0.5)


def check_tls(trial: LoopbackTrial, check: Checks) -> None:
    """Check the SuperLink's certificate, and that it sends nothing without TLS."""
    where = ("127.0.0.1", trial.port)
    context = ssl.create_default_context(cafile=str(trial.keys / "ca.crt"))
    plain = socket.create_connection(where, timeout=30)
    with context.wrap_socket(plain, server_hostname=where[0]) as secure:
        check(True, "the SuperLink's certificate is of the trial's authority", secure.version())
    with socket.create_connection(where, timeout=30) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            answer = plain.recv(4096)
        except ConnectionError:
            answer = b""
        check(not answer.startswith(b"HTTP"), "without TLS the SuperLink sends no HTTP", f"{len(answer)} bytes")


def compare(asked: Experiment, setup: Setup, paths: Sequence[Path], folder: Path, check: Checks) -> None:
    """Compare the federation's weights with the loop engine's, and the audit logs with the server's byte counts."""
    run = RunDirectory(folder / "run")
    state = checkpoint.read(run.path) if RunDirectory.is_run(run.path) else None
    if state is None:
        check(False, "the run has no checkpoint; see", folder / "trial" / "logs" / "run.log")
        return
    start = time.monotonic()
    relative, absolute = differences(state.weights, by_loop(setup, asked.rounds))
    figure = f"largest difference {absolute:.3g}, relative to a tensor's norm {relative:.3g} (at most {TOLERANCE:g})"
    check(relative <= TOLERANCE, f"weights equal the loop engine's ({time.monotonic() - start:.0f} s)", figure)
    counted: Counter[str] = Counter()
    for record in run.metrics():
        counted.update(record["bytes_up"])
    logged: Counter[str] = Counter()
    for client, path in enumerate(paths):
        lines = AuditLog(read_site(path).audit).lines()
        logged.update({kind: sum(one["bytes"] for one in lines if one["kind"] == kind) for kind in counted})
        kinds = Counter(one["kind"] for one in lines if not one.get("begun"))
        valid = all(one["client"] == client and len(one["sha256"]) == 64 for one in lines)
        check(valid and kinds["weights"] == asked.rounds, f"audit log of {path.parent.name}", dict(kinds))
    check(logged == counted, "bytes in the audit logs equal the server's counts", f"{dict(logged)}")


def by_loop(setup: Setup, rounds: int) -> Mapping[str, torch.Tensor]:
    """Return the weights after ``rounds`` rounds of the loop engine."""
    federation = RoundLoop(setup, LoopEngine(setup))
    with one_thread():
        state, _ = federation.start()
        for _ in range(rounds):
            state, _ = federation.round(state)
    return state.weights


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """Return the largest difference of a tensor relative to its norm, and the largest of a single weight."""
    pairs = [(ours[name].double(), tensor.double()) for name, tensor in theirs.items()]
    shares = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return max(shares), max(float((a - b).abs().max()) for a, b in pairs)


PARTS = {"digits": digits, "hospitals": hospitals}


def main() -> int:
    """Run the requested parts; return 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for all files (default: runs/federation-demo)")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    given = parser.parse_args()
    out, check = given.out or api.free_folder(api.RUNS / "federation-demo"), Checks()
    print(f"All files in {out}")
    for name in given.only:
        print(f"{name}: {(PARTS[name].__doc__ or '').strip()}", flush=True)
        try:
            if name == "hospitals":
                read_site(HERE / "hospitals" / "cleveland.toml").data.load()
        except FedblendError as error:
            print(f"  left out: {error}")
            continue
        PARTS[name]((out / name).absolute(), check)
    print(f"{check.failed} of the checks failed" if check.failed else "All checks passed")
    return min(check.failed, 1)


if __name__ == "__main__":
    sys.exit(main())
