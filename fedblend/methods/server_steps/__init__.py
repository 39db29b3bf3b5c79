"""Server steps: computations on the aggregate at the server, such as tuning or distillation."""

from __future__ import annotations

from fedblend.core.registry import part
from fedblend.core.server_step import ModelSpec, ServerContext, ServerStep
from fedblend.methods.server_steps.aggenhance import AggEnhance, SecureAggEnhance
from fedblend.methods.server_steps.ccvr import CCVR
from fedblend.methods.server_steps.distill import DistillToModel
from fedblend.methods.server_steps.means import TrainOnMeans
from fedblend.methods.server_steps.prior import PriorSamples
from fedblend.methods.server_steps.seeds import TrainOnSeeds

__all__ = [
    "CCVR",
    "AggEnhance",
    "DistillToModel",
    "ModelSpec",
    "NoStep",
    "PriorSamples",
    "SecureAggEnhance",
    "ServerContext",
    "ServerStep",
    "TrainOnMeans",
    "TrainOnSeeds",
]


@part("server_step", "none")
class NoStep(ServerStep):
    """Use the aggregate as the next model (FedAvg and all of FedMix)."""
