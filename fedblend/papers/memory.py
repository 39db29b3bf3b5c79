"""The tensors that a training step keeps in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedblend.core import registry
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.registry import part
from fedblend.core.setup import Setup
from fedblend.experiment.config import Experiment
from fedblend.experiment.fields import Method
from fedblend.experiment.make_setup import make_setup
from fedblend.papers.measures import CellRun, Measure

MEGABYTE = 10**6


@part("measure", "step-memory")
class StepMemory(Measure):
    """Tensors that a client's step keeps for its backward passes, weights among them, in MB (FedMix, appendix G).

    Each storage that autograd saves counts once. Inputs are synthetic, of the data set's shape. The number is therefore
    the same on every device and needs no data. The memory that a device's libraries take for themselves is left out.
    """

    trains = False

    def measured(self, cell: CellRun) -> float:
        """The largest number of bytes kept at once, in 10^6 bytes."""
        from fedblend.engines.loop_engine import LoopEngine
        from fedblend.engines.trials import seconds_per_step
        from fedblend.runs.runner import one_thread

        with one_thread():
            engine = LoopEngine(synthetic_setup(cell.experiment), "cpu")
            return most_kept(lambda: seconds_per_step(engine, 1)) / MEGABYTE


def most_kept(work: Callable[[], object]) -> int:
    """The most bytes that autograd kept at once for backward passes; a shared storage counts once.

    >>> x = torch.zeros(250, requires_grad=True)
    >>> most_kept(lambda: x.exp().sum().backward())
    1000
    """
    references: Counter[int] = Counter()
    now = most = 0

    class Kept:
        """A saved tensor, counted for as long as the graph holds it."""

        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal now, most
            self.tensor = tensor
            storage = tensor.untyped_storage()
            self.address, self.size = storage.data_ptr(), storage.nbytes()
            if not references[self.address]:
                now += self.size
                most = max(most, now)
            references[self.address] += 1

        def __del__(self) -> None:
            nonlocal now
            references[self.address] -= 1
            if not references[self.address]:
                now -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        work()
    return most


# Synthetic data -------------------------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, int, int], int]] = {
    "cifar10": ((3, 32, 32), 10),
    "cifar100": ((3, 32, 32), 100),
    "digits": ((1, 8, 8), 10),
    "fashion-mnist": ((1, 28, 28), 10),
    "femnist": ((1, 28, 28), 62),
    "mnist": ((1, 28, 28), 10),
    "mnist5k": ((1, 28, 28), 10),
}
"""An image's shape (channels, height, width) and the number of classes, by data set."""

CLIENTS, BATCHES = 2, 2  # Clients of the synthetic data, and batches that each holds


def synthetic_setup(experiment: Experiment) -> Setup:
    """An experiment's setup with two clients of two synthetic batches each, on the CPU."""
    train = experiment.train.model_copy(update={"cohort": CLIENTS, "epochs": 1, "steps": None})
    changes: dict[str, Any] = {
        "partition": registry.build("partition", {"name": "iid", "clients": CLIENTS}),
        "fraction": 1.0,
        "holdout": 0.0,
        "arrival": None,
        "train": train,
        "device": "cpu",
    }
    method = experiment.method
    if method.stateful_clients or not method.upload.is_model or method.sharing.server is not None:
        # The clients of these methods take plain training steps, or none.
        changes["method"] = Method()
    return make_setup(experiment.model_copy(update=changes), _synthetic_data(experiment))


def _synthetic_data(experiment: Experiment) -> Dataset:
    name = experiment.data.name
    if name not in SHAPES:
        raise FedblendError(f"data: the shape of '{name}' is not known; valid: {', '.join(SHAPES)}")
    shape, classes = SHAPES[name]
    count = CLIENTS * BATCHES * experiment.train.batch_size
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8))
    half = Samples(x, torch.arange(count) % classes)
    return Dataset(name, "image", half, half, tuple(map(str, range(classes))))
