"""Callbacks that write a run's directory, and callbacks for experiment files."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError, or_valid
from fedblend.core.record import RoundRecord
from fedblend.core.registry import Count, Fraction, NonNegative, Positive, part
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import flatten
from fedblend.runs.trackers import CSVTable, MLflow, Noting, TensorBoard, WandB, folder_of, numbers_of

__all__ = ["CSVTable", "Checkpoints", "Listener", "MLflow", "MetricsLog", "RecordListener", "TensorBoard", "WandB"]

Listener = Callable[[RoundRecord], Any]
"""A function of a round's record; ``True``, of Python or NumPy, as its result ends the run."""


class PeakMemory(Callback):
    """Add the process's peak memory to each record, in bytes, where the system tells it (not on Windows)."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        with contextlib.suppress(ImportError):
            import resource

            unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, kilobytes on Linux
            record.machine["peak_memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class MetricsLog(Callback):
    """Write each round's record to the metrics log."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        self.directory.add_record(record)


class Checkpoints(Callback):
    """Write a checkpoint after every ``every`` rounds, after the last of ``rounds``, and when a run ends early."""

    def __init__(self, directory: RunDirectory, every: int, rounds: int) -> None:
        self.directory, self.every, self.rounds = directory, every, rounds
        self.saved_round = 0  # The round of the last checkpoint

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        if record.round % self.every == 0 or record.round == self.rounds or record.converged:
            self.write(state)

    def on_run_end(self, state: RunState) -> None:
        """Write a checkpoint if a callback ended the run between two checkpoints."""
        if self.saved_round < state.round:
            self.write(state)

    def write(self, state: RunState) -> None:
        checkpoint.write(self.directory.path, state)
        self.saved_round = state.round


class RecordListener(Callback):
    """Call a function with each round's record, and end the run after the function returns ``True``."""

    name = "on_round"

    def __init__(self, listener: Listener) -> None:
        self.listener = listener

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Call the function. Other results count for nothing: many functions return something by chance."""
        result = self.listener(record)
        return isinstance(result, bool | np.bool_) and bool(result)


@part("callback", "stop-at-accuracy")
class StopAtAccuracy(Callback):
    """End the run after the first evaluated round whose test accuracy is at least ``accuracy``."""

    accuracy: Fraction = 0.9
    """Test accuracy, from 0 to 1."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        return record.accuracy is not None and record.accuracy >= self.accuracy


Mode = Literal["max", "min"]

ACCURACIES = ("validation.server.accuracy", "validation.clients.accuracy", "accuracy")
"""What is monitored by default: the first of these that a run measures."""

OF_TRAINING = ("uploads", "train_loss")  # Numbers that only rounds in which clients train have

BYTES = ("weights", "extras", "keys", "questions", "answers")
"""Kinds of bytes that any run may count, beside those of its upload and its sharing."""


class Monitor(Noting):
    """Base of callbacks that follow one number of the record; a round that lacks it does not count.

    A resumed run counts on from its earlier records.
    """

    monitor: str | None
    mode: Mode

    @functools.cached_property
    def seen(self) -> list[tuple[int, float]]:
        """The number in each evaluated round after round 0, with its round; parts are frozen."""
        return []

    def on_run_begin(self, setup: Setup, state: RunState) -> None:
        """Read the earlier rounds. Raises :class:`FedblendError`."""
        method, told = setup.experiment.method, f"callbacks: monitor: '{self.monitor}' is not measured in this run"
        if self.monitor in OF_TRAINING and not method.upload.trains:
            valid = "loss, or another number of the evaluation"
            raise FedblendError(f"{told}, in which no client trains; valid: {valid}")
        way, _, kind = (self.monitor or "").partition(".")
        kinds = dict.fromkeys([*BYTES, method.upload.bytes_kind, method.sharing.bytes_kind])
        if way in ("bytes_up", "bytes_down") and kind not in kinds:
            raise FedblendError(f"{told}; valid: {way}. with one of {', '.join(kinds)}")
        self.seen.clear()
        if setup.folder is not None and state.round:
            for record in RunDirectory(setup.folder).records():
                if 0 < record.round <= state.round:
                    self.follow(record)

    def follow(self, record: RoundRecord) -> bool:
        """Add a record's number; return whether it has one. Raises :class:`FedblendError` if no record has it."""
        numbers = numbers_of(record)
        name = self.monitor or next((one for one in ACCURACIES if one in numbers), ACCURACIES[-1])
        if name in numbers:
            self.seen.append((record.round, numbers[name]))
        elif record.evaluated and not self._may_have(name, record):
            valid = or_valid(name, [one for one in numbers if not one.startswith(("machine.", "bytes_"))])
            raise FedblendError(f"callbacks: monitor: '{name}' is not measured in this run{valid}")
        return name in numbers

    def _may_have(self, name: str, record: RoundRecord) -> bool:
        """Whether other rounds may have a number that one lacks: it is undefined, of training, or of unsent bytes."""
        flat = flatten(record.as_dict())
        undefined = flat.get(name, 0) is None or flat.get(f"{name.rpartition('.')[0]}.tested") == 0
        of_bytes = name.startswith(("bytes_up.", "bytes_down."))
        return bool(self.seen) or undefined or of_bytes or (name in OF_TRAINING and not record.uploads)

    def best(self, least: float = 0.0) -> tuple[int, float]:
        """The best round so far with its number; a later one must be better by more than ``least``."""
        sign = 1 if self.mode == "max" else -1
        best = self.seen[0]
        for round, number in self.seen[1:]:
            if math.isnan(best[1]) or sign * (number - best[1]) > least:
                best = (round, number)
        return best


@part("callback", "early-stopping")
class EarlyStopping(Monitor):
    """End the run once a number of the record has not become better in ``patience`` evaluated rounds."""

    monitor: str | None = None
    """A number of the record with its place, such as `validation.server.loss`, `clients.mean` or `train_loss` (default:
    the accuracy on samples for validation, and without them on the test samples). Rounds that lack it do not count.
    """
    mode: Mode = "max"
    """Whether high (`max`) or low (`min`, for losses) is good."""
    patience: Count = 10
    """Evaluated rounds without a better number after which the run ends."""
    min_delta: NonNegative = 0.0
    """A number counts as better if it is better by more than this."""

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        if not self.follow(record):
            return None
        best = self.best(self.min_delta)[0]
        return sum(round > best for round, _ in self.seen) >= self.patience


@part("callback", "keep-best")
class KeepBest(Monitor):
    """Keep the model of the best round as `best.safetensors` in the run's folder; `fedblend export --best` reads it."""

    replaces = checkpoint.BEST

    monitor: str | None = None
    """The number that tells the best round, as in `early-stopping`."""
    mode: Mode = "max"
    """Whether high (`max`) or low (`min`, for losses) is good."""

    def on_run_begin(self, setup: Setup, state: RunState) -> None:
        """Read the earlier rounds, and note the folder.

        Where the best of them has left no model, because the callback was added or changed later, rounds whose model is
        gone do not count, with a warning.
        """
        super().on_run_begin(setup, state)
        self.open["folder"] = folder = folder_of(self, setup)
        kept = checkpoint.round_of_best(folder, self._why)
        # The rounds up to the model's are made again where it is of a later round than the checkpoint.
        lost = self.seen and self.best()[0] not in (kept, state.round) and (kept or 0) <= state.round
        if lost:
            since = f"round {self.best()[0]}, the best one so far, whose model is gone"
            told = f"callbacks: keep-best was added or changed after {since}; rounds count from {state.round} on"
            warnings.warn(told, stacklevel=2)
            self.seen[:] = [one for one in self.seen if one[0] == state.round]
        if lost or kept is None:
            (folder / checkpoint.BEST).unlink(missing_ok=True)
        # The run may have been cut between the round's checkpoint and its best model.
        if self.seen and self.best() == self.seen[-1] and self.seen[-1][0] == state.round:
            self._write(state)

    def on_round_end(self, state: RunState, record: RoundRecord) -> None:
        if self.follow(record) and self.best() == self.seen[-1]:
            self._write(state)

    def _write(self, state: RunState) -> None:
        checkpoint.write_best(self.open["folder"], state, {"value": self.seen[-1][1], **self._why})

    @property
    def _why(self) -> dict[str, Any]:
        return {"monitor": self.monitor, "mode": self.mode}


@part("callback", "time-limit")
class TimeLimit(Noting):
    """End the run after the first round that ends later than ``minutes`` after its start, or after it was resumed."""

    counts_anew = True

    minutes: Positive = 60.0
    """Minutes on the clock, with everything that a round takes."""

    def on_run_begin(self, setup: Setup, state: RunState) -> None:
        self.open["started"] = time.monotonic()

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        return time.monotonic() - self.open["started"] >= 60 * self.minutes
