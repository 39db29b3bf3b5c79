"""Where a site's work is done: its own client in one round, with all that the work may look at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fedblend.engines.flower.memory import Memory
from fedblend.engines.flower.messages import Spoken, Tensors
from fedblend.engines.flower.site import Site
from fedblend.engines.loop import LoopEngine
from fedblend.world import World


@dataclass(frozen=True)
class Here:
    """A client at its site, in one round: its world and engine, what it remembers, and what the site allows."""

    engine: LoopEngine
    site: Site
    client: int
    round: int
    memory: Memory

    @property
    def world(self) -> World:
        """What the engine works on."""
        return self.engine.world

    @property
    def size(self) -> int:
        """Samples that the client holds in this round."""
        return int(self.world.sizes(self.round)[self.client])


Work = Callable[[Here, dict[str, Any], Tensors], Spoken]
"""What answers a message: words and tensors, from those that a site was told."""
