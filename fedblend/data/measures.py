"""How unlike the clients' data are: the measures of AggEnhance, section 4.3, and two beside them."""

from __future__ import annotations

import numpy as np

from fedblend.data.population import Population


def class_counts(population: Population, labels: np.ndarray, classes: int) -> np.ndarray:
    """How many samples of each class each client trains on, int64 [clients, classes]; ``labels`` int [n]."""
    cells = population.owners() * classes + labels[population.order]
    return np.bincount(cells, minlength=len(population) * classes).reshape(len(population), classes)


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
    counts = np.asarray(counts, np.float64)
    counts = counts[counts.sum(1) > 0]
    if not len(counts):
        return {}
    sizes, held = counts.sum(1), (counts > 0).sum(1)
    whole = counts.sum(0) / counts.sum()
    return {
        "classes_mean": float(held.mean()),
        "classes_deviation": float(held.std()),
        "divergence": mean_divergence(smoothed(counts)),
        "distance": float(np.abs(counts / sizes[:, None] - whole).sum(1).mean()),
        "size_mean": float(sizes.mean()),
        "size_median": float(np.median(sizes)),
        "size_min": float(sizes.min()),
        "size_max": float(sizes.max()),
        "size_deviation": float(sizes.std()),
    }


def smoothed(counts: np.ndarray) -> np.ndarray:
    """Class probabilities that are nowhere 0, float64 [clients, classes]: p_i = (n_i + q) / (|D_i| + 1).

    Equation 18 divides by zero where a client lacks a class. So every client is lent one sample,
    spread over the classes as the whole data are (q, the prior of equation 17). Classes that nobody
    holds are left out: they add nothing.
    """
    counts = counts[:, counts.sum(0) > 0].astype(np.float64)
    prior = counts.sum(0) / counts.sum()
    return (counts + prior) / (counts.sum(1, keepdims=True) + 1)


def mean_divergence(p: np.ndarray) -> float:
    """Equation 18 of AggEnhance: the mean of KL(p_i || p_j) over ordered pairs i != j, in nats.

    Div = 1 / (N (N - 1)) sum_{i != j} sum_c p_i(c) (log p_i(c) - log p_j(c)), for positive
    probabilities [clients, classes]; 0 for a single client. Summed without visiting the pairs:
    sum_ij KL = N sum_i sum_c p_i log p_i - sum_c (sum_i p_i) (sum_j log p_j).
    """
    n = len(p)
    if n < 2:
        return 0.0
    logs = np.log(p)
    total = n * (p * logs).sum() - (p.sum(0) * logs.sum(0)).sum()
    return float(max(total, 0.0) / (n * (n - 1)))
