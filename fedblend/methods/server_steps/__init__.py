"""Server steps: computations on the aggregate at the server, such as tuning or distillation."""

from __future__ import annotations

from fedblend.core.registry import part
from fedblend.core.server_step import ServerStep


@part("server_step", "none")
class NoStep(ServerStep):
    """Use the aggregate as the next model (FedAvg and all of FedMix)."""
