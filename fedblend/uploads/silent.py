"""Clients that train and keep what they made to themselves."""

from __future__ import annotations

import torch

from fedblend.aggregators import Aggregator
from fedblend.aggregators.mean import WeightedMean
from fedblend.objectives.task import Task
from fedblend.parts import part
from fedblend.uploads.base import Tensors, Upload


@part("upload", "silent")
class Silent(Upload):
    """Clients train but send nothing: with ``keep_weights`` each is alone, as without a federation.

    It is what a federation has to beat: with ``judge = "each"`` every client's model is tested on that client's own
    test samples.
    """

    is_model = False

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Nothing."""
        return {}

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """The mean of nothing, which is nothing."""
        return WeightedMean()
