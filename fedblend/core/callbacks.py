"""Callbacks: code that watches a run, and may end it.

Progress, the metrics log, checkpoints, trackers and probes are callbacks. A callback receives the state, the task and
the cohort's result as they are; it must not change them. Give callbacks to :func:`fedblend.run`, or name them in an
experiment file by their dotted path: ``callbacks = ["my_module:MyCallback"]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedblend.core.engine import CohortResult, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.part import Part
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState


class Callback(Part):
    """Base of all callbacks; it does nothing. Override the methods that are needed."""

    counts_anew: bool = False
    """Whether it counts from each start anew, so that a run which it ended goes on in a resume."""
    reads_uploads: bool = False
    """Whether ``on_updates`` finds each client's upload in ``result.uploads``; else they are freed as they come."""
    replaces: str = ""
    """A file in the run's folder that it replaces, and that no other callback may replace."""

    def on_run_begin(self, setup: Setup, state: RunState) -> None:
        """A run begins, or goes on from a checkpoint: ``state.round`` rounds are made."""

    def on_round_begin(self, state: RunState, cohort: np.ndarray) -> None:
        """A round begins: its cohort, int64 [clients], is drawn and has downloaded what it needs."""

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        """The cohort has trained and its uploads have arrived; they are not aggregated yet.

        With :attr:`reads_uploads`, ``result.uploads`` has the good ones by client: tables of tensors on the CPU, as the
        server received them, after the protection. They take the memory of a cohort's models.
        """

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """A round is made and evaluated. Return true to end the run after this round."""
        return None

    def on_run_end(self, state: RunState) -> None:
        """The run has ended: all rounds are made, it converged, or a callback ended it."""


def require_own_files(callbacks: Sequence[Any]) -> None:
    """Raise :class:`FedblendError` if two callbacks of a run would replace the same file."""
    files: dict[str, str] = {}
    for callback in callbacks:
        name, file = getattr(callback, "name", type(callback).__name__), getattr(callback, "replaces", "")
        if file in files:
            both = f"both {files[file]} and {name}" if name != files[file] else f"each of two {name}"
            raise FedblendError(f"callbacks: {both} would replace the run's {file}; valid: one of them")
        if file:
            files[file] = name
