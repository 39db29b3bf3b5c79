"""What partitions have in common: dealing out shuffled samples, without a loop over samples or clients."""

from __future__ import annotations

import numpy as np

from fedblend.data.population import Population
from fedblend.errors import FedblendError


def require_classes(classes: int, name: str) -> None:
    """Raise :class:`FedblendError` if the data has no classes to divide by."""
    if classes < 1:
        raise FedblendError(
            f"partition '{name}': divides by class, but this data set predicts numbers; "
            "valid: iid, natural, lognormal without alpha"
        )


def even(total: int, parts: int) -> np.ndarray:
    """``total`` in ``parts`` whole numbers that differ by at most 1, the larger first.

    >>> even(7, 3)
    array([3, 2, 2])
    """
    return total // parts + (np.arange(parts) < total % parts)


def cut(order: np.ndarray, sizes: np.ndarray) -> Population:
    """Client k gets the next ``sizes[k]`` entries of ``order``; the rest is left over."""
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Population(order[: offsets[-1]].astype(np.int64, copy=False), offsets)


def deal_counts(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Population:
    """Give client k ``counts[k, c]`` samples of class c, drawn without replacement; counts int [K, classes].

    The caller sees to it that no class is asked for more than it has (:func:`require_supply`).
    """
    client, label = np.nonzero(counts)
    return deal(labels, client, label, counts[client, label], len(counts), rng)


def deal(
    labels: np.ndarray,
    client: np.ndarray,
    label: np.ndarray,
    count: np.ndarray,
    clients: int,
    rng: np.random.Generator,
) -> Population:
    """Give ``client[i]`` ``count[i]`` samples of class ``label[i]``, for all i at once; each sample once."""
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[np.argsort(labels[shuffled], kind="stable")]
    orders = np.argsort(label, kind="stable")
    label, count, client = label[orders], count[orders], client[orders]
    # The i-th order takes a run of its class's samples: the runs of a class follow each other.
    size = np.bincount(labels, minlength=int(label.max(initial=0)) + 1)
    class_start = np.cumsum(size) - size
    before = np.cumsum(count) - count
    first_of_class = np.searchsorted(label, label)
    start = class_start[label] + before - before[first_of_class]
    within = np.arange(int(count.sum())) - np.repeat(before, count)
    taken = by_class[np.repeat(start, count) + within]
    owner = np.repeat(client, count)
    sizes = np.bincount(owner, minlength=clients)
    return cut(taken[np.argsort(owner, kind="stable")], sizes)


def require_supply(labels: np.ndarray, wanted: np.ndarray, field: str, remedy: str) -> None:
    """Raise :class:`FedblendError` if a class is asked for more than it has; wanted int [classes]."""
    supply = np.bincount(labels, minlength=len(wanted))
    short = np.flatnonzero(wanted > supply)
    if len(short):
        c = short[0]
        raise FedblendError(f"{field}: asks for {wanted[c]:,} samples of class {c}, which has {supply[c]:,}; {remedy}")
