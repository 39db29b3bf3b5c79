"""How a round grows: processor seconds and memory, by clients, cohort, size of the model and ranks.

    python benchmarks/growth.py [--only clients cohort model ranks] [--out benchmarks/results/growth.json]

Two samples of 1x2x2 pixels a client, made in memory, one local epoch, a dense network, the loop engine, one thread.
One of the four numbers varies, the others are those of BASE. Every row is a process of its own. Seconds are processor
seconds of all its processes, so that others on the machine change them little; memory is the most that the first
process had beyond its libraries.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import population
import torch

from fedblend import engines
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.engines import EnginePlan
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup

SAMPLES = 2
"""Samples of a client."""

BASE = {"clients": 100_000, "cohort": 100, "hidden": 32, "ranks": 1}
VARIED: dict[str, tuple[str, tuple[int, ...]]] = {
    "clients": ("clients", (1_000, 10_000, 100_000, 1_000_000, 10_000_000)),
    "cohort": ("cohort", (10, 100, 1_000, 10_000)),
    "model": ("hidden", (6, 66, 666, 6_666, 66_666, 666_666)),
    "ranks": ("ranks", (1, 2, 4)),
}
"""What varies, by its field and values; a network of h hidden units has 15 h + 10 parameters."""

WARM_UP, ROUNDS = 2, 5


def one(clients: int, cohort: int, hidden: int, ranks: int) -> dict[str, Any]:
    """Measure one combination, in this process."""
    torch.set_num_threads(1)
    libraries = population.peak()
    table = {
        "data": {"name": "tiny-samples", "train": SAMPLES * clients},
        "partition": {"name": "iid", "clients": clients},
        "model": {"name": "mlp", "hidden": [hidden]},
        "train": {"cohort": cohort, "epochs": 1, "batch_size": SAMPLES},
        "eval_every": 10**6,
        "rounds": 10**6,
    }
    experiment = resolve(table)
    begun = time.process_time()
    setup = make_setup(experiment)
    started = time.process_time() - begun
    others = []
    # Other processes tell their seconds when they end: those of more rounds less those of fewer.
    for rounds in (WARM_UP, WARM_UP + ROUNDS) if ranks > 1 else (WARM_UP + ROUNDS,):
        before = spent_by_children()
        own, wall, sent = rounds_of(setup, ranks, rounds)
        others.append(spent_by_children() - before)
    parameters = sum(weight.numel() for weight in setup.weights().values())
    return {
        "parameters": parameters,
        "start_s": started,
        "round_s": statistics.median(own[WARM_UP:]) + (others[-1] - others[0]) / ROUNDS,
        "wall_s": statistics.median(wall[WARM_UP:]),
        "mb": population.peak() - libraries,
        "sent_bytes": sent,
    }


def rounds_of(setup: Setup, ranks: int, rounds: int) -> tuple[list[float], list[float], int]:
    """Processor seconds and seconds of each round in this process, and the bytes of the last one, both ways."""
    engine = engines.make(setup, EnginePlan("loop", None, ranks, "contiguous", ""))
    loop = RoundLoop(setup, engine)
    state = loop.start()[0]
    own: list[float] = []
    wall: list[float] = []
    record = None
    for _ in range(rounds):
        begun = time.process_time(), time.perf_counter()
        state, record = loop.round(state)
        own.append(time.process_time() - begun[0])
        wall.append(time.perf_counter() - begun[1])
    engine.close()
    assert record is not None
    return own, wall, sum(record.bytes_up.values()) + sum(record.bytes_down.values())


def spent_by_children() -> float:
    """Processor seconds of processes that this one started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def apart(kind: str, value: int) -> dict[str, Any]:
    """Measure one value in a process of its own."""
    command = [sys.executable, __file__, "--one", kind, str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {"kind": kind, "value": value, **json.loads(done.stdout.splitlines()[-1])}


def main() -> None:
    """Measure all, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=sorted(VARIED), default=list(VARIED))
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--one", nargs=2, metavar=("KIND", "VALUE"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        field = VARIED[given.one[0]][0]
        print(json.dumps(one(**{**BASE, field: int(given.one[1])})))
        return
    rows = []
    for kind in given.only:
        for value in VARIED[kind][1]:
            rows.append(apart(kind, value))
            print(", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in rows[-1].items()))
    if given.out:
        given.out.write_text(json.dumps({**machine.when_and_where(), "base": BASE, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
