"""The jobs that all contestants are timed on: data, who holds what, who trains when, first weights.

A job is one .npz file, so that every contestant does the same work: the same clients in each round, the same
samples in the same batches (in the stored order; pfl never shuffles), the same first weights. Needs torch and
numpy; only *writing* jobs A and B needs fedblend, for its loader of Fashion-MNIST. MNIST, whose images have the same
size, takes its place where it is missing and FEDBLEND_DATA has MNIST: the same work, another accuracy.

    python benchmarks/peers/jobs.py A A.npz

    A   LeNet-5, Fashion-MNIST, 100 clients of 200 samples and 2 classes, cohort 10, 2 epochs, batches of 10
    B   pfl-research's CNN on 28x28 (Fashion-MNIST), 1,000 clients of 50 samples, cohort 50, 1 epoch
    C   FedMix's VGG on 32x32x3 (synthetic), 40 clients of 100 samples, cohort 4, 1 epoch: 10 steps
    D   the same at the size of FedMix's CIFAR10 runs, for GPUs: 60 clients of 830 samples, cohort 15, 2 epochs
"""

from __future__ import annotations

import one_thread  # noqa: F401  # isort: skip

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

torch.set_num_threads(1)

CLASSES = 10
ROUNDS = 1000
"""Rounds for which a job names the cohorts."""

AT_ONCE = 5000
"""Synthetic images that are made in one go: their noise is in double precision."""

Images = tuple[np.ndarray, np.ndarray]
"""Pixels uint8 [n, C, H, W] and labels int64 [n]."""


def lenet5(dropout: bool) -> nn.Sequential:
    """fedblend's lenet5 for 28x28x1, layer by layer; it has no dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, CLASSES),
    )  # fmt: skip


class PflCnn(nn.Module):
    """The "simple CNN" of pfl-research's benchmarks for 28x28x1, without padding as there."""

    def __init__(self, dropout: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.ReLU(),
            nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25 * dropout),
            nn.Flatten(), nn.Linear(64 * 12 * 12, 128), nn.ReLU(), nn.Dropout(0.5 * dropout),
            nn.Linear(128, CLASSES),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, 1, 28, 28] to [B, 10]."""
        return self.layers(x)


def fedmix_vgg(dropout: bool) -> nn.Sequential:
    """fedblend's fedmix-vgg for 32x32x3, layer by layer."""
    rate = 0.1 * dropout
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(),
        nn.Conv2d(128, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(rate),
        nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(rate),
        nn.Flatten(), nn.Linear(256 * 4 * 4, 512), nn.ReLU(),
        nn.Linear(512, 512), nn.ReLU(), nn.Dropout(rate),
        nn.Linear(512, CLASSES),
    )  # fmt: skip


MODELS: dict[str, Callable[[bool], nn.Module]] = {"lenet5": lenet5, "pfl-cnn": PflCnn, "fedmix-vgg": fedmix_vgg}


@dataclass(frozen=True)
class Settings:
    """What a job is, without its data."""

    name: str
    model: str
    clients: int
    samples: int
    cohort: int
    epochs: int
    batch_size: int
    lr: float
    dropout: bool = True
    seed: int = 0
    data: str = ""


JOBS = {
    "A": Settings("A", "lenet5", clients=100, samples=200, cohort=10, epochs=2, batch_size=10, lr=0.01),
    "B": Settings("B", "pfl-cnn", clients=1000, samples=50, cohort=50, epochs=1, batch_size=10, lr=0.03),
    "C": Settings("C", "fedmix-vgg", clients=40, samples=100, cohort=4, epochs=1, batch_size=10, lr=0.01),
    "D": Settings("D", "fedmix-vgg", clients=60, samples=830, cohort=15, epochs=2, batch_size=10, lr=0.01),
}


@dataclass(frozen=True, eq=False)
class Job:
    """A job as read from its file. Images are scaled once, here, so that scaling is in nobody's timing."""

    settings: Settings
    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    clients: np.ndarray
    cohorts: np.ndarray
    start: dict[str, torch.Tensor]

    def network(self) -> nn.Module:
        """The network with the first weights."""
        model = MODELS[self.settings.model](self.settings.dropout)
        model.load_state_dict(self.start)
        return model

    @cached_property
    def local(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each client's samples, float32 [n, C, H, W], and labels, int64 [n], in the order of its batches."""
        return [(self.x[rows], self.y[rows]) for rows in torch.from_numpy(self.clients)]

    def batches(self, client: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch of a client's batches, as views of its samples."""
        x, y = self.local[client]
        size = self.settings.batch_size
        return zip(x.split(size), y.split(size), strict=True)

    def on(self, device: str) -> Job:
        """The same with the training samples on a device, for contestants that keep them there."""
        return replace(self, x=self.x.to(device), y=self.y.to(device))

    def cohort(self, round: int) -> list[int]:
        """The clients of a round, in ascending order."""
        return self.cohorts[round].tolist()


def load(path: str | Path) -> Job:
    """Read a job's file."""
    with np.load(path, allow_pickle=False) as file:
        settings = Settings(**json.loads(str(file["settings"])))
        factor, offset = (torch.from_numpy(file[name]) for name in ("factor", "offset"))
        x, test_x = ((torch.from_numpy(file[name]) * factor).add_(offset) for name in ("x", "test_x"))
        y, test_y = (torch.from_numpy(file[name]) for name in ("y", "test_y"))
        start = {n.removeprefix("start/"): torch.from_numpy(file[n]) for n in file.files if n.startswith("start/")}
        return Job(settings, x, y, test_x, test_y, file["clients"], file["cohorts"], start)


def small_images() -> tuple[str, tuple[Images, Images]]:
    """Name, training and test half of Fashion-MNIST, or of MNIST where only that lies here."""
    # Here, because the peers' environments do not have fedblend.
    from fedblend.data.loaders.mnist import FASHION_MNIST, MNIST, FashionMnist, Mnist, local_files

    data = (Mnist() if local_files(MNIST) and not local_files(FASHION_MNIST) else FashionMnist()).load()
    return data.name, ((data.train.x.numpy(), data.train.y.numpy()), (data.test.x.numpy(), data.test.y.numpy()))


def patterns(n: int, rng: np.random.Generator) -> tuple[Images, Images]:
    """``n`` training and 2,000 test images of 32x32x3: a coarse pattern for each class under heavy noise."""
    coarse = rng.uniform(64, 192, (CLASSES, 3, 4, 4)).repeat(8, axis=2).repeat(8, axis=3)

    def half(size: int) -> Images:
        y = np.arange(size) % CLASSES
        x = np.empty((size, 3, 32, 32), np.uint8)
        for start in range(0, size, AT_ONCE):
            some = y[start : start + AT_ONCE]
            x[start : start + AT_ONCE] = (coarse[some] + rng.normal(0, 48, (len(some), 3, 32, 32))).clip(0, 255)
        return x, y

    return half(n), half(2000)


def two_classes_each(y: np.ndarray, settings: Settings, rng: np.random.Generator) -> np.ndarray:
    """Samples of each client, int64 [clients, samples]: half of one class, half of another, shuffled."""
    pools = {label: iter(rng.permutation(np.flatnonzero(y == label))) for label in range(CLASSES)}

    def deal(client: int) -> np.ndarray:
        first = client % CLASSES
        # The second class moves on by 1 to 9 places with every ten clients: so each class is dealt equally often.
        second = (first + 1 + client // CLASSES % (CLASSES - 1)) % CLASSES
        drawn = [next(pools[label]) for label in (first, second) for _ in range(settings.samples // 2)]
        return rng.permutation(np.array(drawn, np.int64))

    return np.stack([deal(client) for client in range(settings.clients)])


def evenly(y: np.ndarray, settings: Settings, rng: np.random.Generator) -> np.ndarray:
    """Samples of each client, int64 [clients, samples], drawn from all without replacement."""
    drawn = rng.permutation(len(y))[: settings.clients * settings.samples]
    return drawn.reshape(settings.clients, settings.samples)


def standard(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Factor and offset, float32 [1, C, 1, 1], to mean 0 and deviation 1 in each channel."""
    mean, deviation = x.mean((0, 2, 3), keepdims=True), x.std((0, 2, 3), keepdims=True)
    return (1 / deviation).astype(np.float32), (-mean / deviation).astype(np.float32)


def first_weights(settings: Settings) -> dict[str, np.ndarray]:
    """He's weights (normal, for ReLU) and no biases: with PyTorch's own, the VGG stays at chance for very long."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        model = MODELS[settings.model](settings.dropout)
        for layer in model.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def write(settings: Settings, path: str | Path) -> None:
    """Make a job's file. Only samples that a client holds are kept, in the order of the clients."""
    rng = np.random.default_rng(settings.seed)
    held = settings.clients * settings.samples
    data, (train, test) = ("patterns", patterns(held, rng)) if settings.name in "CD" else small_images()
    split = two_classes_each if settings.name == "A" else evenly
    rows = split(train[1], settings, rng).reshape(-1)
    x, y = train[0][rows], train[1][rows]
    factor, offset = standard(x)
    cohorts = [np.sort(rng.choice(settings.clients, settings.cohort, replace=False)) for _ in range(ROUNDS)]
    start: dict[str, Any] = {f"start/{name}": array for name, array in first_weights(settings).items()}
    np.savez(
        path,
        settings=json.dumps(vars(settings) | {"data": data}),
        x=x, y=y, test_x=test[0], test_y=test[1], factor=factor, offset=offset,
        clients=np.arange(held).reshape(settings.clients, settings.samples),
        cohorts=np.stack(cohorts),
        **start,
    )  # fmt: skip


def main() -> None:
    """Write one job."""
    parser = argparse.ArgumentParser(description="Write a job's file.")
    parser.add_argument("job", choices=sorted(JOBS))
    parser.add_argument("out", type=Path)
    # With dropout, contestants draw different numbers; without it all must end with the same weights.
    parser.add_argument("--no-dropout", action="store_true", help="to check that all do the same work")
    options = parser.parse_args()
    settings = JOBS[options.job]
    write(Settings(**vars(settings) | {"dropout": not options.no_dropout}), options.out)


if __name__ == "__main__":
    main()
