"""Server steps: what the server does with the aggregate."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedblend.parts import part

__all__ = ["NoStep", "ServerStep"]


class ServerStep:
    """Base of all server steps."""

    def refine(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The weights that the next round begins with, from the aggregate."""
        raise TypeError(f"{type(self).__name__} defines no refine")


@part("server_step", "none")
class NoStep(ServerStep):
    """The aggregate is the next model (FedAvg and all of FedMix)."""

    def refine(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The aggregate itself."""
        return dict(weights)
