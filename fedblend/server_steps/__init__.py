"""Server steps: what the server does with the aggregate."""

from __future__ import annotations

from fedblend.parts import part
from fedblend.server_steps.aggenhance import AggEnhance, SecureAggEnhance
from fedblend.server_steps.base import Known, Refined, Server, ServerStep, Tensors
from fedblend.server_steps.distill import DistillToModel
from fedblend.server_steps.prior import PriorSamples
from fedblend.server_steps.seeds import TrainOnSeeds

__all__ = [
    "AggEnhance",
    "DistillToModel",
    "Known",
    "NoStep",
    "PriorSamples",
    "SecureAggEnhance",
    "Server",
    "ServerStep",
    "TrainOnSeeds",
]


@part("server_step", "none")
class NoStep(ServerStep):
    """The aggregate is the next model (FedAvg and all of FedMix)."""

    active = False

    def refine(self, weights: Tensors, server: Server) -> Refined:
        """The aggregate itself."""
        return dict(weights), {}
