"""Uploads: what a client sends each round, and how it is checked."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedblend.objectives.task import Task
from fedblend.parts import Count, part
from fedblend.uploads.base import Upload
from fedblend.uploads.checks import bytes_of, fault_of, is_finite
from fedblend.uploads.outputs import Nothing, Outputs
from fedblend.uploads.silent import Silent

__all__ = ["Model", "Nothing", "Outputs", "Silent", "Upload", "bytes_of", "fault_of", "is_finite"]

Tensors = Mapping[str, torch.Tensor]


@part("upload", "model")
class Model(Upload):
    """The client's weights after training (FedAvg)."""

    from_round: Count = 1
    """The first round in which clients train; before it only the server does (XorMixFL as a warm start: 2)."""

    def trains_in(self, round: int) -> bool:
        """From ``from_round`` on, which counts from 1."""
        return round + 1 >= self.from_round

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The weights."""
        return dict(weights)

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """The round's weights."""
        return weights
