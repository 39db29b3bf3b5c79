"""How unlike the clients' data are: the measures of AggEnhance, section 4.3, and two beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fedblend.core.dataset import Population

BLOCK = 1 << 16
"""Clients that are looked at in one go, so that a million take no more memory than these."""


def class_counts(population: Population, labels: np.ndarray, classes: int) -> np.ndarray:
    """How many samples of each class each client trains on, int64 [clients, classes]; ``labels`` int [n]."""
    counts = np.empty((len(population), classes), np.int64)
    for rows in _blocks(len(population)):
        offsets = population.offsets[rows.start : rows.stop + 1]
        cells = np.repeat(np.arange(len(offsets) - 1) * classes, np.diff(offsets))
        cells += labels[population.order[offsets[0] : offsets[-1]]]
        counts[rows] = np.bincount(cells, minlength=counts[rows].size).reshape(-1, classes)
    return counts


def noniid_measures(counts: np.ndarray) -> dict[str, float]:
    """The measures of a split from its counts [clients, classes]; clients without samples are left out.

    - ``classes_mean``, ``classes_deviation``: mean and deviation of the number of classes a client
      holds (AggEnhance, section 4.3, Figure 3a). Fewer is less IID.
    - ``divergence``: the mean Kullback-Leibler divergence between two clients in nats (equation 18,
      Figure 3b), on smoothed probabilities: see :func:`smoothed` and :func:`mean_divergence`.
    - ``distance``: the mean over clients of sum_c |p_i(c) - p(c)|, from 0 (all as the whole) to 2,
      the measure of Zhao et al. 2018 ("Federated Learning with Non-IID Data", section 3.1).
    - ``size_mean``, ``size_median``, ``size_min``, ``size_max``, ``size_deviation``: samples a client.
    """
    counts = np.asarray(counts)
    sizes = counts.sum(1, dtype=np.float64)
    if not sizes.all():
        counts, sizes = counts[sizes > 0], sizes[sizes > 0]
    if not len(counts):
        return {}
    total = counts.sum(0, dtype=np.float64)
    whole = total / total.sum()
    held, distance = np.empty(len(counts)), np.empty(len(counts))
    for rows in _blocks(len(counts)):
        held[rows] = (counts[rows] > 0).sum(1)
        distance[rows] = np.abs(counts[rows] / sizes[rows, None] - whole).sum(1)
    return {
        "classes_mean": float(held.mean()),
        "classes_deviation": float(held.std()),
        "divergence": _divergence(smoothed(counts[rows], total) for rows in _blocks(len(counts))),
        "distance": float(distance.mean()),
        "size_mean": float(sizes.mean()),
        "size_median": float(np.median(sizes)),
        "size_min": float(sizes.min()),
        "size_max": float(sizes.max()),
        "size_deviation": float(sizes.std()),
    }


def smoothed(counts: np.ndarray, total: np.ndarray | None = None) -> np.ndarray:
    """Class probabilities that are nowhere 0, float64 [clients, classes]: p_i = (n_i + q) / (|D_i| + 1).

    Equation 18 divides by zero where a client lacks a class. So every client is lent one sample,
    spread over the classes as the whole data are (q, the prior of equation 17). Classes that nobody
    holds are left out: they add nothing. ``total`` [classes] are the counts of the whole data, where it has
    more clients than these.
    """
    total = counts.sum(0) if total is None else total
    counts = counts[:, total > 0].astype(np.float64)
    prior = total[total > 0] / total.sum()
    return (counts + prior) / (counts.sum(1, keepdims=True) + 1)


def mean_divergence(p: np.ndarray) -> float:
    """Equation 18 of AggEnhance: the mean of KL(p_i || p_j) over ordered pairs i != j, in nats.

    Div = 1 / (N (N - 1)) sum_{i != j} sum_c p_i(c) (log p_i(c) - log p_j(c)), for positive
    probabilities [clients, classes]; 0 for a single client. Summed without visiting the pairs:
    sum_ij KL = N sum_i sum_c p_i log p_i - sum_c (sum_i p_i) (sum_j log p_j).
    """
    return _divergence(p[rows] for rows in _blocks(len(p)))


def _divergence(blocks: Iterable[np.ndarray]) -> float:
    """:func:`mean_divergence` of some clients after others."""
    n, own, p_sum, log_sum = 0, 0.0, np.zeros(1), np.zeros(1)
    for p in blocks:
        logs = np.log(p)
        n += len(p)
        own += (p * logs).sum()
        p_sum, log_sum = p_sum + p.sum(0), log_sum + logs.sum(0)
    return float(max(n * own - (p_sum * log_sum).sum(), 0.0) / (n * (n - 1))) if n > 1 else 0.0


def _blocks(clients: int) -> Iterator[slice]:
    """All clients, some after others."""
    return (slice(start, min(start + BLOCK, clients)) for start in range(0, clients, BLOCK))
