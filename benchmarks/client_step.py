"""What a client step costs: FedAvg, NaiveMix and FedMix in the loop engine beside a bare PyTorch loop.

The setting is examples/fashion-mnist.toml's (LeNet-5, 300 samples a client, 2 epochs, batches of 10), on random
images of the same shape, so that nothing has to be downloaded. All contestants train the same client on the
same tensors, in turn, many times over; the table shows medians and their ratios within this one run.

    make bench          or          python benchmarks/client_step.py [repeats]
"""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from turns import timed

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.engine import TrainTask
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.sharing import gather
from fedblend.engines.assignment import batches
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup

CLIENTS, SAMPLES, CLASSES = 60, 300, 10
GOALS = {"fedavg": ("bare loop", 1.15), "fedmix": ("fedavg", 2.6)}


def images() -> Dataset:
    """Random uint8 images shaped like Fashion-MNIST's."""
    rng = np.random.default_rng(0)
    n = CLIENTS * SAMPLES
    x = torch.from_numpy(rng.integers(0, 256, (n, 1, 28, 28), np.uint8))
    y = torch.from_numpy(rng.integers(0, CLASSES, n))
    return Dataset("random", "image", Samples(x, y), Samples(x[:1000], y[:1000]), tuple("0123456789"))


def world_of(method: str, data: Dataset) -> Setup:
    """The benchmark's experiment with a method."""
    partition = {"name": "iid", "clients": CLIENTS}
    table = {"data": "mnist5k", "partition": partition, "train": {"cohort": 15}, "method": method}
    return make_setup(resolve(table), data)


def fedblend_client(method: str, data: Dataset) -> Callable[[], dict[str, torch.Tensor]]:
    """One client's round in the loop engine; returns its weights."""
    setup = world_of(method, data)
    engine, weights = LoopEngine(setup), setup.weights()
    sizes = setup.sizes(0)
    everyone = range(CLIENTS)
    pool = gather(dict(engine.share(0, weights, everyone, sizes))) if setup.method.sharing.plan.active else None
    task = TrainTask(0, weights, pool, sizes)
    return lambda: next(iter(engine.train(task, [0]))).weights


def bare_client(data: Dataset) -> Callable[[], dict[str, torch.Tensor]]:
    """The same client's round as one would write it by hand: same batches, same start, plain cross-entropy."""
    setup = world_of("fedavg", data)
    model, start, train = setup.model, setup.weights(), setup.experiment.train
    x, y = setup.samples(0, SAMPLES)
    inputs = setup.scale(x)
    order, bounds = batches(SAMPLES, setup.training, stream(0, "batches", 0, 0))
    rows = torch.from_numpy(order)
    loss_of = nn.CrossEntropyLoss()

    def run() -> dict[str, torch.Tensor]:
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=train.lr)
        for a, b in pairwise(bounds):
            chosen = rows[a:b]
            optimizer.zero_grad()
            loss_of(model(inputs[chosen]), y[chosen]).backward()
            optimizer.step()
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}

    return run


def main(repeats: int) -> None:
    """Time all contestants in turn and print the table."""
    torch.set_num_threads(1)
    data = images()
    contestants = {"bare loop": bare_client(data)}
    contestants |= {name: fedblend_client(name, data) for name in ("fedavg", "naivemix", "fedmix")}
    same = {name: contestants[name]() for name in ("bare loop", "fedavg")}
    apart = max(float((same["bare loop"][n] - t).abs().max()) for n, t in same["fedavg"].items())
    steps = 2 * SAMPLES // 10
    seconds = timed(contestants, repeats, warm_up=0)
    times = {name: [1e3 * one / steps for one in values] for name, values in seconds.items()}
    medians = {name: statistics.median(values) for name, values in times.items()}
    show(medians, times)
    print(f"FedAvg's weights differ from the bare loop's by at most {apart:.1e} (the same work was done).")
    print(f"{platform.machine()}, torch {torch.__version__}, 1 thread, medians of {repeats} repeats in turn.")
    for name, (base, goal) in GOALS.items():
        ratio = medians[name] / medians[base]
        print(f"{name} / {base}: {ratio:.2f}, goal at most {goal}: {'met' if ratio <= goal else 'NOT met'}")


def show(medians: dict[str, float], times: dict[str, list[float]]) -> None:
    """Print milliseconds a step, their spread, and ratios."""
    table = Table("contestant", "ms a step", "quartiles", "x bare loop", "x fedavg")
    for name, value in medians.items():
        low, _, high = statistics.quantiles(times[name], n=4)
        ratios = [f"{value / medians[base]:.2f}" for base in ("bare loop", "fedavg")]
        table.add_row(name, f"{value:.3f}", f"{low:.3f}-{high:.3f}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
