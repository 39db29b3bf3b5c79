"""FedAvgM: momentum at the server."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from fedblend.core.context import ModelSpec
from fedblend.core.registry import Float, Positive, part
from fedblend.core.server_step import Refined, ServerContext, ServerStep
from fedblend.core.trees import Tensors, add_prefix, strip_prefix


@part("server_step", "fedavgm")
class FedAvgM(ServerStep):
    """m <- beta m + Delta, w <- w_t + lr m, with Delta the aggregate minus w_t (Hsu et al. 2019).

    m is 0 at first and covers the trained weights; buffers are the aggregate's. Learning rate 1 and beta 0 is FedAvg.
    """

    lr: Positive = 1.0
    """Learning rate of the server."""
    beta: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server."""

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        """m = 0."""
        return add_prefix("m/", spec.zeros(weights))

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        change = {name: weights[name] - server.start[name] for name in server.trained}
        momentum = {name: self.beta * m + change[name] for name, m in strip_prefix("m/", server.state).items()}
        moved = {name: server.start[name] + self.lr * m for name, m in momentum.items()}
        return {**weights, **moved}, add_prefix("m/", momentum)
