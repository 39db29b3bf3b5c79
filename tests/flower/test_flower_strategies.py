"""The same uploads aggregated by Flower's strategies and by ours."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import each

from fedblend.core.aggregator import Aggregator
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.aggregators.robust import Krum, Median, MultiKrum, TrimmedMean

flower = pytest.importorskip("flwr.server.strategy.aggregate", reason="Flower (extra 'flower') is not installed")


def uploads(clients: int, seed: int) -> list[list[np.ndarray]]:
    """Arrays of two shapes for each client, with an outlier among them."""
    rng = np.random.default_rng(seed)
    made = [
        [rng.standard_normal((7, 5)).astype(np.float32), rng.standard_normal(11).astype(np.float32)]
        for _ in range(clients)
    ]
    made[0] = [10 * array for array in made[0]]
    return made


def ours(aggregator: Aggregator, made: list[list[np.ndarray]], samples: list[int]) -> list[np.ndarray]:
    """What a round of these uploads becomes."""
    tensors = [{str(i): torch.from_numpy(array) for i, array in enumerate(one)} for one in made]
    start = {name: torch.zeros_like(tensor) for name, tensor in tensors[0].items()}
    kept = aggregator.partial((one, float(n)) for one, n in zip(tensors, samples, strict=True))
    return [tensor.numpy() for tensor in aggregator.finish(kept, start).values()]


@each("clients", [5, 8, 13])
@each("seed", range(5))
def test_aggregators_equal_flowers_strategies(clients: int, seed: int) -> None:
    made = uploads(clients, seed)
    samples = np.random.default_rng(seed).integers(1, 50, clients).tolist()
    results = list(zip(made, samples, strict=True))
    # Flower weighs the uploads that Multi-Krum keeps by their samples; the paper, and ours, does not.
    alike = [(one, 1) for one in made]

    pairs = [
        (WeightedMean(), flower.aggregate(results)),
        (Median(), flower.aggregate_median(results)),
        (TrimmedMean(share=0.2), flower.aggregate_trimmed_avg(results, 0.2)),
        (Krum(byzantine=1), flower.aggregate_krum(results, 1, 0)),
        (MultiKrum(byzantine=1, kept=3), flower.aggregate_krum(alike, 1, 3)),
    ]
    for aggregator, theirs in pairs:
        for a, b in zip(ours(aggregator, made, samples), theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
