"""What a real federation adds to a round, beside the loop engine, and where the time goes.

The same experiment three times, FedAvg of LeNet-5 on 5,000 MNIST digits:

- ``loop``: the loop engine, in this process;
- ``messages``: the ServerApp's and ClientApp's code in this process, each message written as Flower's bytes and read
  again, but no network and no other process;
- ``federation``: a SuperLink and SuperNodes as processes on loopback, with TLS and registered keys
  (``fedblend federation up``), whose apps are watched (flower_probe.py).

A site's message is cut into training, preparing (its data, model and scale, which every process makes anew), starting
(the process that Flower starts for each message: Python, PyTorch, Flower), serialisation (records and their bytes at
the apps), transport (what the apps wait for their SuperLink or SuperNode while tensors go over), and waiting (the polls
of SuperNode, SuperExec and server, and the hop between SuperNode and SuperLink).

    python benchmarks/flower.py [--sites 3] [--rounds 4] [--out benchmarks/results/flower.json]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import flower_probe
from machine import commit, processor
from quiet import MARK, Watch
from rich.console import Console
from rich.table import Table

from fedblend.experiment.make_setup import make_setup

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from flower_helpers import Nodes, through

from fedblend.core.loop import RoundLoop
from fedblend.core.trees import bytes_of
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment, resolve
from fedblend.flower.app_folder import FederationLimits, write_app
from fedblend.flower.server import run
from fedblend.flower.trial import LoopbackTrial
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import one_thread

HERE = Path(__file__).resolve().parent
PARTS = ("training", "preparing", "starting", "serialisation", "transport", "waiting")

Way = dict[str, Any]


def job(sites: int, rounds: int) -> Experiment:
    """What is timed."""
    return resolve(
        {
            "name": "overhead",
            "data": "mnist5k",
            "partition": {"name": "iid", "clients": sites},
            "model": "lenet5",
            "train": {"cohort": sites, "epochs": 1, "batch_size": 20, "lr": 0.05},
            "rounds": rounds,
            "method": "fedavg",
        }
    )


def rounds_of(records: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Seconds of each round but the first (which warms up), and of them those of training as the server sees it."""
    told = [record["machine"]["seconds"] for record in records[2:]]
    return {"round_s": [sum(one.values()) for one in told], "train_s": [one["train"] for one in told]}


def by_loop(asked: Experiment) -> Way:
    """The loop engine: clients one after another."""
    setup = make_setup(asked)
    federation = RoundLoop(setup, LoopEngine(setup))
    with one_thread():
        state, record = federation.start()
        records = [record.as_dict()]
        while state.round < asked.rounds:
            state, record = federation.round(state)
            records.append(record.as_dict())
    made = rounds_of(records)
    seconds = statistics.median(made["train_s"]) / asked.train.cohort
    return {**made, "parts": {"training": seconds}, "model_bytes": bytes_of(state.weights)}


class Timed(Nodes):
    """Nodes of this process whose messages' bytes are timed."""

    spans = flower_probe.Spans()

    def _answer(self, node: int, message: Any) -> None:
        if message.metadata.message_type != "train":
            super()._answer(node, message)
            return
        # Once there and once back, as the helper does it too; only these two are timed.
        with self.spans.of("serialisation"):
            through(message)
        super()._answer(node, message)
        with self.spans.of("serialisation"):
            through(self.ready[message.metadata.message_id])


def by_messages(asked: Experiment, folder: Path) -> Way:
    """Flower's messages in this process."""
    spans = Timed.spans
    flower_probe.watch_work(spans)
    grid = Timed({"partition-id": client} for client in range(asked.train.cohort))
    finished = run(grid, asked, folder, FederationLimits())
    # Every round counts here, the first too; preparing is once for each client, and then kept.
    messages = asked.rounds * asked.train.cohort
    parts = {name: spans.seconds[name] / messages for name in ("training", "preparing", "serialisation")}
    return {**rounds_of(finished.directory.metrics()), "parts": parts}


def by_federation(asked: Experiment, folder: Path) -> Way:
    """Real processes on loopback."""
    notes, start = folder / "notes", time.perf_counter()
    notes.mkdir(parents=True)
    (notes / "sitecustomize.py").write_text("import flower_probe\n")
    paths = [str(notes), str(HERE), os.environ.get("PYTHONPATH", "")]
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), flower_probe.FOLDER: str(notes)}
    run_directory = RunDirectory(folder / "run")
    with LoopbackTrial(folder / "trial", asked.train.cohort) as trial:
        trial.begin()
        for site in range(asked.train.cohort):
            trial.start_node(site, {})
        write_app(folder / "app", asked, run_directory.path, FederationLimits())
        started = time.perf_counter() - start
        trial.submit(folder / "app").wait()
        log = trial.log_of("run")
    if not RunDirectory.is_run(run_directory.path) or run_directory.status()["state"] != "done":
        sys.exit(f"the federation did not come to its end:\n{log[-3000:]}")
    lines = [json.loads(line) for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
    return {
        **rounds_of(run_directory.metrics()),
        "parts": parts_of(lines),
        "start_s": started,
        "whole_s": time.perf_counter() - start,
        "bytes_up": run_directory.metrics()[-1]["bytes_up"],
    }


def parts_of(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Where the time of a site's message to train goes, in seconds: means over rounds but the first, and sites."""
    made = []
    servers = {line["round"]: line for line in lines if line["role"] == "server" and line["kind"] == "train"}
    for site in lines:
        if site["role"] != "site" or site.get("kind") != "train" or not site["round"]:
            continue
        server = servers[site["round"]]
        looked, came = server["answers"][str(site["client"])]
        spans = site["spans"]
        records = spans["serialisation"] + server["push"] - server["begin"]
        transport = (server["pushed"] - server["push"]) + (site["pulled"] - site["pull"])
        transport += (site["pushed"] - site["push"]) + (came - looked)
        known = {
            "training": spans["training"],
            "preparing": spans["preparing"],
            "serialisation": records,
            "transport": transport,
        }
        within = known["training"] + known["preparing"] + spans["serialisation"]
        known["starting"] = (site["pull"] - site["born"]) + (site["push"] - site["pulled"]) - within
        known["waiting"] = (came - server["begin"]) - sum(known.values())
        made.append(known)
    return {name: statistics.mean(one[name] for one in made) for name in PARTS}


def facts(watch: Watch, before: tuple[float, ...]) -> dict[str, Any]:
    """Where and when this was timed, and what others computed meanwhile."""
    return {
        "date": str(datetime.date.today()),
        "commit": commit(),
        "machine": {"processor": processor(), "cores": os.cpu_count()},
        "versions": {"python": platform.python_version(), **{n: version(n) for n in ("torch", "flwr", "fedblend")}},
        "load": {"before": before[0], "after": os.getloadavg()[0], "others": watch.foreign, "nice": os.nice(0)},
    }


def show(ways: Mapping[str, Way]) -> None:
    """Print the ways beside each other."""
    table = Table("way", "s a round", *PARTS)
    for name, way in ways.items():
        cells = [f"{way['parts'][part]:.3f}" if part in way["parts"] else "" for part in PARTS]
        table.add_row(name, f"{statistics.median(way['round_s']):.3f}", *cells)
    Console().print(table)


def main() -> None:
    """Time all three ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    os.environ |= {MARK: "flower", "OMP_NUM_THREADS": "1"}
    asked, before = job(given.sites, given.rounds), os.getloadavg()
    with tempfile.TemporaryDirectory() as folder, Watch("flower") as watch:
        ways = {"loop": by_loop(asked), "messages": by_messages(asked, Path(folder) / "messages")}
        ways["federation"] = by_federation(asked, Path(folder) / "federation")
    show(ways)
    if given.out:
        settings = {"sites": given.sites, "rounds": given.rounds, "model": "lenet5", "data": "mnist5k"}
        given.out.write_text(json.dumps({**facts(watch, before), "settings": settings, "ways": ways}, indent=1) + "\n")


if __name__ == "__main__":
    main()
