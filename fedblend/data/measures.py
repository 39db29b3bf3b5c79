"""Measures of a partition: how much the clients' data differ (AggEnhance, section 4.3, and others)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from fedblend.core.dataset import Population

BLOCK = 1 << 16  # Clients that are processed together, which bounds the memory for a million clients


def class_counts(population: Population, labels: np.ndarray, classes: int) -> np.ndarray:
    """Training samples of each class at each client, int64 [clients, classes]; ``labels`` int [n]."""
    counts = np.empty((len(population), classes), np.int64)
    for rows in _blocks(len(population)):
        offsets = population.offsets[rows.start : rows.stop + 1]
        cells = np.repeat(np.arange(len(offsets) - 1) * classes, np.diff(offsets))
        cells += labels[population.order[offsets[0] : offsets[-1]]]
        counts[rows] = np.bincount(cells, minlength=counts[rows].size).reshape(-1, classes)
    return counts


def noniid_measures(counts: np.ndarray) -> dict[str, float]:
    """The measures of a partition from its counts [clients, classes]; clients without samples are left out.

    - ``classes_mean``, ``classes_deviation``: mean and deviation of a client's number of
      classes (AggEnhance, section 4.3, Figure 3a). Fewer is less IID.
    - ``divergence``: the mean Kullback-Leibler divergence between two clients in nats (equation 18,
      Figure 3b), on smoothed probabilities: see :func:`smoothed` and :func:`divergence`.
    - ``distance``: the mean over clients of sum_c |p_i(c) - p(c)|, from 0 (all clients as the whole data set) to 2,
      the measure of Zhao et al. 2018 ("Federated Learning with Non-IID Data", section 3.1).
    - ``size_mean``, ``size_median``, ``size_min``, ``size_max``, ``size_deviation``: samples of a client.
    """
    sizes = counts.sum(1, dtype=np.float64)
    if not sizes.all():
        counts, sizes = counts[sizes > 0], sizes[sizes > 0]
    if not len(counts):
        return {}
    total = counts.sum(0, dtype=np.float64)
    whole = total / total.sum()
    class_number, distance = np.empty(len(counts)), np.empty(len(counts))
    for rows in _blocks(len(counts)):
        class_number[rows] = (counts[rows] > 0).sum(1)
        distance[rows] = np.abs(counts[rows] / sizes[rows, None] - whole).sum(1)
    return {
        "classes_mean": float(class_number.mean()),
        "classes_deviation": float(class_number.std()),
        "divergence": divergence(smoothed(counts[rows], total) for rows in _blocks(len(counts))),
        "distance": float(distance.mean()),
        "size_mean": float(sizes.mean()),
        "size_median": float(np.median(sizes)),
        "size_min": float(sizes.min()),
        "size_max": float(sizes.max()),
        "size_deviation": float(sizes.std()),
    }


def smoothed(counts: np.ndarray, total: np.ndarray) -> np.ndarray:
    """Positive class probabilities, float64 [clients, classes]: p_i = (n_i + q) / (|D_i| + 1).

    Equation 18 divides by zero for a client without samples of a class. So every client gets one more sample, divided
    among the classes as in the whole data set (q, the prior of equation 17). Classes without samples are left out;
    their term is 0. ``total`` [classes] are the counts of the whole data set.
    """
    counts = counts[:, total > 0].astype(np.float64)
    prior = total[total > 0] / total.sum()
    return (counts + prior) / (counts.sum(1, keepdims=True) + 1)


def divergence(blocks: Iterable[np.ndarray]) -> float:
    """Equation 18 of AggEnhance: the mean of KL(p_i || p_j) over ordered pairs i != j, in nats.

    Div = 1 / (N (N - 1)) sum_{i != j} sum_c p_i(c) (log p_i(c) - log p_j(c)), for positive
    probabilities [clients, classes] in blocks of clients; 0 for a single client. Computed without a loop over pairs:
    sum_ij KL = N sum_i sum_c p_i log p_i - sum_c (sum_i p_i) (sum_j log p_j).
    """
    n, own, p_sum, log_sum = 0, 0.0, np.zeros(1), np.zeros(1)
    for p in blocks:
        logs = np.log(p)
        n += len(p)
        own += (p * logs).sum()
        p_sum, log_sum = p_sum + p.sum(0), log_sum + logs.sum(0)
    return float(max(n * own - (p_sum * log_sum).sum(), 0.0) / (n * (n - 1))) if n > 1 else 0.0


def _blocks(clients: int) -> Iterator[slice]:
    return (slice(start, min(start + BLOCK, clients)) for start in range(0, clients, BLOCK))
