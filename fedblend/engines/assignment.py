"""A client's work of one round: its batches, the random numbers of its objective, and when its optimiser steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedblend.core.sharing import Pool
from fedblend.experiment.fields import Train


@dataclass(frozen=True)
class Assignment:
    """A client's work of one round."""

    client: int
    """The client's number."""
    samples: int
    """Samples that the client holds."""
    order: np.ndarray
    """Samples of all batches in order, int64 [positions]."""
    bounds: np.ndarray
    """Positions in ``order`` where batches begin and end, int64 [steps + 1]."""
    plain: bool
    """Whether the client has nothing to mix with, and minimises the objective's fallback."""
    pool: Pool
    """The client's view of the shared pool."""
    drawn: dict[str, np.ndarray]
    """Random numbers of the objective, one row a step."""
    ends: np.ndarray
    """Batches after which the optimiser makes a step, bool [batches]: all, unless gradients are accumulated."""
    augment: np.ndarray | None = None
    """Random choices of the augmentations, one row a position in ``order``, int64; ``None`` without augmentations."""

    @property
    def sizes(self) -> np.ndarray:
        """Batch sizes, int64 [batches]."""
        return np.diff(self.bounds)

    @property
    def steps(self) -> int:
        """Steps of the optimiser."""
        return int(self.ends.sum())


def group_ends(batches: int, epochs: int, accumulate: int) -> np.ndarray:
    """Return after which batches the optimiser makes a step, bool [batches]; a group of batches ends with its epoch.

    >>> group_ends(6, 2, 2).tolist()
    [False, True, True, False, True, True]
    """
    place = np.arange(batches) % max(1, batches // epochs)
    return (place % accumulate == accumulate - 1) | (place == batches // epochs - 1)


def mean_lr(train: Train, round: int, steps: int, last: int) -> float:
    """Return the mean learning rate of the ``last`` of a round's steps."""
    factors = (train.factors(steps) or ())[steps - last :]
    return train.lr_in(round) * (sum(factors) / len(factors) if factors else 1.0)


def batches(
    n: int, epochs: int, size: int, rng: np.random.Generator, steps: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of all steps in order, int64 [epochs * n], and the bounds of batches, int64 [steps + 1].

    Each epoch is a new permutation of the n samples. Its last, smaller batch is kept, so that small clients train too.
    With ``steps`` there are instead ``steps`` full batches of samples drawn with replacement.
    """
    if steps and n:
        return rng.integers(n, size=steps * size), size * np.arange(steps + 1)
    order = np.concatenate([rng.permutation(n) for _ in range(epochs)]) if n else np.empty(0, np.int64)
    starts = [epoch * n + first for epoch in range(epochs) for first in range(0, n, size)]
    return order, np.array([*starts, epochs * n if n else 0], np.int64)
