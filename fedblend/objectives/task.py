"""The loss of a task, on class indices or on mixed targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """What is predicted, and the loss it is scored with; both losses are means over the batch.

    - classification: cross-entropy of logits [B, C] with class indices [B], a distribution [C] that
      the whole batch shares, or one a sample [B, C];
    - regression: squared error, summed over the outputs [B, q] (FedMix, footnotes 1 and 2).
    """

    kind: Literal["classification", "regression"]
    outputs: int

    def loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch; a target without batch dimension stands for every sample."""
        if self.kind == "regression":
            return (outputs - target).square().sum(-1).mean()
        if not target.is_floating_point():
            # F.cross_entropy but for targets to leave out, which cost a traced step a dozen operations.
            return -F.log_softmax(outputs, -1).gather(-1, target[:, None]).mean()
        # A shared distribution broadcasts, so no [B, C] copy of it is made.
        return -(F.log_softmax(outputs, -1) * target).sum(-1).mean()

    def encode(self, target: torch.Tensor) -> torch.Tensor:
        """Targets as float vectors [n, outputs]: one-hot classes, or the numbers themselves."""
        if self.kind == "regression":
            return target.float()
        return F.one_hot(target.long(), self.outputs).float()
