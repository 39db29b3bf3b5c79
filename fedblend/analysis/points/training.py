"""Plain SGD on given samples, and test accuracy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import CHUNK
from fedblend.core.errors import FedblendError
from fedblend.core.module import train_mode
from fedblend.core.random import lent_generator
from fedblend.core.setup import Setup

Tick = Callable[[int, int], None]
"""Called with the number of finished steps and their total."""


def no_progress(done: int, total: int) -> None:
    """Ignore progress."""


def new_model(setup: Setup, purpose: str) -> nn.Module:
    """Return a new model of the run's architecture; its first weights depend on ``purpose``."""
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

    ``x`` [n, ...] is on the model's scale, ``y`` int64 [n]. Returns the model in evaluation mode. Raises
    :class:`FedblendError` if its weights become infinite.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train_mode(model)
    with lent_generator(int(rng.integers(2**31)), "probe"):  # for dropout
        for epoch in range(epochs):
            for rows in torch.from_numpy(rng.permutation(len(y))).split(batch_size):
                gradients = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), trainable)
                with torch.no_grad():
                    for parameter, gradient in zip(trainable, gradients, strict=True):
                        parameter.sub_(gradient, alpha=lr)
            tick(epoch + 1, epochs)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in trainable):
        raise FedblendError(f"lr: {lr:g}: the weights became NaN or infinite in training; use a smaller one")
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, setup: Setup) -> float:
    """Return a model's accuracy on the test samples, from 0 to 1."""
    test = setup.data.test
    correct = 0
    for x, y in zip(test.x.split(CHUNK), test.y.split(CHUNK), strict=True):
        correct += int((model(setup.scale(x)).argmax(1) == y).sum())
    return correct / len(test)
