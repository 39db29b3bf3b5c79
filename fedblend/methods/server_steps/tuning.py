"""Tuning of the aggregate on labelled points at the server (AggEnhance, Algorithm 1, line 8), means or samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Int, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, Tensors
from fedblend.data.scale import Scaler
from fedblend.methods.augment.pictures import mirrored, shifted
from fedblend.methods.server_steps.points import Stacked, TrainingStep, descend, logits, ready

SHIFT = 4  # Largest shift of an augmented image, in pixels


@dataclass(frozen=True)
class Tuning(TrainingStep):
    """Base of the steps that train the aggregate on points with plain SGD, in evaluation mode."""

    numeric_inputs = True

    epochs: Annotated[Int, Field(ge=0)] = 10
    """Epochs over the points; 0 leaves the aggregate unchanged."""
    batch_size: Count = 32
    """Points in a batch."""
    lr: Positive | None = None
    """Learning rate on the points (default: the clients' learning rate in that round)."""

    def seen(self, points: torch.Tensor, server: ServerContext) -> torch.Tensor:
        """A batch of points as the model's input; a step may augment them."""
        return points

    def tune(
        self, weights: Tensors, points: torch.Tensor, labels: torch.Tensor, worth: torch.Tensor, server: ServerContext
    ) -> Stacked:
        """The weights trained on points [n, ...] in [0, 1] with labels [n] and sample weights ``worth`` [n].

        Weights are relative to their mean over all points: a batch of light points makes a small step.
        """
        server, lr = ready(server), server.lr if self.lr is None else self.lr
        points, labels, worth = (tensor.to(server.device) for tensor in (points, labels, worth / worth.mean()))

        def loss(weights: Tensors, points: torch.Tensor, labels: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
            each = F.cross_entropy(logits(server, weights, points), labels, reduction="none")
            return (each * worth).sum() / len(worth)

        def batches() -> Iterator[tuple[torch.Tensor, ...]]:
            for _ in range(self.epochs):
                order = torch.from_numpy(server.rng.permutation(len(labels))).to(server.device)
                for rows in order.split(self.batch_size):
                    yield self.seen(points[rows], server), labels[rows], worth[rows]

        return descend(loss, weights, batches(), lr, server)


@part("server_step", "train-on-means")
class TrainOnMeans(Tuning):
    """Train the aggregate in each round on the means that clients shared, with their mean targets.

    With means within a class (``split = "class"``) the server holds a few blurred samples of every class. Clients with
    few classes pull the aggregate towards their own; the server's steps pull it back. Unlike the objective
    `virtual-samples`, no client receives another client's means, and nothing is sent twice.
    """

    reads = ("inputs",)
    needs = ("x", "y")
    needs_pool = True

    epochs: Count = 1
    """Epochs over the means."""

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        assert isinstance(server.scale, Scaler)
        if server.pool is None or not len(server.pool):
            return dict(weights), {}
        x, y = server.pool.tensors["x"], server.pool.tensors["y"]
        return self.tune(weights, server.scale.to_unit(x), y, torch.ones(len(y)), server), {}


@part("server_step", "prior-samples")
class PriorSamples(Tuning):
    """Tune the aggregate on real samples of each class at the server (AggEnhance, Ou et al. 2022, Figure 9).

    This is AggEnhance's comparison: real samples are class interior points too, but the server must not have them. They
    are drawn once from all clients' training samples, which breaks privacy and needs `unsafe = true`.
    """

    works_on = "raw"

    per_class: Count = 1
    """Real samples of each class, as in the paper; all samples of a class that has fewer."""
    augment: bool = False
    """Mirror half of the images left to right, and shift all by up to 4 pixels, anew in each epoch."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` as its base, and with ``augment`` for data that are no images."""
        super().require_possible(spec)
        if self.augment and len(spec.shape) != 3:
            raise FedblendError(
                f"method.server_step.augment: true needs images, but these data are of shape {list(spec.shape)}; "
                "valid: false"
            )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        assert server.prior is not None
        assert isinstance(server.scale, Scaler)
        x, y = server.prior(self.per_class)
        unit = server.scale.to_unit(server.scale(x))
        return self.tune(weights, unit, y, torch.ones(len(y)), server), {}

    def seen(self, points: torch.Tensor, server: ServerContext) -> torch.Tensor:
        return augmented(points, server.rng) if self.augment else points


def augmented(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Images [n, channels, height, width], half of them mirrored, each shifted by up to 4 pixels and padded with 0."""
    count, device = len(pictures), pictures.device
    turned = mirrored(pictures, torch.from_numpy(rng.random(count) < 0.5).to(device))
    up, left = (torch.from_numpy(rng.integers(0, 2 * SHIFT + 1, count)).to(device) - SHIFT for _ in range(2))
    return shifted(turned, up, left, pictures.new_zeros(()))
