"""Models in stages, so that hidden states after k layers can be read and continued from."""

from __future__ import annotations

import torch
from torch import nn


class Staged(nn.Module):
    """A model as a row of layers. ``forward(x, start, stop)`` runs layers ``start`` up to ``stop``.

    ``forward(x)`` runs them all; ``forward(forward(x, 0, k), k)`` gives the same.
    """

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Run layers ``start`` up to (not including) ``stop``."""
        for stage in list(self.stages)[start:stop]:
            x = stage(x)
        return x
