"""Do the points pull a model where the clients' real samples would? The cosine of the two gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import CHUNK, LoadedRun

Batch = tuple[torch.Tensor, torch.Tensor]


def alignment(model: nn.Module, points: torch.Tensor, labels: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    """The cosine, from -1 to 1, between the gradients of the loss on points and on real samples.

    AggEnhance, equation 9: tuning on the points lowers the loss on the samples, to first order, where it is not
    negative. ``points`` [n, ...] and ``x`` [m, ...] are as the model takes them (on its scale), ``labels`` [n] and
    ``y`` [m] their classes. The loss is the mean cross-entropy, the gradient that of all weights that are trained,
    the model in evaluation mode. NaN where one of the gradients is zero.
    """
    return cosine(gradient(model, chunks(points, labels)), gradient(model, chunks(x, y)))


def alignment_by_round(loaded_run: LoadedRun) -> dict[int, float]:
    """The alignment of each round's points with all clients' samples, both at the run's last model."""
    model, points = loaded_run.model(), loaded_run.points
    real = gradient(model, loaded_run.client_batches())
    x = loaded_run.scale.from_unit(points.x)
    made: dict[int, float] = {}
    for round in points.all_rounds():
        own = points.rounds == round
        made[round] = cosine(gradient(model, chunks(x[own], points.labels[own])), real)
    return made


def gradient(model: nn.Module, batches: Iterable[Batch]) -> torch.Tensor:
    """The gradient of the mean cross-entropy over all samples of the batches, one float64 vector."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trained), dtype=torch.float64)
    count, was_training = 0, model.training
    model.eval()
    try:
        for x, y in batches:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            slopes = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
            total += torch.cat([slope.flatten().double() for slope in slopes])
            count += len(y)
    finally:
        model.train(was_training)
    return total / max(1, count)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """The cosine of the angle between two vectors; NaN where one of them is zero."""
    length = float(a.norm() * b.norm())
    return float(a @ b) / length if length else math.nan


def chunks(x: torch.Tensor, y: torch.Tensor) -> Iterable[Batch]:
    """Samples and their classes, a chunk at a time."""
    return zip(x.split(CHUNK), y.split(CHUNK), strict=True)
