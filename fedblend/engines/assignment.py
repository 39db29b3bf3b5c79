"""A client's work of one round: its batches, the random numbers of its objective, and when its optimiser steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedblend.core.optimizer import Training
from fedblend.core.sharing import Pool


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


def mean_lr(train: Training, round: int, steps: int, last: int) -> float:
    """Return the mean learning rate of the ``last`` of a round's steps."""
    factors = (train.factors(steps) or ())[steps - last :]
    return train.lr_in(round) * (sum(factors) / len(factors) if factors else 1.0)


def batches(n: int, train: Training, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples of all batches in order, int64 [positions], and the bounds of batches, int64 [batches + 1].

    Each epoch is a new permutation of the n samples. ``train.last_batch`` says what becomes of its last, smaller batch;
    a client with fewer samples than a batch always trains on all of them. With ``train.steps`` there are instead so
    many full batches of samples drawn with replacement.
    """
    size, epochs = train.batch_size, train.epochs
    if not n:
        return np.empty(0, np.int64), np.zeros(1, np.int64)
    if train.steps:
        return rng.integers(n, size=train.steps * size), size * np.arange(train.steps + 1)
    of_epoch = train.batches_of(n) // epochs
    used = min(n, of_epoch * size) if train.last_batch == "drop" else n
    order = np.concatenate([rng.permutation(n)[:used] for _ in range(epochs)])
    starts = used * np.arange(epochs)[:, None] + size * np.arange(of_epoch)
    return order, np.append(starts, epochs * used)
