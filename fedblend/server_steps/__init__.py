"""Server steps: what the server does with the aggregate."""

from __future__ import annotations

import torch

from fedblend.parts import part
from fedblend.server_steps.aggenhance import AggEnhance
from fedblend.server_steps.base import Server, ServerStep, Tensors

__all__ = ["AggEnhance", "NoStep", "Server", "ServerStep"]


@part("server_step", "none")
class NoStep(ServerStep):
    """The aggregate is the next model (FedAvg and all of FedMix)."""

    active = False

    def refine(self, weights: Tensors, server: Server) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The aggregate itself."""
        return dict(weights), {}
