"""Dropout masks of stacks, drawn from each client's own keyed stream as in the loop engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedblend._kernels import dropout_masks
from fedblend.core.random import key

if TYPE_CHECKING:
    from fedblend.core.engine import TrainTask

Drop = tuple[tuple[int, ...], float]
"""A call of a dropout layer: the shape of one client's input, and the probability of dropping."""


class DropoutMasks:
    """The masks of a stack's clients for one round, drawn step by step.

    On CPUs each client uses the loop engine's stream, so the masks equal the loop's. On other devices one generator
    draws for the whole stack: one call a client would cost more than the step.
    """

    def __init__(self, seed: int, task: TrainTask, clients: Sequence[int], device: torch.device) -> None:
        self.device = device
        seeded = clients if device.type == "cpu" else clients[:1]
        seeds = [key(seed, task.purpose("train"), task.round, client, bits=32) for client in seeded]
        native = device.type == "cpu" and dropout_masks.is_usable()
        self.streams = dropout_masks.Streams(seeds) if native else None
        self.generators = [] if native else [torch.Generator(device).manual_seed(seed) for seed in seeds]

    def draw(self, first: int, drops: Sequence[Drop], active: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the masks [K, ...] of K clients from ``first`` on, one for each of ``drops``, in their order.

        ``active`` is bool [K]; a client that is not active draws nothing.
        """
        masks = {}
        for place, (shape, p) in enumerate(drops):
            if p < 1:
                mask = torch.empty(len(active), *shape, device=self.device)
                self._fill(mask, p, first, active)
            else:
                mask = torch.zeros(len(active), *shape, device=self.device)
            masks[f"{place:03}"] = mask
        return masks

    def _fill(self, mask: torch.Tensor, p: float, first: int, active: np.ndarray) -> None:
        if self.device.type != "cpu":
            mask.bernoulli_(1 - p, generator=self.generators[0]).div_(1 - p)
            return
        for k, is_active in enumerate(active.tolist()):
            if not is_active:
                mask[k].zero_()
            elif self.streams:
                self.streams.draw(first + k, mask[k], p)
            else:
                mask[k].bernoulli_(1 - p, generator=self.generators[first + k]).div_(1 - p)
