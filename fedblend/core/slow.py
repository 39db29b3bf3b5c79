"""Slow clients: how much of its training a client makes by the deadline of a round."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedblend.core.columns import column
from fedblend.core.random import stream
from fedblend.core.setup import Setup


@dataclass(frozen=True)
class Work:
    """A client's training in a round."""

    batches: int
    """Batches that it makes."""
    is_late: bool = False
    """Whether it misses the deadline with some of its batches."""
    delay: int | None = 0
    """Rounds after its own in which its upload arrives; ``None`` if it never does."""
    seconds: float = 0.0
    """Seconds of computing for which the round waits, where the experiment states how long batches take."""


def work_of(setup: Setup, round: int, client: int, samples: int) -> Work:
    """A client's training on so many samples. It depends on no other client, and on nothing that a run keeps."""
    slow, train = setup.experiment.slow, setup.training
    full, passes = train.batches_of(samples), train.steps or train.epochs
    if slow is None or not full:
        return Work(full)
    rng, end = stream(setup.experiment.seed, "slow", round, client), slow.deadline or math.inf
    pace, seconds = math.inf, 0.0  # pace: batches until the deadline
    if rng.random() < slow.share:
        pace = full * int(rng.integers(1, passes, endpoint=True)) / passes
    if slow.epochs is not None:
        pace = min(pace, full * float(column(slow.epochs)[client]) / passes)
    if slow.seconds is not None:
        seconds = float(column(slow.seconds)[client])
        pace = min(pace, end / seconds)
    # Rounded first, or 0.3 seconds would have room for two batches of 0.1.
    in_time = math.floor(round_off(min(full, pace)))
    made = in_time if slow.late == "partial" else full
    if in_time == full:
        return Work(full, seconds=seconds * full)
    delay = 0 if slow.late == "partial" and made else None
    if slow.late == "next-round":
        delay = math.ceil(round_off(full / pace)) - 1
    return Work(made, True, delay, min(seconds * full, end))


def round_off(quotient: float) -> float:
    """A quotient without the rounding error of the division."""
    return round(quotient, 9)
