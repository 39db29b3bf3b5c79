"""A job as fedblend's parts. They are a module of their own, so that every rank makes the same world from its file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jobs import CLASSES, Settings

from fedblend import part
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.optimizer import Training
from fedblend.core.registry import FilePath
from fedblend.engines import loop_engine

MODELS: dict[str, dict[str, Any]] = {
    "lenet5": {"name": "lenet5"},
    "fedmix-vgg": {"name": "fedmix-vgg"},
    "pfl-cnn": {"name": "module", "path": "jobs:PflCnn"},
}
"""A job's network -> fedblend's."""


@part("dataset", "job")
class JobData:
    """The samples that a job's clients hold, each with its client, and its test half."""

    path: FilePath
    """The file that jobs.py wrote."""
    stored_order: bool = False
    """Train on batches in the stored order, as the peers do, instead of on fedblend's own shuffled ones."""

    def load(self) -> Dataset:
        """Read the job; pixels stay uint8, as fedblend keeps them."""
        if self.stored_order:
            # Every rank reads the data before it trains, so this reaches all of them.
            loop_engine.batches = in_stored_order
        with np.load(self.path, allow_pickle=False) as file:
            held = file["clients"]
            rows, owner = held.reshape(-1), np.repeat(np.arange(len(held)), held.shape[1])
            train = Samples(torch.from_numpy(file["x"][rows]), torch.from_numpy(file["y"][rows]), owner)
            test = Samples(torch.from_numpy(file["test_x"]), torch.from_numpy(file["test_y"]))
        return Dataset("job", "image", train, test, tuple(map(str, range(CLASSES))))


def in_stored_order(n: int, train: Training, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """What fedblend's own ``batches`` gives for whole epochs, but for the order of the samples."""
    assert train.steps is None
    starts = [epoch * n + first for epoch in range(train.epochs) for first in range(0, n, train.batch_size)]
    return np.tile(np.arange(n), train.epochs), np.array([*starts, train.epochs * n], np.int64)


def table_of(settings: Settings, path: str, stored_order: bool) -> dict[str, Any]:
    """A job as an experiment's table; evaluation is left to the caller."""
    model = dict(MODELS[settings.model])
    if settings.model == "pfl-cnn":
        model["arguments"] = {"dropout": settings.dropout}
    elif settings.model == "fedmix-vgg" and not settings.dropout:
        model["dropout"] = 0.0
    return {
        "data": {"name": "fedblend_job:JobData", "path": path, "stored_order": stored_order},
        "partition": {"name": "natural", "choose": "first"},
        "model": model,
        "train": {
            "cohort": settings.cohort,
            "epochs": settings.epochs,
            "batch_size": settings.batch_size,
            "lr": settings.lr,
            "lr_decay": 1.0,
        },
        "seed": settings.seed,
    }
