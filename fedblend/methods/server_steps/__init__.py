"""Server steps: computations on the aggregate at the server, such as tuning or distillation."""

from __future__ import annotations

from fedblend.core.registry import part
from fedblend.core.server_step import Refined, ServerContext, ServerStep, Tensors


@part("server_step", "none")
class NoStep(ServerStep):
    """Use the aggregate as the next model (FedAvg and all of FedMix)."""

    active = False

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate itself."""
        return dict(weights), {}
