"""Steps of one sample: a round of Mix2FLD's devices and of its server, stacked and one device after another.

Random pictures of 28 x 28 pixels made in memory, 500 samples a device, the paper's network of 12,544 weights, ten
devices, one thread. Each way makes a few hundred steps, in turns; a round is 6,400 steps of every device, or 3,200 of
the server. Medians, of the turns after the first, of processor time: what one thread takes where nobody else works.

    python benchmarks/batch_one.py [--steps 300] [--turns 4] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from server_step import pictures
from turns import timed

from fedblend.core.engine import TrainTask
from fedblend.core.server_step import ServerContext
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.server_steps.tuning import DistillToModel

DEVICES, CLASSES, SEEDS = 10, 10, 100
ROUND = {"devices": 6400, "server": 3200}
"""Steps of a round: K and K_s."""

STACKS = (1, 2, 5, 10)
METHODS = {"fedavg": "FL", "fd": "FD, with mean outputs and distillation"}


def setup(method: str, steps: int) -> Setup:
    """Ten devices that make so many steps of one sample."""
    experiment = resolve(
        {
            "data": "digits",
            "scale": "unit",
            "partition": {"name": "iid", "clients": DEVICES},
            "model": "mix2fld-cnn",
            "method": method,
            "train": {"cohort": DEVICES, "steps": steps, "batch_size": 1, "lr_decay": 1.0},
        }
    )
    return make_setup(experiment, pictures(5 * DEVICES, CLASSES))


def devices(engine: LoopEngine) -> Callable[[], None]:
    """A round's training on all devices, told the mean outputs of the round before where the method uses any."""
    made = engine.setup
    said = {"outputs": torch.full((CLASSES, CLASSES), 1 / CLASSES)} if made.experiment.method.terms else {}
    task = TrainTask(0, made.weights(), None, made.sizes(0), said)
    return lambda: list(engine.train(task, range(DEVICES))).clear()


def server(engine: LoopEngine, steps: int) -> Callable[[], None]:
    """The server's conversion of outputs to a model, on a hundred seeds."""
    made = engine.setup
    x, y = made.data.train.x[:SEEDS].float(), made.data.train.y[:SEEDS]
    known = ServerContext(
        **vars(model_spec(made, engine.server_model())),
        round=0,
        lr=0.01,
        rng=np.random.default_rng(0),
        global_outputs={"outputs": torch.full((CLASSES, CLASSES), 1 / CLASSES)},
        pool=Pool({"x": x, "y": y}, np.full(SEEDS, -1)),
    )

    def convert() -> None:
        DistillToModel(steps=steps).refine(made.weights(), known)

    return convert


def ways(steps: int) -> dict[tuple[str, str, str], Callable[[], None]]:
    """What is timed, by who works, what it does, and how."""
    found: dict[tuple[str, str, str], Callable[[], None]] = {}
    for method, name in METHODS.items():
        made = setup(method, steps)
        found["devices", name, "loop"] = devices(LoopEngine(made))
        for stack in STACKS:
            found["devices", name, f"stacks of {stack}"] = devices(StackedEngine(made, stack=stack))
    made = setup("fedavg", steps)
    found["server", "outputs to a model", "plain layers"] = server(LoopEngine(made), steps)
    found["server", "outputs to a model", "our layers"] = server(StackedEngine(made), steps)
    return found


def measured(steps: int, turns: int) -> list[dict[str, Any]]:
    """Processor seconds of every way."""
    rows = []
    for (who, what, how), seconds in timed(ways(steps), turns - 1, time.process_time).items():
        step = statistics.median(seconds) / steps
        rows.append({"who": who, "what": what, "how": how, "step_ms": 1000 * step, "round_s": ROUND[who] * step})
    return rows


def main() -> None:
    """Measure all ways, print them, and write them down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = measured(given.steps, given.turns)
    table = Table("who", "what", "how", "ms a step", "s a round", title=f"Steps of one sample, {DEVICES} devices")
    for row in rows:
        table.add_row(row["who"], row["what"], row["how"], f"{row['step_ms']:.2f}", f"{row['round_s']:.1f}")
    Console().print(table)
    if given.out:
        facts = {"torch": torch.__version__, "threads": 1, "cores": os.cpu_count(), "devices": DEVICES, "round": ROUND}
        given.out.write_text(json.dumps({**facts, "steps": given.steps, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
