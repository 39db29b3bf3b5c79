"""Distances between points and data in the features of an autoencoder (AggEnhance, equation 19)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import LoadedRun
from fedblend.analysis.points.vae import Vae, encode
from fedblend.core.random import stream

NOISE = 1000
"""Number of uniform-noise inputs for comparison."""


@dataclass(frozen=True)
class Distances:
    """Mean cosine distances to the training samples' features, from 0 (same direction) to 2 (opposite).

    ``by_round``: points of each round; ``noise``: uniform noise in [0, 1]; ``test``: test samples; ``train``: training
    samples among themselves.
    """

    by_round: dict[int, float]
    noise: float
    test: float
    train: float


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the mean cosine distance between feature vectors [n, d] and [m, d] (equation 19), from 0 to 2.

    1 - (1 / nm) sum_ij a_i b_j / (|a_i| |b_j|). Cosines of a zero vector count as 0.
    """
    # The double sum is the product of two sums of unit vectors, so no [n, m] matrix is needed.
    mean_directions = [F.normalize(one.double(), dim=1).mean(0) for one in (a, b)]
    return 1 - float(mean_directions[0] @ mean_directions[1])


def distances(loaded_run: LoadedRun, vae: Vae) -> Distances:
    """Measure the distances of points, noise and test samples to the training samples (Figure 8, right)."""
    setup, points = loaded_run.setup, loaded_run.points
    train = encode(vae, setup, setup.data.train.x)
    rng = stream(setup.experiment.seed, "noise to compare")
    noise = torch.from_numpy(rng.random((NOISE, *points.x.shape[1:]), np.float32))
    with torch.no_grad():
        of_points = vae.features(points.x)
        of_noise = vae.features(noise)
    return Distances(
        {round: distance(of_points[points.rounds == round], train) for round in points.all_rounds()},
        distance(of_noise, train),
        distance(encode(vae, setup, setup.data.test.x), train),
        distance(train, train),
    )
