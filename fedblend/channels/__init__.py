"""Channels: what gets through, and when."""

from __future__ import annotations

import numpy as np

from fedblend.parts import part

__all__ = ["Channel", "Ideal"]


class Channel:
    """Base of all channels."""

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Which of the clients' transmissions of ``sizes`` bytes arrive in this round: bool, one a client.

        ``direction`` is "up" or "down".
        """
        raise TypeError(f"{type(self).__name__} defines no delivers")


@part("channel", "ideal")
class Ideal(Channel):
    """Everything arrives, at once."""

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """All true."""
        return np.ones(len(sizes), bool)
