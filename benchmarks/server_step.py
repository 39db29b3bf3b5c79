"""What AggEnhance's server step takes of a round, and how that grows with clients and classes.

Random pictures of 28 x 28 pixels made in memory, 100 samples a client, an MLP 784-200-100 or LeNet-5, two epochs of
batches of ten, all clients in every round. The step makes a point for each client and class in 100 steps, has every
model judge every point, and tunes the aggregate on the points of all rounds so far. Medians over rounds after the
first; without tests.

    python benchmarks/server_step.py [--models mlp lenet5] [--rounds 4] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.loop import RoundLoop
from fedblend.engines.autotune import inner_engine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup

SAMPLES, SIDE = 100, 28
"""Samples a client, and a picture's pixels a side."""

CASES = [(10, 10), (20, 10), (50, 10), (100, 10), (20, 5), (20, 20), (20, 40), (20, 80)]
"""Clients and classes."""

STACK = 10
"""Clients that are trained at once."""


def pictures(clients: int, classes: int) -> Dataset:
    """Random pictures of random classes."""
    rng = np.random.default_rng(0)

    def half(n: int) -> Samples:
        x = torch.from_numpy(rng.integers(0, 256, (n, 1, SIDE, SIDE), np.uint8))
        return Samples(x, torch.from_numpy(rng.integers(0, classes, n)))

    return Dataset("random", "image", half(clients * SAMPLES), half(100), tuple(map(str, range(classes))))


def measured(model: str, clients: int, classes: int, rounds: int) -> dict[str, Any]:
    """Seconds of training and of the server step in a round."""
    experiment = resolve(
        {
            "data": "digits",
            "partition": {"name": "iid", "clients": clients},
            "model": model,
            "method": "aggenhance",
            "train": {"cohort": clients, "epochs": 2, "batch_size": 10},
            "eval_every": rounds + 1,
            "rounds": rounds + 1,
        }
    )
    setup = make_setup(experiment, pictures(clients, classes))
    engine = inner_engine(setup, {"engine": "stacked", "stack": STACK, "memory_format": "contiguous", "ranks": 1})
    federation = RoundLoop(setup, engine)
    state, _ = federation.start()
    told = []
    for _ in range(rounds):
        state, record = federation.round(state)
        told.append(record.machine["seconds"])
    train, server = (statistics.median(one[phase] for one in told[1:]) for phase in ("train", "server"))
    return {"model": model, "clients": clients, "classes": classes, "train_s": train, "server_s": server}


def main() -> None:
    """Measure all cases, print them, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=["mlp", "lenet5"])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measured(m, k, c, given.rounds) for m in given.models for k, c in CASES]
    table = Table("model", "clients", "classes", "train s", "server step s", "share of both", title="A round")
    for row in rows:
        share = row["server_s"] / (row["server_s"] + row["train_s"])
        numbers = (str(row["clients"]), str(row["classes"]), f"{row['train_s']:.3f}", f"{row['server_s']:.3f}")
        table.add_row(row["model"], *numbers, f"{share:.2f}")
    Console().print(table)
    if given.out:
        facts = {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "samples": SAMPLES}
        given.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
