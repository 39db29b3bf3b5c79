"""Alignment: the cosine between the gradients on points and on the clients' samples (AggEnhance, equation 9)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import CHUNK, LoadedRun
from fedblend.core.module import evaluating

Batch = tuple[torch.Tensor, torch.Tensor]


def alignment(model: nn.Module, points: torch.Tensor, labels: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the cosine, from -1 to 1, between the gradients of the loss on points and on real samples.

    AggEnhance, equation 9: if it is not negative, training on the points lowers the loss on the samples, to first
    order. ``points`` [n, ...] and ``x`` [m, ...] are on the model's scale, ``labels`` [n] and ``y`` [m] their classes.
    The loss is the mean cross-entropy, the gradient is of all trainable weights, and the model is in evaluation mode.
    NaN if one of the gradients is zero.
    """
    return cosine(gradient(model, chunks(points, labels)), gradient(model, chunks(x, y)))


def alignment_by_round(loaded_run: LoadedRun) -> dict[int, float]:
    """Return the alignment of each round's points with all clients' samples, at the run's last model."""
    model, points = loaded_run.model(), loaded_run.points
    real = gradient(model, loaded_run.client_batches())
    x = loaded_run.scale.from_unit(points.x)
    by_round: dict[int, float] = {}
    for round in points.all_rounds():
        rows = points.rounds == round
        by_round[round] = cosine(gradient(model, chunks(x[rows], points.labels[rows])), real)
    return by_round


def gradient(model: nn.Module, batches: Iterable[Batch]) -> torch.Tensor:
    """Return the gradient of the mean cross-entropy over all batches, as one float64 vector."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trainable), dtype=torch.float64)
    count = 0
    with evaluating(model):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
            total += torch.cat([g.flatten().double() for g in gradients])
            count += len(y)
    return total / max(1, count)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine between two vectors; NaN if one of them is zero."""
    length = float(a.norm() * b.norm())
    return float(a @ b) / length if length else math.nan


def chunks(x: torch.Tensor, y: torch.Tensor) -> Iterable[Batch]:
    """Split samples and classes into chunks."""
    return zip(x.split(CHUNK), y.split(CHUNK), strict=True)
