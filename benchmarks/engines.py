"""What each way of computing brings: a client's step in every engine, and in stacks with one way left out.

All ways train the same clients of jobs A, B and C (peers/jobs.py) in one process on one thread, one after another in
each turn. The clock stands still while others have the processor, and the best turn counts. So the ratios within one
run hold on a busy machine too.

    python benchmarks/engines.py [--jobs A B C] [--turns 5] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import machine
import torch
from rich.console import Console
from rich.table import Table
from rounds import HERE

sys.path.append(str(HERE / "peers"))

from fedblend_job import table_of
from jobs import JOBS, write

from fedblend._kernels import build, lowrank, winograd
from fedblend.core.setup import Setup
from fedblend.engines.autotune import TIMED_CLIENTS
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.trials import faster_kernels, make_trial, train_trial
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup

STACKS = {"A": 10, "B": 10, "C": 4}
"""Clients in a stack: the cohort, or a part of it."""

BATCHES = 2
"""Batches of each client in a turn."""

LEFT_OUT: Mapping[str, Callable[[], Any]] = {
    "stacked": contextlib.nullcontext,
    "stacked, without low-rank updates": lambda: patch.object(lowrank, "LEAST", 1 << 62),
    "stacked, without Winograd": lambda: patch.object(winograd, "MIN_CHANNELS", 1 << 30),
}
"""Ways of stacks: each layer is computed as is fastest, with one choice left out."""


def ways_of(setup: Setup, stack: int) -> dict[str, tuple[LoopEngine, int, Callable[[], Any]]]:
    """By name: the engine, the clients that it trains, and the context in which it does."""
    found: dict[str, tuple[LoopEngine, int, Callable[[], Any]]] = {
        "loop": (LoopEngine(setup), 1, contextlib.nullcontext),
        "loop, channels_last": (LoopEngine(setup, "cpu", "channels_last"), 1, contextlib.nullcontext),
        "stacked, PyTorch's layers": (StackedEngine(setup, "cpu", stack, kernels={}), stack, contextlib.nullcontext),
        "stacked, by the rule": (StackedEngine(setup, "cpu", stack), stack, contextlib.nullcontext),
    }
    chosen: dict[str, str] | None = None
    for name, context in LEFT_OUT.items():
        with context():
            if "low-rank" not in name:
                chosen = faster_kernels(setup, min(stack, TIMED_CLIENTS))
            found[name] = StackedEngine(setup, "cpu", stack, kernels=chosen), stack, context
    return found


def milliseconds(setup: Setup, stack: int, turns: int) -> dict[str, float]:
    """The least milliseconds of a client's step in each way."""
    ways = ways_of(setup, stack)
    trials = {name: make_trial(engine, clients, BATCHES) for name, (engine, clients, _) in ways.items()}
    least: dict[str, float] = {}
    for turn in range(turns + 1):
        for name, (engine, _, context) in ways.items():
            with context():
                begun = time.thread_time()
                steps = train_trial(engine, trials[name])
                taken = 1000 * (time.thread_time() - begun) / steps
            # The first turn traces the step.
            if turn:
                least[name] = min(least.get(name, taken), taken)
    return least


def main() -> None:
    """Measure, print the table, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description="Time a client's step in every engine.")
    parser.add_argument("--jobs", nargs="+", choices=sorted(STACKS), default=sorted(STACKS))
    parser.add_argument("--turns", type=int, default=5, help="turns of each way")
    parser.add_argument("--out", type=Path, help="folder for the figures (engines-PROCESSOR.json)")
    machine.add_option(parser)
    given = parser.parse_args()
    machine.limit(given.isa)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    build.keep_memory()
    found: dict[str, Any] = {**machine.when_and_where(), "turns": given.turns, "jobs": {}}
    with tempfile.TemporaryDirectory() as folder:
        for job in given.jobs:
            path = Path(folder) / f"{job}.npz"
            write(JOBS[job], path)
            setup = make_setup(resolve(table_of(JOBS[job], str(path), False) | {"method": "fedavg", "rounds": 1}))
            found["jobs"][job] = {"stack": STACKS[job], "ms": milliseconds(setup, STACKS[job], given.turns)}
            if given.out:
                (given.out / f"engines-{machine.kind()}.json").write_text(json.dumps(found, indent=1) + "\n")
    table = Table("job", "way", "ms a client's step", "x the loop")
    for job, one in found["jobs"].items():
        for way, ms in one["ms"].items():
            table.add_row(job, way, f"{ms:.2f}", f"{one['ms']['loop'] / ms:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
