"""Channels: what gets through, and when."""

from __future__ import annotations

import numpy as np

from fedblend.channels.base import Channel, Sent
from fedblend.channels.link import Link
from fedblend.channels.wireless import Wireless
from fedblend.parts import part

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
