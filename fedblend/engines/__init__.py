"""Engines: where clients run. A method never asks which."""

from __future__ import annotations

from fedblend.engines.base import Engine, Scores, Trained, TrainTask
from fedblend.engines.loop import LoopEngine
from fedblend.world import World

__all__ = ["Engine", "LoopEngine", "Scores", "TrainTask", "Trained", "make"]


def make(world: World) -> Engine:
    """The engine that the experiment names."""
    return LoopEngine(world, world.experiment.device)
