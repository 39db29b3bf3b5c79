"""Tuning of the aggregate on labelled points at the server (AggEnhance, Algorithm 1, line 8)."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.nn import functional as F

from fedblend.core.registry import Count, Int, Positive
from fedblend.core.server_step import ServerContext, ServerStep, Tensors
from fedblend.methods.server_steps.points import Stacked, logits, ready, slopes_of


@dataclass(frozen=True)
class Tuning(ServerStep):
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
        tuned = {name: tensor.to(server.device, copy=True) for name, tensor in weights.items()}
        trained = [name for name in server.trained if tuned[name].is_floating_point()]
        params = [tuned[name] for name in trained]

        def loss(weights: Tensors, points: torch.Tensor, labels: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
            each = F.cross_entropy(logits(server, weights, points), labels, reduction="none")
            return (each * worth).sum() / len(worth)

        slopes = slopes_of(loss, list(tuned), trained)
        for _ in range(self.epochs):
            order = torch.from_numpy(server.rng.permutation(len(labels))).to(server.device)
            for rows in order.split(self.batch_size):
                batch = self.seen(points[rows], server), labels[rows], worth[rows]
                torch._foreach_add_(params, slopes(*tuned.values(), *batch), alpha=-lr)
        return {name: tensor.cpu() for name, tensor in tuned.items()}
