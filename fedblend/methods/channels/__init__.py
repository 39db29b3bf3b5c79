"""Channels: what gets through, and when."""

from __future__ import annotations

import numpy as np

from fedblend.core.channel import Channel, Sent
from fedblend.core.registry import part
from fedblend.methods.channels.link import Link
from fedblend.methods.channels.wireless import Wireless

__all__ = ["Channel", "Ideal", "Link", "Sent", "Wireless"]


@part("channel", "ideal")
class Ideal(Channel):
    """Everything arrives, at once."""

    loses = False

    def transmit(
        self, direction: str, sizes: np.ndarray, rng: np.random.Generator, clients: np.ndarray | None = None
    ) -> Sent:
        """All true, after no time."""
        return Sent(np.ones(len(sizes), bool), np.zeros(len(sizes)))
