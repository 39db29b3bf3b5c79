"""A real federation on this machine, checked against the loop engine: `make federation-demo`.

A SuperLink and SuperNodes as processes of their own, on loopback, with TLS and registered keys:

1. FedMix on 5,000 MNIST digits between three sites, 5 rounds (federation.toml);
2. the four hospitals of UCI Heart Disease, each with its own patients, 20 rounds (hospitals/); where FEDBLEND_DATA
   has no such data, this part is left out.

Of each: is the run done, are its weights the loop engine's, was a node with an unknown key turned away, and do the
sites' audit logs tell of every byte that the server counted? Ends with 1 if one of these is not so.

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
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.config import Experiment
from fedblend.experiment.setup import make_setup
from fedblend.flower.app_folder import FederationLimits, write_app
from fedblend.flower.audit import AuditLog
from fedblend.flower.site import read_site
from fedblend.flower.trial import LoopbackTrial, make_site_key
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import one_thread

HERE = Path(__file__).resolve().parent
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")

TOLERANCE = 1e-5
"""Most that a tensor of weights may differ from the loop engine's, as a share of its norm."""

SITE = 'allow = ["weights", "means"]\naudit = "audit.jsonl"\n'


class Checks:
    """What was asked of a federation, each with its figure and its answer."""

    def __init__(self) -> None:
        self.failed = 0

    def __call__(self, good: bool, what: str, figure: object = "") -> None:
        """Print one check."""
        self.failed += not good
        print(f"  {'ok    ' if good else 'FAILED'}  {what}{f': {figure}' if figure != '' else ''}", flush=True)


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
    """Four sites, each with data of its own."""
    (asked,) = api.expand_file(HERE / "hospitals" / "federation.toml", [], None).experiments.values()
    paths = [folder / name / "site.toml" for name in HOSPITALS]
    for name, path in zip(HOSPITALS, paths, strict=True):
        path.parent.mkdir(parents=True)
        shutil.copy(HERE / "hospitals" / f"{name}.toml", path)
    federate(asked, paths, folder, check)
    compare(asked, together(make_setup(asked), paths), paths, folder, check)


def together(server: Setup, paths: Sequence[Path]) -> Setup:
    """The world of a simulation that holds what the sites hold, on the server's scale and with its test samples."""
    own = [read_site(path).data.load().train for path in paths]
    offsets = np.concatenate([[0], np.cumsum([len(samples) for samples in own])])
    train = Samples(torch.cat([samples.x for samples in own]), torch.cat([samples.y for samples in own]))
    population = Population(np.arange(offsets[-1]), offsets)
    return replace(server, data=replace(server.data, train=train), population=population)


def federate(asked: Experiment, paths: Sequence[Path], folder: Path, check: Checks) -> None:
    """Run an experiment between real processes, with a stranger who says that it is site 0."""
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
        known = json.loads(trial.flwr("supernode", "list", "trial", "--format", "json"))
        stranger = trial.log_of("stranger")
    state = run.status()["state"] if RunDirectory.is_run(run.path) else "not begun"
    took = f"{state} after {time.monotonic() - start:.0f} s"
    check(state == "done", f"{asked.rounds} rounds between {len(paths)} SuperNodes", took)
    nodes = len(known.get("nodes", ()))
    check(nodes == len(paths), "SuperNodes that the SuperLink knows", nodes)
    refusal = next((line.strip() for line in stranger.splitlines() if "Failed to activate" in line), "")
    silent = "message (ID" not in stranger and not (folder / "stranger.jsonl").exists()
    check(silent and bool(refusal), "a SuperNode with an unknown key is turned away, and gets no message", refusal)


def show_rounds(trial: LoopbackTrial, app: Path, run: RunDirectory) -> None:
    """Have the SuperLink run the app, and print each round as it is made."""
    process, seen = trial.submit(app), 0
    while process.poll() is None or seen < len(run.metrics()):
        for record in run.metrics()[seen:]:
            took = sum(record["machine"]["seconds"].values())
            print(f"    round {record['round']:2}  accuracy {record['accuracy']:.4f}  {took:6.1f} s", flush=True)
            seen += 1
        time.sleep(0.5)


def check_tls(trial: LoopbackTrial, check: Checks) -> None:
    """Whether the SuperLink shows a certificate of the trial's authority, and answers nobody in the clear."""
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
        check(not answer.startswith(b"HTTP"), "without TLS it answers nothing", f"{len(answer)} bytes, none of HTTP")


def compare(asked: Experiment, setup: Setup, paths: Sequence[Path], folder: Path, check: Checks) -> None:
    """The federation's weights beside the loop engine's, and the sites' audit logs beside the server's count."""
    run = RunDirectory(folder / "run")
    state = checkpoint.read(run.path) if RunDirectory.is_run(run.path) else None
    if state is None:
        check(False, "the run has no checkpoint; see", folder / "trial" / "logs" / "run.log")
        return
    start = time.monotonic()
    apart, widest = differences(state.weights, by_loop(setup, asked.rounds))
    figure = f"largest difference {widest:.3g}, of a tensor's norm {apart:.3g} (at most {TOLERANCE:g})"
    check(apart <= TOLERANCE, f"weights beside the loop engine's ({time.monotonic() - start:.0f} s)", figure)
    counted: Counter[str] = Counter()
    for record in run.metrics():
        counted.update(record["bytes_up"])
    logged: Counter[str] = Counter()
    for client, path in enumerate(paths):
        lines = AuditLog(read_site(path).audit).lines()
        logged.update({kind: sum(one["bytes"] for one in lines if one["kind"] == kind) for kind in counted})
        kinds = Counter(one["kind"] for one in lines)
        sound = all(one["client"] == client and len(one["sha256"]) == 64 for one in lines)
        check(sound and kinds["weights"] == asked.rounds, f"audit log of {path.parent.name}", dict(kinds))
    check(logged == counted, "bytes in the audit logs, and as the server counted them", f"{dict(logged)}")


def by_loop(setup: Setup, rounds: int) -> Mapping[str, torch.Tensor]:
    """The weights after as many rounds of the loop engine."""
    federation = RoundLoop(setup, LoopEngine(setup))
    with one_thread():
        state, _ = federation.start()
        for _ in range(rounds):
            state, _ = federation.round(state)
    return state.weights


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> tuple[float, float]:
    """The largest difference of a tensor as a share of its norm, and of any single weight."""
    pairs = [(ours[name].double(), tensor.double()) for name, tensor in theirs.items()]
    shares = [float((a - b).norm() / b.norm()) for a, b in pairs]
    return max(shares), max(float((a - b).abs().max()) for a, b in pairs)


PARTS = {"digits": digits, "hospitals": hospitals}


def main() -> int:
    """Make the parts that are asked for; the number of checks that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="where all files go (default: runs/federation-demo)")
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
