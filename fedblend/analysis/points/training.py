"""Training a model on samples at hand, and its test accuracy: what probes that train a model share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import CHUNK
from fedblend.core.errors import FedblendError
from fedblend.core.random import lent_generator
from fedblend.core.setup import Setup

Tick = Callable[[int, int], None]
"""Called with how many steps are done, and of how many."""


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def new_model(setup: Setup, purpose: str) -> nn.Module:
    """A new model of the run's architecture, whose first weights are drawn for this purpose."""
    shape = tuple(setup.scale(setup.data.train.x[:1]).shape[1:])
    with lent_generator(setup.experiment.seed, purpose):
        model: nn.Module = setup.experiment.model.build(shape, setup.task.outputs)
    return model


def train(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor,
    epochs: int,
    lr: float,
    batch_size: int,
    rng: np.random.Generator,
    tick: Tick = no_progress,
) -> nn.Module:
    """Train a model in place with plain SGD on the mean cross-entropy (AggEnhance, Algorithm 1, lines 11 to 16).

    ``x`` [n, ...] is as the model takes it, ``y`` int64 [n]. Returns the model in evaluation mode. Raises
    :class:`FedblendError` if its weights become infinite.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.train()
    with lent_generator(int(rng.integers(2**31)), "probe"):  # for dropout
        for epoch in range(epochs):
            for rows in torch.from_numpy(rng.permutation(len(y))).split(batch_size):
                slopes = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), trained)
                with torch.no_grad():
                    for parameter, slope in zip(trained, slopes, strict=True):
                        parameter.sub_(slope, alpha=lr)
            tick(epoch + 1, epochs)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in trained):
        raise FedblendError(f"lr: {lr:g}: the weights became NaN or infinite in training; take a smaller one")
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, setup: Setup) -> float:
    """The share of the test samples that a model puts into their class."""
    test = setup.data.test
    right = 0
    for x, y in zip(test.x.split(CHUNK), test.y.split(CHUNK), strict=True):
        right += int((model(setup.scale(x)).argmax(1) == y).sum())
    return right / len(test)
