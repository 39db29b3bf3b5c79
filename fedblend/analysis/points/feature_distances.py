"""Distances in the features of a small variational autoencoder (AggEnhance, section 4.3 and equation 19)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import CHUNK, LoadedRun
from fedblend.analysis.points.training import Tick, no_progress
from fedblend.core.random import lent_generator, stream
from fedblend.core.setup import Setup

HIDDEN, LATENT = 400, 20
"""Units of the hidden layers, and of the code. The paper gives no sizes: these are the usual ones for MNIST."""

EPOCHS, BATCH_SIZE, LR = 10, 128, 1e-3
"""Passes over the training half, samples in a step, and Adam's learning rate; the paper gives none."""


class Vae(nn.Module):
    """A variational autoencoder (Kingma and Welling 2014) of inputs in [0, 1]: one hidden layer on either side."""

    def __init__(self, inputs: int, hidden: int = HIDDEN, latent: int = LATENT) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU())
        self.mean = nn.Linear(hidden, latent)
        self.log_variance = nn.Linear(hidden, latent)
        self.decoder = nn.Sequential(nn.Linear(latent, hidden), nn.ReLU(), nn.Linear(hidden, inputs))

    def features(self, unit: torch.Tensor) -> torch.Tensor:
        """Return the hidden layer [n, hidden] of the encoder for inputs [n, ...] in [0, 1].

        The paper does not name the features. The code itself is centred at zero, so the cosines of any two sets average
        to about 0: on digits all distances were between 0.98 and 1.03.
        """
        hidden: torch.Tensor = self.encoder(unit)
        return hidden

    def loss(self, unit: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        """Return the negative evidence lower bound in nats, batch mean; ``noise`` [n, latent] is standard normal."""
        hidden = self.encoder(unit)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        outputs = self.decoder(mean + noise * (log_variance / 2).exp())
        rebuilt = F.binary_cross_entropy_with_logits(outputs, unit.flatten(1), reduction="sum")
        divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum()
        return (rebuilt + divergence) / len(unit)


def train_vae(setup: Setup, epochs: int = EPOCHS, tick: Tick = no_progress) -> Vae:
    """Train a VAE on a data set's training half with Adam, on the unit scale.

    First weights, batches and noise depend on the experiment's seed.
    """
    seed = setup.experiment.seed
    with lent_generator(seed, "vae"):
        model = Vae(math.prod(setup.data.train.x.shape[1:]))
    optimizer = torch.optim.Adam(model.parameters(), LR)
    rng = stream(seed, "vae")
    tick(0, epochs)
    for epoch in range(epochs):
        for rows in torch.from_numpy(rng.permutation(len(setup.data.train))).split(BATCH_SIZE):
            noise = torch.from_numpy(rng.standard_normal((len(rows), LATENT), np.float32))
            optimizer.zero_grad()
            model.loss(to_unit_scale(setup, setup.data.train.x[rows]), noise).backward()
            optimizer.step()
        tick(epoch + 1, epochs)
    return model.eval()


def to_unit_scale(setup: Setup, stored: torch.Tensor) -> torch.Tensor:
    """Return stored inputs on the unit scale, [0, 1]."""
    return setup.scale.to_unit(setup.scale(stored))


@torch.no_grad()
def encode(model: Vae, setup: Setup, stored: torch.Tensor) -> torch.Tensor:
    """Return the features of stored inputs [n, ...], computed in chunks: float32 [n, hidden]."""
    return torch.cat([model.features(to_unit_scale(setup, x)) for x in stored.split(CHUNK)])


# Distances -------------------------------------------------------------------------------------------------------

NOISE = 1000  # Number of uniform-noise inputs for comparison


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
