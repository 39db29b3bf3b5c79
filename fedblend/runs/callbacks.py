"""Callbacks that write a run's directory, and callbacks for experiment files."""

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

Listener = Callable[[RoundRecord], Any]
"""A function of a round's record; ``True`` as its result ends the run."""


class MetricsLog(Callback):
    """Write each round's record to the metrics log, with the process's peak memory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Write the record."""
        if (memory := peak_memory()) is not None:
            record.machine["peak_memory"] = memory
        self.directory.add_record(record)
        return None


class Checkpoints(Callback):
    """Write a checkpoint after every ``every`` rounds, after the last of ``rounds``, and when a run ends early.

    ``saved_round`` is the round of the last checkpoint.
    """

    def __init__(self, directory: RunDirectory, every: int, rounds: int, saved_round: int = 0) -> None:
        self.directory, self.every, self.rounds, self.saved_round = directory, every, rounds, saved_round

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Write a checkpoint if one is due."""
        if record.round % self.every == 0 or record.round == self.rounds or record.converged:
            self.write(state)
        return None

    def on_run_end(self, state: RunState) -> None:
        """Write a checkpoint if a callback ended the run between two checkpoints."""
        if self.saved_round < state.round:
            self.write(state)

    def write(self, state: RunState) -> None:
        """Write a checkpoint now."""
        checkpoint.write(self.directory.path, state)
        self.saved_round = state.round


class RecordListener(Callback):
    """Call a function with each round's record, and end the run after the function returns ``True``."""

    name = "on_round"

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Call the function. Other results count for nothing: many functions return something by chance."""
        return self.listener(record) is True


@part("callback", "stop-at-accuracy")
class StopAtAccuracy(Callback):
    """End the run after the first evaluated round whose test accuracy is at least ``accuracy``."""

    accuracy: Fraction = 0.9
    """Test accuracy, from 0 to 1."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Return whether the accuracy is reached."""
        return record.accuracy is not None and record.accuracy >= self.accuracy


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes; ``None`` where the system does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return None
    # Kilobytes on Linux, bytes on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
