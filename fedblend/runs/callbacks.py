"""Callbacks that keep a run in its directory, and those that an experiment file can name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from fedblend.core.callbacks import Callback
from fedblend.core.record import RoundRecord
from fedblend.core.registry import Fraction, part
from fedblend.core.state import RunState
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory

Listener = Callable[[dict[str, Any]], None]
"""A function of a round's record as plain data."""


class MetricsLog(Callback):
    """Writes each round's record to the metrics log, with the process's peak memory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Write the record."""
        record.machine["peak_memory"] = peak_memory()
        self.directory.add_metrics(record.as_dict())
        return None


class Checkpoints(Callback):
    """Writes a checkpoint after each ``every`` rounds, after the last of ``rounds``, and where a run ends earlier.

    ``kept`` is the round of the last checkpoint.
    """

    def __init__(self, directory: RunDirectory, every: int, rounds: int, kept: int = 0) -> None:
        self.directory, self.every, self.rounds, self.kept = directory, every, rounds, kept

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Write a checkpoint where one is due."""
        if record.round % self.every == 0 or record.round == self.rounds or record.converged:
            self.write(state)
        return None

    def on_run_end(self, state: RunState) -> None:
        """Write a checkpoint of a run that a callback has ended between two."""
        if self.kept < state.round:
            self.write(state)

    def write(self, state: RunState) -> None:
        """Write a checkpoint now."""
        checkpoint.write(self.directory.path, state)
        self.kept = state.round


class RecordListener(Callback):
    """Calls a function with each round's record as plain data."""

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Call it."""
        self.listener(record.as_dict())
        return None


@part("callback", "stop-at-accuracy")
class StopAtAccuracy(Callback):
    """Ends the run after the first evaluated round whose test accuracy is at least ``accuracy``."""

    accuracy: Fraction = 0.9
    """Test accuracy, a share."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Whether the accuracy is reached."""
        return record.accuracy is not None and record.accuracy >= self.accuracy


def peak_memory() -> int:
    """The most memory that this process has held, in bytes."""
    import resource

    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
