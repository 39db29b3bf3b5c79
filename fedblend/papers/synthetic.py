"""A world of made-up data of a data set's shape: what time and memory of a step do not depend on is left out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedblend.core import registry
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.experiment.config import Experiment
from fedblend.experiment.fields import Method
from fedblend.experiment.setup import make_setup
from fedblend.papers.availability import SIZES, Size

CLIENTS, BATCHES = 2, 2
"""Clients of the made-up data, and batches that each holds."""


def size_of(experiment: Experiment) -> Size:
    """The size of an experiment's data set. Raises :class:`FedblendError` if it is not known."""
    size = SIZES.get(experiment.data.name)
    if size is None:
        raise FedblendError(f"data: the size of '{experiment.data.name}' is not known; valid: {', '.join(SIZES)}")
    if getattr(experiment.data, "max_samples", None) or getattr(experiment.data, "roles", None):
        # Of the plays' roles only so many, and of each only so much.
        roles = experiment.data.roles or size.clients
        most = experiment.data.max_samples or (size.train + size.test) // size.clients
        train = round(roles * most * (1 - experiment.data.test_share))
        return replace(size, train=train, test=roles * most - train, clients=roles)
    return size


def made_up(experiment: Experiment) -> Setup:
    """An experiment's world with two clients of two batches each, on the processor."""
    size = size_of(experiment)
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
        # Its clients' steps are those of plain training, or there are none.
        changes["method"] = Method()
    return make_setup(experiment.model_copy(update=changes), _data(experiment, size))


def _data(experiment: Experiment, size: Size) -> Dataset:
    count = CLIENTS * BATCHES * experiment.train.batch_size
    rng = np.random.default_rng(0)
    text = len(size.shape) == 1 and size.shape[0] > 2
    x: Any = rng.integers(0, size.classes if text else 256, (count, *size.shape), np.uint8)
    x = x if text or len(size.shape) == 3 else x.astype(np.float32)
    half = Samples(torch.from_numpy(x), torch.from_numpy(np.arange(count) % size.classes))
    kind: Any = "text" if text else "image" if len(size.shape) == 3 else "features"
    names = tuple(map(str, range(size.classes)))
    return Dataset(experiment.data.name, kind, half, half, names, vocabulary=size.classes if text else 0)
