"""Sizes of clients, and dealing of shuffled samples to clients without a loop over samples or clients."""

from __future__ import annotations

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError


def require_classes(classes: int, name: str) -> None:
    """Raise :class:`FedblendError` if the data set has no classes."""
    if classes < 1:
        found = "these targets are numbers or several labels"
        valid = "iid, natural, lognormal without alpha"
        raise FedblendError(f"partition '{name}': needs classes, but {found}; valid: {valid}")


def even_sizes(total: int, parts: int) -> np.ndarray:
    """``total`` as a sum of ``parts`` whole numbers that differ by at most 1, the larger first.

    >>> even_sizes(7, 3)
    array([3, 2, 2])
    """
    return total // parts + (np.arange(parts) < total % parts)


def split_by_sizes(order: np.ndarray, sizes: np.ndarray) -> Population:
    """Give client k the next ``sizes[k]`` entries of ``order``; the remaining entries go to no client."""
    offsets = offsets_of(sizes)
    return Population(order[: offsets[-1]].astype(np.int64, copy=False), offsets)


def offsets_of(sizes: np.ndarray) -> np.ndarray:
    """Where each client's samples begin, and where the last one's end, int64 [clients + 1]."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def deal_counts(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> Population:
    """Give client k ``counts[k, c]`` samples of class c, drawn without replacement; counts int [K, classes]."""
    client, label = np.nonzero(counts)
    return deal(labels, client, label, counts[client, label], len(counts), rng)


def deal(
    labels: np.ndarray, client: np.ndarray, label: np.ndarray, count: np.ndarray, clients: int, rng: np.random.Generator
) -> Population:
    """Give ``client[i]`` ``count[i]`` samples of class ``label[i]``, for all i together; no sample occurs twice."""
    sizes = np.bincount(client, weights=count, minlength=clients).astype(np.int64)
    shuffled = rng.permutation(len(labels))
    by_class = shuffled[stable_order(labels[shuffled])]
    del shuffled
    # Each entry i takes a run of its class's samples; the runs of a class follow one another.
    entries = stable_order(label)
    label, count, client = label[entries], count[entries], client[entries]
    size = np.bincount(labels, minlength=int(label.max(initial=0)) + 1)
    taken = np.bincount(label, weights=count, minlength=len(size)).astype(np.int64)
    start = (np.cumsum(size) - size - np.cumsum(taken) + taken)[label] + np.cumsum(count) - count
    # A client's runs follow one another in order of class. So entries are sorted, not samples.
    entries = stable_order(client)
    start, count = start[entries], count[entries]
    position = np.repeat(start - (np.cumsum(count) - count), count)
    position += np.arange(len(position))
    return split_by_sizes(by_class[position], sizes)


def stable_order(numbers: np.ndarray) -> np.ndarray:
    """The positions that sort whole numbers from 0 up; equal numbers keep their order.

    >>> stable_order(np.array([2, 0, 2, 1]))
    array([1, 3, 0, 2])
    """
    # NumPy sorts numbers of 8 or 16 bits with a radix sort, which is fast for labels.
    return np.argsort(numbers.astype(np.min_scalar_type(numbers.max(initial=0))), kind="stable")


def require_supply(labels: np.ndarray, wanted: np.ndarray, field: str, remedy: str) -> None:
    """Raise :class:`FedblendError` if a class has fewer samples than ``wanted`` [classes]; floats, as for huge sums."""
    supply = np.bincount(labels, minlength=len(wanted))
    for c in np.flatnonzero(wanted > supply):
        raise FedblendError(f"{field}: needs {wanted[c]:,.0f} samples of class {c}, which has {supply[c]:,}; {remedy}")


MU, SIGMA, BIAS = 1.0, 2.0, 10.0  # AggEnhance's parameters of equation 16 (section 4.1)


def apportion(weights: np.ndarray, total: int, at_least: int = 0) -> np.ndarray:
    """``total`` as whole numbers in proportion to ``weights`` [n], none below ``at_least``; int64 [n].

    A smaller number becomes ``at_least``; the others are reduced in proportion to their excess over ``at_least``.
    Rounding is by the largest remainder. Needs at_least * n <= total.

    >>> apportion(np.array([1.0, 1.0, 6.0]), 8), apportion(np.array([0.0, 1.0, 7.0]), 8, at_least=1)
    (array([1, 1, 6]), array([1, 1, 6]))
    """
    rest = total - at_least * len(weights)
    above = np.maximum(weights / weights.sum() * total - at_least, 0.0)
    if above.sum() <= 0:
        return at_least + even_sizes(rest, len(weights))
    quota = above / above.sum() * rest
    whole = np.floor(quota).astype(np.int64)
    # Because of floating-point rounding, the sum of the quotas may be above or below the rest.
    missing = int(np.clip(rest - whole.sum(), 0, len(weights)))
    whole[largest(quota - whole, missing)] += 1
    return at_least + whole


def largest(values: np.ndarray, number: int) -> np.ndarray:
    """The positions of the ``number`` largest values, in no order; of equal values, the first.

    >>> largest(np.array([3, 5, 3, 3]), 3)
    array([1, 0, 2])
    """
    if number >= len(values):
        return np.arange(len(values))
    if number <= 0:
        return np.empty(0, np.int64)
    least = np.partition(values, len(values) - number)[len(values) - number]
    above = np.flatnonzero(values > least)
    return np.concatenate([above, np.flatnonzero(values == least)[: number - len(above)]])


def lognormal_sizes(
    clients: int,
    total: int,
    rng: np.random.Generator,
    form: str = "lognormal-share",
    mu: float = MU,
    sigma: float = SIGMA,
    bias: float = BIAS,
    at_least: int = 1,
) -> np.ndarray:
    """Client sizes by ln(|D_i| - bias) ~ N(mu, sigma^2) (AggEnhance, equation 16), int64 [clients].

    Taken literally (``form = "literal"``), the paper's parameters give about 30 samples a client, too few for its
    results. So by default (``"lognormal-share"``) the draws are *proportions* of the ``total``, and all samples are
    used. Raises :class:`FedblendError` if literal sizes need more samples than there are.
    """
    draws = bias + np.exp(mu + sigma * rng.standard_normal(clients))
    if form == "lognormal-share":
        return apportion(draws, total, at_least)
    sizes = np.maximum(np.rint(draws), at_least)
    if sizes.sum() > total:
        needed = f"'literal' draws for {clients:,} clients need {sizes.sum():,.0f} samples, but there are {total:,}"
        raise FedblendError(f"partition.sizes: {needed}; valid: 'lognormal-share', or fewer clients")
    return sizes.astype(np.int64)


def require_clients(clients: int, total: int, min_samples: int = 1) -> None:
    """Raise :class:`FedblendError` unless ``total`` samples are enough for ``min_samples`` at each client."""
    if clients * min_samples > total:
        needed = f"{clients:,} clients of {min_samples:,} samples or more, but there are {total:,} samples"
        raise FedblendError(f"partition.clients: {needed}; valid: 1 to {total // max(min_samples, 1):,} clients")
