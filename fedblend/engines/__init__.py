"""Engines: where clients run. A method never asks which."""

from __future__ import annotations

import torch

from fedblend.engines.base import Engine, Scores, Trained, TrainTask
from fedblend.engines.loop import LoopEngine
from fedblend.errors import FedblendError
from fedblend.world import World

__all__ = ["Engine", "LoopEngine", "Scores", "TrainTask", "Trained", "make"]


def make(world: World) -> Engine:
    """The engine that the experiment names. Raises :class:`FedblendError` if its device is not there."""
    device = world.experiment.device
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        raise FedblendError(
            f"device: '{device}' is not usable here: {reason}; valid: cpu, or cuda where there is a GPU"
        ) from None
    return LoopEngine(world, device)
