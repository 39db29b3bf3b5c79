"""Training of the aggregate on means that clients share."""

from __future__ import annotations

import torch

from fedblend.core.registry import Count, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, Tensors
from fedblend.data.scale import Scaler
from fedblend.methods.server_steps.points import require_classes
from fedblend.methods.server_steps.tuning import Tuning


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

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` for data without classes, and for text."""
        require_classes("train-on-means", spec)

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate trained on the means, if any arrived, and no further state."""
        assert isinstance(server.scale, Scaler)
        if server.pool is None or not len(server.pool):
            return dict(weights), {}
        x, y = server.pool.tensors["x"], server.pool.tensors["y"]
        return self.tune(weights, server.scale.to_unit(x), y, torch.ones(len(y)), server), {}
