"""The task's own loss, as FedAvg minimises it."""

from __future__ import annotations

import torch

from fedblend.objectives.base import Batch, Context, Net, Objective, Tensors
from fedblend.parts import part


@part("objective", "plain")
class Plain(Objective):
    """The task's loss on the client's own batch: cross-entropy, or squared error (FedMix, Algorithm 3)."""

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch."""
        return context.task.loss(net(batch.x), batch.y)
