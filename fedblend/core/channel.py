"""What a channel is: what gets through, and when."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fedblend.core.part import Part


class Sent(NamedTuple):
    """What became of the transmissions of one direction in one round, one entry a client.

    ``seconds`` is how long each one was on the air: until it had arrived, or until it was given up.
    """

    arrives: np.ndarray
    """bool [clients]."""
    seconds: np.ndarray
    """float64 [clients], in seconds."""


class Channel(Part):
    """Base of all channels. One defines :meth:`transmit`, or, where time is of no interest, ``delivers`` alone.

    ``loses`` is false where everything always arrives.
    """

    to_define = ("transmit or delivers",)
    loses: bool = True

    def transmit(self, direction: str, sizes: np.ndarray, rng: np.random.Generator, clients: np.ndarray | None) -> Sent:
        """What becomes of transmissions of ``sizes`` bytes [clients] in this round.

        ``direction`` is "up" or "down"; ``clients`` int64 [clients] are the clients' numbers, for channels in which
        one client differs from another, or ``None``. A size of 0 arrives at once.
        """
        if type(self).delivers is Channel.delivers:
            raise TypeError(f"{type(self).__name__} defines neither transmit nor delivers")
        return Sent(self.delivers(direction, sizes, rng), np.zeros(len(sizes)))

    def delivers(self, direction: str, sizes: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Which of the transmissions of :meth:`transmit` arrive: bool [clients]."""
        return self.transmit(direction, sizes, rng, None).arrives
