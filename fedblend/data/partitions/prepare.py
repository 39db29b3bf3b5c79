"""Divide a data set's training half among clients: partition, keep a fraction, hold out a local test set."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.data.partitions.deal import offsets_of

MOST_NAMED = 100  # Empty clients that the notes name; more are only counted


def prepare(
    partition: Any,
    data: Dataset,
    seed: int,
    fraction: float = 1.0,
    holdout: float = 0.0,
    validation: float = 0.0,
    server_validation: float = 0.0,
    arrives: bool = False,
) -> Population:
    """The clients of the training half of ``data``.

    The server keeps the share ``server_validation`` of the training half for validation, at random and before the
    partition, at least one sample. Clients hold the rest.

    ``fraction`` in (0, 1] keeps this share of each client's samples (FedMix, Table 4), at least one; a smaller fraction
    keeps a subset of a larger one's samples. ``holdout`` in [0, 1) is the share of the kept samples for the client's
    own test, at least one of two; a client with a single sample holds out none. ``validation`` is the share for
    validation in the same way; a client keeps at least one sample to train on. Where the data of a client ``arrives``
    in portions, each client's samples are in random order, or it would receive one class after another. Raises
    :class:`FedblendError` for a partition that returns something else or has a repeated or unknown sample.
    """
    rows, kept_by_server = _divide_with_server(len(data.train), server_validation, seed)
    population = _split(partition, data, rows, seed)
    notes: dict[str, Any] = dict(population.notes)
    order, offsets = rows[population.order], population.offsets
    if server_validation:
        notes["validation at the server"] = len(kept_by_server)
    if fraction < 1:
        sizes = np.diff(offsets)
        kept = np.clip(np.floor(fraction * sizes + 0.5).astype(np.int64), np.minimum(sizes, 1), sizes)
        order, offsets, _, _ = _divide(order, offsets, kept, stream(seed, "fraction"))
        notes["fraction"] = fraction
    sizes = np.diff(offsets)
    order, offsets, held, held_offsets = _reserve(order, offsets, sizes, holdout, stream(seed, "holdout"))
    order, offsets, validated, validated_offsets = _reserve(
        order, offsets, sizes, validation, stream(seed, "validation")
    )
    notes |= {"holdout": holdout} if holdout else {}
    notes |= {"validation at clients": validation} if validation else {}
    if arrives:
        order = order[_random_places(offsets, stream(seed, "arrival-order"))]
    if len(empty := np.flatnonzero(np.diff(offsets) == 0)):
        notes |= {"empty": len(empty), "empty_clients": empty[:MOST_NAMED].tolist()}
    own, checked = (held, held_offsets, population.natural), (validated, validated_offsets)
    return Population(order, offsets, *own, *checked, kept_by_server, notes)


def _split(partition: Any, data: Dataset, rows: np.ndarray, seed: int) -> Population:
    """Return which of the training samples in ``rows`` each client holds."""
    labels = data.train.y.numpy()[rows] if data.classes else np.zeros(len(rows), np.int64)
    of_data = data.train.client if data.train.client is None else data.train.client[rows]
    population = partition.split(labels, len(data.classes), seed, of_data)
    if not isinstance(population, Population):
        found = f"split must return a Population, not a {type(population).__name__}"
        remedy = "Population.of makes one from an array of indices for each client"
        raise FedblendError(f"partition {type(partition).__name__}: {found}; {remedy}")
    _require_valid(population, len(rows), type(partition).__name__)
    return population


def _divide_with_server(n: int, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of ``n`` samples that clients hold, and those that the server keeps for validation, in order."""
    if not share:
        return np.arange(n), np.empty(0, np.int64)
    number = min(n - 1, max(1, int(np.floor(share * n + 0.5))))
    shuffled = stream(seed, "server-validation").permutation(n)
    return np.sort(shuffled[number:]), np.sort(shuffled[:number])


def _reserve(
    order: np.ndarray, offsets: np.ndarray, of: np.ndarray, share: float, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """Take a share of ``of[k]`` of what client k has left (:func:`_reserved`): (order, offsets) of the rest, of it."""
    if not share:
        return order, offsets, np.empty(0, np.int64), None
    sizes = np.diff(offsets)
    return _divide(order, offsets, sizes - _reserved(of, sizes, share), rng)


def _reserved(of: np.ndarray, left: np.ndarray, share: float) -> np.ndarray:
    """How many samples a share of ``of[k]`` is, where client k has ``left[k]`` of them, int64."""
    taken = np.clip(np.floor(share * of + 0.5).astype(np.int64), 1, None)
    return np.where((left > 1) & (share > 0), np.minimum(taken, left - 1), 0)


def divided(samples: int, holdout: float, validation: float) -> tuple[int, int, int]:
    """Of a client's ``samples``: how many it trains on, holds out, and keeps for validation (:func:`prepare`)."""
    of = np.array([samples])
    held = _reserved(of, of, holdout)
    validates = _reserved(of, of - held, validation)
    return int((of - held - validates)[0]), int(held[0]), int(validates[0])


def _divide(
    order: np.ndarray, offsets: np.ndarray, kept: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Divide each client's samples at random into ``kept[k]`` samples and the rest: (order, offsets) of both."""
    sizes, shuffled = np.diff(offsets), _random_places(offsets, rng)
    first = np.arange(len(order)) - np.repeat(offsets[:-1], sizes) < np.repeat(kept, sizes)
    # Both parts keep the stored order of the samples.
    chosen = np.zeros(len(order), bool)
    chosen[shuffled[first]] = True
    return order[chosen], offsets_of(kept), order[~chosen], offsets_of(sizes - kept)


def _random_places(offsets: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The places of all samples, client by client, at random within each client."""
    shuffled = rng.permutation(int(offsets[-1]))
    owner = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    return shuffled[np.argsort(owner[shuffled], kind="stable")]


def _require_valid(population: Population, n: int, name: str) -> None:
    """Raise :class:`FedblendError` unless every index is a sample of the training half and occurs once."""
    order = population.order
    for bad in order[(order < 0) | (order >= n)]:
        raise FedblendError(f"partition {name}: gives sample {bad}; valid: 0 to {n - 1}")
    times = np.bincount(order, minlength=n)
    for twice in np.flatnonzero(times > 1):
        found = f"gives sample {twice} {times[twice]} times"
        raise FedblendError(f"partition {name}: {found}; each belongs to one client at most")
