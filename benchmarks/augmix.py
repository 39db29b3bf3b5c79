"""What a Fed-AugMix step costs beside a FedAvg step, and which part of it is augmentation.

The setting is client_step.py's. Contestants train the same client in turn, many times over, in the loop engine, and
five clients at once in the stacked engine; ratios are taken within each turn. "Three passes" is Fed-AugMix whose views
are the image itself: what the objective costs without any augmentation. "In PyTorch" makes the views without the
C++ kernel.

    python benchmarks/augmix.py          or, with the number of turns:          python benchmarks/augmix.py 40
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from client_step import SAMPLES, images, world_of
from rich.console import Console
from rich.table import Table
from turns import timed

from fedblend import part
from fedblend._kernels import build
from fedblend.core.context import StepPlan
from fedblend.core.dataset import Dataset
from fedblend.core.engine import TrainTask
from fedblend.core.random import stream
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.fields import Method
from fedblend.methods.augment.augmix import augmix, draw_augmix
from fedblend.methods.objectives.augmix import AugMix

STACK, BATCH = 5, 10
GOAL = 3.5
FEDAVG, PASSES, OURS, PLAINLY = "fedavg", "three passes", "fed-augmix", "fed-augmix, in PyTorch"


@part("objective", "three-passes")
class ThreePasses(AugMix):
    """Fed-AugMix whose views are the image itself."""

    def views(self, x: torch.Tensor, drawn: Mapping[str, torch.Tensor], scale: Any) -> torch.Tensor:
        return torch.stack([x, x])


METHODS: dict[str, Any] = {
    FEDAVG: "fedavg",
    PASSES: Method(objective=ThreePasses()),
    OURS: "fed-augmix",
    PLAINLY: "fed-augmix",
}


def without_kernel(run: Callable[[], None]) -> Callable[[], None]:
    """The same, with views made in PyTorch."""

    def changed() -> None:
        library, build.library = build.library, lambda source=build.SOURCE: None
        try:
            run()
        finally:
            build.library = library

    return changed


def client(name: str, data: Dataset, stacked: bool) -> Callable[[], None]:
    """A round of one client in the loop engine, or of a stack of them."""
    setup = world_of("fedavg", data)
    method = Method.model_validate(METHODS[name])
    setup = replace(setup, experiment=setup.experiment.model_copy(update={"method": method}))
    engine = StackedEngine(setup, stack=STACK) if stacked else LoopEngine(setup)
    task = TrainTask(0, setup.weights(), None, setup.sizes(0))
    clients = list(range(STACK)) if stacked else [0]

    def run() -> None:
        for _ in engine.train(task, clients):
            pass

    return without_kernel(run) if name == PLAINLY else run


def show(title: str, seconds: Mapping[str, list[float]], steps: int) -> float:
    """Print milliseconds a client's step, and ratios; returns Fed-AugMix's to FedAvg's."""
    table = Table("contestant", "ms a step", "quartiles", "x fedavg", title=title)
    found = {}
    for name, values in seconds.items():
        low, middle, high = (1e3 * one / steps for one in statistics.quantiles(values, n=4))
        found[name] = statistics.median(a / b for a, b in zip(values, seconds[FEDAVG], strict=True))
        table.add_row(name, f"{middle:.3f}", f"{low:.3f}-{high:.3f}", f"{found[name]:.2f}")
    Console().print(table)
    return found[OURS]


def alone(data: Dataset, turns: int) -> None:
    """Print what views of one batch take, and what drawing a client's round does."""
    unit = data.train.x[:BATCH] / 255
    rng, settings = stream(0, "benchmark"), AugMix()
    plan = StepPlan(torch.full((2 * SAMPLES // BATCH,), BATCH).numpy(), BATCH, 0)
    arrays = draw_augmix(rng, (BATCH,), settings.severity, settings.chains, settings.depth, settings.alpha)
    drawn = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def views() -> None:
        for _ in range(20):
            augmix(unit, drawn)

    runs: dict[str, Callable[[], object]] = {
        "views": views,
        "views, in PyTorch": without_kernel(views),
        "draws": lambda: settings.draw(rng, plan),
    }
    scale = {"views": 20, "views, in PyTorch": 20, "draws": len(plan.sizes)}
    for name, values in timed(runs, turns).items():
        print(f"{name} of a batch: {1e3 * statistics.median(values) / scale[name]:.3f} ms")


def main(turns: int) -> None:
    """Time all contestants and print the tables."""
    torch.set_num_threads(1)
    if build.library() is None:
        print(f"without kernels: {build.missing()}")
    build.keep_memory()
    data = images()
    steps = 2 * SAMPLES // BATCH
    for stacked, title in ((False, "loop engine"), (True, f"stacked engine, {STACK} clients")):
        runs = {name: client(name, data, stacked) for name in METHODS}
        ratio = show(title, timed(runs, turns), steps * (STACK if stacked else 1))
        print(f"fed-augmix / fedavg: {ratio:.2f}, goal at most {GOAL}: {'met' if ratio <= GOAL else 'NOT met'}")
    alone(data, turns)
    print(f"{platform.machine()}, torch {torch.__version__}, 1 thread, medians of {turns} turns.")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
