"""What a round costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class CostMeter:
    """What one round costs: seconds by phase, bytes by direction and kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, dict[str, int]] = {"up": defaultdict(int), "down": defaultdict(int)}
        self.channel: dict[str, float] = {}

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def wait(self, direction: str, seconds: float) -> None:
        """Add seconds that a transmission "up" or "down" took."""
        if seconds:
            self.channel[direction] = self.channel.get(direction, 0.0) + seconds

    def count(self, direction: str, kind: str, number: int) -> None:
        """Count bytes sent "up" or "down"."""
        if number:
            self.bytes[direction][kind] += int(number)
