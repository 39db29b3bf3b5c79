"""Contestants that are timed in turns, so that a drift of the machine is nobody's disadvantage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from rich.console import Console
from rich.progress import track

Key = TypeVar("Key")


def timed(
    runs: Mapping[Key, Callable[[], object]],
    turns: int,
    clock: Callable[[], float] = time.perf_counter,
    warm_up: int = 1,
) -> dict[Key, list[float]]:
    """Seconds of each contestant in each turn after the first ``warm_up`` turns, which trace, by this clock."""
    seconds: dict[Key, list[float]] = {key: [] for key in runs}
    for turn in track(range(warm_up + turns), "timing", transient=True, console=Console(stderr=True)):
        for key, run in runs.items():
            start = clock()
            run()
            if turn >= warm_up:
                seconds[key].append(clock() - start)
    return seconds
