"""How many samples each client gets, where that is not even: AggEnhance's long tail."""

from __future__ import annotations

import numpy as np

from fedblend.core.errors import FedblendError
from fedblend.data.partitions.deal import even

MU, SIGMA, BIAS = 1.0, 2.0, 10.0
"""AggEnhance's parameters of equation 16 (section 4.1)."""


def apportion(weights: np.ndarray, total: int, at_least: int = 0) -> np.ndarray:
    """``total`` in whole numbers in proportion to ``weights`` [n], none below ``at_least``; int64 [n].

    Who would get less is lifted to ``at_least``, and the others give for it in proportion to what they
    have above it. Fractions are settled by the largest remainder. Needs at_least * n <= total.

    >>> apportion(np.array([1.0, 1.0, 6.0]), 8), apportion(np.array([0.0, 1.0, 7.0]), 8, at_least=1)
    (array([1, 1, 6]), array([1, 1, 6]))
    """
    rest = total - at_least * len(weights)
    above = np.maximum(weights / weights.sum() * total - at_least, 0.0)
    if above.sum() <= 0:
        return at_least + even(rest, len(weights))
    quota = above / above.sum() * rest
    whole = np.floor(quota).astype(np.int64)
    # Rounding may leave the quotas' sum off by one in the last place, on either side.
    missing = int(np.clip(rest - whole.sum(), 0, len(weights)))
    whole[largest(quota - whole, missing)] += 1
    return at_least + whole


def largest(values: np.ndarray, number: int) -> np.ndarray:
    """The places of the ``number`` largest values, in no order; of equal ones the first.

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

    Read literally (``form = "literal"``), the paper's numbers give about 30 samples a client, too few
    for its results. So by default (``"lognormal-share"``) the draws are *proportions* of the ``total``,
    all of which is given out. Raises :class:`FedblendError` if literal sizes ask for more than there is.
    """
    draws = bias + np.exp(mu + sigma * rng.standard_normal(clients))
    if form == "lognormal-share":
        return apportion(draws, total, at_least)
    sizes = np.maximum(np.rint(draws), at_least)
    if sizes.sum() > total:
        raise FedblendError(
            f"partition.sizes: 'literal' draws for {clients:,} clients come to {sizes.sum():,.0f} samples, "
            f"but there are {total:,}; valid: 'lognormal-share', or fewer clients"
        )
    return sizes.astype(np.int64)


def require_clients(clients: int, total: int, min_samples: int = 1) -> None:
    """Raise :class:`FedblendError` unless ``total`` samples give each client ``min_samples``."""
    if clients * min_samples > total:
        most = total // max(min_samples, 1)
        raise FedblendError(
            f"partition.clients: {clients:,} clients of at least {min_samples:,} samples need "
            f"{clients * min_samples:,}, but there are {total:,}; valid: up to {most:,} clients"
        )
