"""How far the points are from the data, in the features of an autoencoder (AggEnhance, equation 19)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import LoadedRun
from fedblend.analysis.points.vae import Vae, encode
from fedblend.core.random import stream

NOISE = 1000
"""Inputs of uniform noise that the points are compared with."""


@dataclass(frozen=True)
class Distances:
    """Mean cosine distances to the training samples' features, from 0 (one direction) to 2 (opposite ones).

    ``by_round`` is that of the points made in each round; ``noise`` of uniform noise in [0, 1], ``test`` of the
    test samples, ``train`` of the training samples among themselves.
    """

    by_round: dict[int, float]
    noise: float
    test: float
    train: float


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """The mean cosine distance between two sets of feature vectors [n, d] and [m, d] (equation 19), from 0 to 2.

    1 - (1 / nm) sum_ij a_i b_j / (|a_i| |b_j|). A vector of zeros has no direction: its cosines count as 0.
    """
    # The double sum is the product of the two sums of directions, so no [n, m] matrix is made.
    directions = [F.normalize(one.double(), dim=1).mean(0) for one in (a, b)]
    return 1 - float(directions[0] @ directions[1])


def distances(loaded_run: LoadedRun, vae: Vae) -> Distances:
    """How far the points of each round, noise and the test samples are from the training samples (Figure 8, right)."""
    setup, points = loaded_run.setup, loaded_run.points
    train = encode(vae, setup, setup.data.train.x)
    rng = stream(setup.experiment.seed, "noise to compare")
    noise = torch.from_numpy(rng.random((NOISE, *points.x.shape[1:]), np.float32))
    with torch.no_grad():
        own = vae.features(points.x)
        of_noise = vae.features(noise)
    return Distances(
        {round: distance(own[points.rounds == round], train) for round in points.all_rounds()},
        distance(of_noise, train),
        distance(encode(vae, setup, setup.data.test.x), train),
        distance(train, train),
    )
