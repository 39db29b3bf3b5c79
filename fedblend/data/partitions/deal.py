"""What partitions have in common: dealing out shuffled samples, without a loop over samples or clients."""

from __future__ import annotations

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError


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
    sizes = np.bincount(client, weights=count, minlength=clients).astype(np.int64)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[stable_order(labels[shuffled])]
    del shuffled
    # The i-th order takes a run of its class's samples: the runs of a class follow each other.
    orders = stable_order(label)
    label, count, client = label[orders], count[orders], client[orders]
    size = np.bincount(labels, minlength=int(label.max(initial=0)) + 1)
    taken = np.bincount(label, weights=count, minlength=len(size)).astype(np.int64)
    start = (np.cumsum(size) - size - np.cumsum(taken) + taken)[label] + np.cumsum(count) - count
    # A client's runs follow each other in order of class. So orders are sorted, and never the samples.
    orders = stable_order(client)
    start, count = start[orders], count[orders]
    place = np.repeat(start - (np.cumsum(count) - count), count)
    place += np.arange(len(place))
    return cut(by_class[place], sizes)


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """The places of whole numbers from 0 up, the smallest first, equal ones in the order they stand in.

    >>> stable_order(np.array([2, 0, 2, 1]))
    array([1, 3, 0, 2])
    """
    # NumPy sorts numbers of 8 or 16 bits by their digits, which suits classes.
    return np.argsort(numbers.astype(np.min_scalar_type(numbers.max(initial=0))), kind="stable")


def require_supply(labels: np.ndarray, wanted: np.ndarray, field: str, remedy: str) -> None:
    """Raise :class:`FedblendError` if a class is asked for more than it has; wanted int [classes]."""
    supply = np.bincount(labels, minlength=len(wanted))
    short = np.flatnonzero(wanted > supply)
    if len(short):
        c = short[0]
        raise FedblendError(f"{field}: asks for {wanted[c]:,} samples of class {c}, which has {supply[c]:,}; {remedy}")
