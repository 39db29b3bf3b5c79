"""What a million clients cost: the start and its memory, and a round, by the number of clients.

Ten samples a client of 1x2x2 pixels, made in memory, a linear model, and 50 clients a round. Every row is a process of
its own. The start is all from data in memory to the record of the untrained model: the split, the scale, the
model, the engine. A round is a round of the federation, with its checkpoint, which is also told apart. Memory is the
most that the process ever had, less its data; the interpreter and its libraries are in it, and told apart too.

    python benchmarks/population.py [--clients 1000 10000 100000 1000000] [--rounds 30] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedblend import part
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.loop import RoundLoop
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.runner import collect_facts, describe_split

SAMPLES, CLASSES, COHORT = 10, 10, 50
"""Samples a client, classes, and clients a round."""

GOALS = {"start_s": 5.0, "beyond_data_mb": 1000.0}
"""Most that a million clients, dealt evenly, may take."""

PARTITIONS: dict[str, dict[str, Any]] = {
    "iid": {"name": "iid"},
    "classes": {"name": "classes", "classes_per_client": 2},
    "dirichlet": {"name": "dirichlet", "alpha": 0.5, "form": "client"},
    "dirichlet, class": {"name": "dirichlet", "alpha": 0.5, "form": "class"},
    "lognormal": {"name": "lognormal"},
}

WARM_UP = 3
"""Rounds that are left out of medians."""


@part("dataset", "tiny-samples")
class TinySamples:
    """Random grey images of 2 x 2 pixels."""

    train: int = 10_000
    """Training samples."""

    def load(self) -> Dataset:
        """Make them."""
        rng = np.random.default_rng(0)
        names = tuple(f"class {c}" for c in range(CLASSES))

        def half(n: int) -> Samples:
            x = torch.from_numpy(rng.integers(0, 256, (n, 1, 2, 2), np.uint8))
            return Samples(x, torch.from_numpy(rng.integers(0, CLASSES, n)))

        return Dataset("tiny", "image", half(self.train), half(1000), names)


def arguments() -> argparse.Namespace:
    """What is to be timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[1000, 10_000, 100_000, 1_000_000])
    parser.add_argument("--partitions", nargs="*", choices=PARTITIONS, default=list(PARTITIONS))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--one", nargs=2, metavar=("CLIENTS", "PARTITION"), help=argparse.SUPPRESS)
    return parser.parse_args()


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that a function takes, and what it returns."""
    start = time.perf_counter()
    result = run()
    return time.perf_counter() - start, result


def peak() -> float:
    """The most memory that this process has had, in MB; kilobytes on Linux, bytes on macOS."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6


def one(clients: int, partition: str, rounds: int) -> dict[str, Any]:
    """Measure one number of clients, in this process."""
    torch.set_num_threads(1)
    libraries = peak()
    experiment = resolve(
        {
            "data": {"name": "tiny-samples", "train": SAMPLES * clients},
            "partition": {**PARTITIONS[partition], "clients": clients},
            "model": {"name": "mlp", "hidden": []},
            "train": {"cohort": COHORT, "epochs": 1},
            "engine": "loop",
        }
    )
    data = experiment.data.load()
    size = sum(t.nbytes for half in (data.train, data.test) for t in (half.x, half.y)) / 1e6

    def begin() -> tuple[RoundLoop, Any]:
        setup = make_setup(experiment, data)
        federation = RoundLoop(setup, LoopEngine(setup))
        return federation, federation.start()[0]

    start_s, (federation, state) = seconds(begin)
    started = peak()
    took, written = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds + WARM_UP):
            round_s, (state, _) = seconds(partial(federation.round, state))
            write_s, _ = seconds(partial(checkpoint.write, Path(folder), state))
            took.append(round_s)
            written.append(write_s)
        kept = (Path(folder) / checkpoint.NAME).stat().st_size
    rounds_peak = peak()
    facts_s, facts = seconds(
        lambda: (json.dumps(collect_facts(federation.setup)), json.dumps(describe_split(federation.setup)))
    )
    return {
        "clients": clients,
        "partition": partition,
        "data_mb": size,
        "libraries_mb": libraries,
        "start_s": start_s,
        "beyond_data_mb": rounds_peak - size,
        "start_mb": started - size - libraries,
        "round_s": statistics.median(took[WARM_UP:]),
        "checkpoint_s": statistics.median(written[WARM_UP:]),
        "checkpoint_bytes": kept,
        "facts_s": facts_s,
        "facts_bytes": sum(map(len, facts)),
        "facts_peak_mb": peak() - size,
    }


def apart(clients: int, partition: str, rounds: int) -> dict[str, Any]:
    """Measure one number of clients in a process of its own."""
    command = [sys.executable, __file__, "--one", str(clients), partition, "--rounds", str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "COLUMNS": "200"})
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, and whether the goals are met."""
    heads = ("clients", "split", "start s", "MB beyond data", "of it libraries", "round ms", "checkpoint ms", "its kB")
    table = Table(*heads, "facts s", "their kB", "peak MB then")
    for row in rows:
        table.add_row(
            f"{row['clients']:,}",
            row["partition"],
            f"{row['start_s']:.2f}",
            f"{row['beyond_data_mb']:.0f}",
            f"{row['libraries_mb']:.0f}",
            f"{1e3 * row['round_s']:.1f}",
            f"{1e3 * row['checkpoint_s']:.1f}",
            f"{row['checkpoint_bytes'] / 1e3:.1f}",
            f"{row['facts_s']:.2f}",
            f"{row['facts_bytes'] / 1e3:.1f}",
            f"{row['facts_peak_mb']:.0f}",
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    for row in rows:
        if row["clients"] == 1_000_000 and row["partition"] == "iid":
            for name, goal in GOALS.items():
                print(f"{name}: {row[name]:.2f}, goal at most {goal:g}: {'met' if row[name] <= goal else 'NOT met'}")


def main() -> None:
    """Measure all, print and write."""
    asked = arguments()
    if asked.one:
        print(json.dumps(one(int(asked.one[0]), asked.one[1], asked.rounds)))
        return
    jobs = [(clients, asked.partitions[0]) for clients in asked.clients]
    jobs += [(max(asked.clients), partition) for partition in asked.partitions[1:]]
    rows = []
    for clients, partition in jobs:
        print(f"{clients:,} clients, {partition}", file=sys.stderr)
        rows.append(apart(clients, partition, asked.rounds))
    show(rows)
    if asked.out:
        machine = {"torch": torch.__version__, "numpy": np.__version__, "threads": 1}
        asked.out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
