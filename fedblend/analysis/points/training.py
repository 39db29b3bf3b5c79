"""Plain SGD on given samples, test accuracy, and a new model of a run's points alone (AggEnhance, section 5.2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import LoadedRun, chunks
from fedblend.core.errors import FedblendError
from fedblend.core.module import train_mode
from fedblend.core.random import lent_generator, stream
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
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, settings: TrainingSettings, rng: np.random.Generator
) -> nn.Module:
    """Train a model in place with plain SGD on the mean cross-entropy (AggEnhance, Algorithm 1, lines 11 to 16).

    ``x`` [n, ...] is on the model's scale, ``y`` int64 [n]. Returns the model in evaluation mode. Raises
    :class:`FedblendError` if its weights become infinite.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    train_mode(model)
    with lent_generator(int(rng.integers(2**31)), "probe"):  # for dropout
        for _ in range(settings.epochs):
            for rows in torch.from_numpy(rng.permutation(len(y))).split(settings.batch_size):
                gradients = torch.autograd.grad(F.cross_entropy(model(x[rows]), y[rows]), trainable)
                with torch.no_grad():
                    for parameter, gradient in zip(trainable, gradients, strict=True):
                        parameter.sub_(gradient, alpha=settings.lr)
    if not all(bool(torch.isfinite(parameter).all()) for parameter in trainable):
        raise FedblendError(f"lr: {settings.lr:g}: the weights became NaN or infinite in training; use a smaller one")
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, setup: Setup) -> float:
    """Return a model's accuracy on the test samples, from 0 to 1."""
    test = setup.data.test
    correct = (int((model(setup.scale(x)).argmax(1) == y).sum()) for x, y in chunks(test.x, test.y))
    return sum(correct) / len(test)


# A new model ------------------------------------------------------------------------------------------------------

EPOCHS = 100  # Epochs of a new model; the paper gives none


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of plain SGD on points: epochs, learning rate and batch size."""

    epochs: int
    lr: float
    batch_size: int

    @staticmethod
    def for_run(
        loaded_run: LoadedRun, epochs: int | None = None, lr: float | None = None, batch_size: int | None = None
    ) -> TrainingSettings:
        """Return the given settings; by default 100 epochs, and learning rate and batch size of the run's server step.

        The step's own epochs (10) begin at a trained aggregate. A new model begins untrained, and few points make few
        steps in an epoch: on 120 points of digits it reached 33 % in 10 epochs, 74 % in 100, 75 % in 500.
        Raises :class:`FedblendError` for values of 0 or less.
        """
        step, train = loaded_run.setup.experiment.method.server_step, loaded_run.setup.experiment.train
        settings = TrainingSettings(
            EPOCHS if epochs is None else epochs,
            (getattr(step, "lr", None) or train.lr) if lr is None else lr,
            getattr(step, "batch_size", 32) if batch_size is None else batch_size,
        )
        for name, value in (("epochs", epochs), ("lr", lr), ("batch_size", batch_size)):
            if value is not None and not 0 < value < float("inf"):
                raise FedblendError(f"{name}: {value!r} is not valid: must be above 0")
        return settings


def fresh_model(loaded_run: LoadedRun, settings: TrainingSettings, round: int | None = None) -> nn.Module:
    """Train a new model of the run's architecture on the run's points alone (AggEnhance, section 5.2).

    The model is trained on the points up to ``round`` (default: all). Its first weights and the order of batches do not
    depend on the round. Raises :class:`FedblendError` if it diverges.
    """
    points = loaded_run.points if round is None else loaded_run.points.until(round)
    rng = stream(loaded_run.setup.experiment.seed, "fresh")
    model = new_model(loaded_run.setup, "fresh")
    x = loaded_run.setup.scale.from_unit(points.x)
    return train(model, x, points.labels, settings, rng)


def fresh_accuracy(loaded_run: LoadedRun, settings: TrainingSettings, round: int | None = None) -> float:
    """Return the test accuracy of :func:`fresh_model`, from 0 to 1 (Figure 8, left)."""
    return accuracy(fresh_model(loaded_run, settings, round), loaded_run.setup)
