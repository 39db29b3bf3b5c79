"""Sample privacy of Mixup and Mix2up: how far a shared sample lies from the raw ones it was made of.

Mix2FLD (section IV, Tables II and III) defines it for a mixture as log(min{||s^ - s_i||, ||s^ - s_j||}): the natural
logarithm of the smaller Euclidean distance to its two raw samples, on pixels from 0 to 255. For Mix2up the sample is
inversely mixed up from two mixtures, and the smallest distance is that to the four raw samples of these.

The paper gives one number for N_S = 100 samples and does not say how they become one, so that both the smallest
distance of these samples and the mean of their logarithms are measured. Its Table II grows with lambda exactly as the
definition says (as log lambda), but from a distance between raw samples, e^6.768 = 869 for MNIST, that is below the
smallest of 100 samples there (about 1,760) and a third of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.methods.sharing.inverse import (
    Pairs,
    coordinate,
    inverse_ratios,
    mix,
    pair_across,
    pairs_of_labels,
    pairs_to_mix,
    unmix_pairs,
)

LAMBDAS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.49)
"""Mixing ratios of Tables II and III; their first and last column are headed 0.001 and 0.499 there."""

SAMPLES = 100
"""N_S of Tables II and III."""

CHUNK = 4096
"""Raw samples that others are compared with at a time."""


@dataclass(frozen=True)
class Mixtures:
    """Which raw samples are mixed, and which mixtures are inversely mixed; the same for every lambda.

    ``raw`` uint8 or float [n, ...] are all samples of the devices, ``y`` int64 [n] their labels, ``holder`` int64 [n]
    their devices; ``mixed`` int64 [mixtures, 2] numbers the raw samples i and j of each mixture, ``owner`` int64
    [mixtures] is its device, ``pairs`` are the mixtures that are inversely mixed.
    """

    raw: torch.Tensor
    y: np.ndarray
    holder: np.ndarray
    mixed: np.ndarray
    owner: np.ndarray
    pairs: Pairs

    @property
    def labels(self) -> np.ndarray:
        """The label pairs of the mixtures, int64 [mixtures, 2]."""
        return self.y[self.mixed]

    def mixup(self, lam: float) -> torch.Tensor:
        """All mixtures at one lambda."""
        return mix(self.raw, self.mixed, lam)

    def mix2up(self, lam: float) -> torch.Tensor:
        """All inversely mixed-up samples at one lambda."""
        return unmix_pairs(self.mixup(lam), self.labels, self.pairs, lam)[0]

    @property
    def contributors(self) -> np.ndarray:
        """The four raw samples of each inversely mixed-up one, int64 [pairs, 4]: i, j of s, then of t."""
        return self.mixed[self.pairs.chosen].reshape(-1, 4)


@dataclass(frozen=True)
class Row:
    """Sample privacy at one lambda, means over the draws.

    Of Mixup and of Mix2up: the logarithm of the smallest distance, the mean of all logarithms, and the share of samples
    that are *recognised*: the raw sample nearest to them, of all that the devices hold, is one they were made of.
    """

    lam: float
    mixup_smallest: float
    mixup_mean: float
    mixup_recognised: float
    mix2up_smallest: float
    mix2up_mean: float
    mix2up_recognised: float


def nearest(samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray) -> np.ndarray:
    """The smallest Euclidean distance of each sample to its contributors: float64 [n].

    ``contributors`` int64 [n, k] numbers rows of ``raw``.
    """
    flat = samples.double().flatten(1)
    distances = [
        (flat - raw[torch.from_numpy(column)].double().flatten(1)).norm(dim=1) for column in contributors.T.copy()
    ]
    return torch.stack(distances).amin(0).numpy()


def nearest_of_all(samples: torch.Tensor, raw: torch.Tensor) -> np.ndarray:
    """The row of ``raw`` nearest to each sample: int64 [n]; raw samples are looked at a chunk at a time."""
    flat = samples.double().flatten(1)
    best, row = torch.full((len(flat),), float("inf"), dtype=torch.float64), torch.zeros(len(flat), dtype=torch.int64)
    for start in range(0, len(raw), CHUNK):
        distance, place = torch.cdist(flat, raw[start : start + CHUNK].double().flatten(1)).min(1)
        row = torch.where(distance < best, start + place, row)
        best = torch.minimum(distance, best)
    return row.numpy()


def recognised(samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray) -> float:
    """The share of samples whose nearest raw sample is one of their contributors (as in :func:`nearest`)."""
    return float((nearest_of_all(samples, raw)[:, None] == contributors).any(1).mean())


def draw(
    data: Dataset,
    population: Population,
    seed: int,
    repeat: int = 0,
    devices: int = 2,
    samples: int = SAMPLES,
    coordinated: bool = False,
) -> Mixtures:
    """Mixtures of ``devices`` clients, ``samples`` (N_S) of each, and as many inversely mixed-up samples.

    With ``coordinated`` labels mixtures match; of many classes few would (see :class:`MixedSeeds`).
    Everything follows from ``seed`` and ``repeat``. Raises :class:`FedblendError` for data that cannot be mixed,
    too few clients with two labels, or clients whose mixtures do not match.
    """
    if data.task != "classification" or data.kind == "text":
        what = "text" if data.kind == "text" else "regression"
        raise FedblendError(f"data: '{data.name}' is {what}; samples are mixed by label: valid are images or features")
    rng = stream(seed, "sample privacy", repeat)
    labels = data.train.y.numpy()
    rows = [population.indices(client) for client in _able(labels, population, devices, rng)]
    asked: Sequence[np.ndarray | None] = [None] * devices
    if coordinated:
        held = np.stack([np.bincount(labels[own], minlength=len(data.classes)) > 0 for own in rows])
        asked = list(coordinate(held, samples, rng))
    mixed, start = [], 0
    for own, wanted in zip(rows, asked, strict=True):
        y = labels[own]
        mixed.append(start + (pairs_to_mix(y, samples, rng) if wanted is None else pairs_of_labels(y, wanted, rng)))
        start += len(own)
    all_rows, owner = np.concatenate(rows), np.repeat(np.arange(devices), samples)
    y, raws = labels[all_rows], np.concatenate(mixed)
    try:
        pairs = pair_across(y[raws], owner, samples, rng)
    except FedblendError as error:
        raise FedblendError(f"--samples {samples}: {error} (--coordinated)") from None
    holder = np.repeat(np.arange(devices), [len(own) for own in rows])
    return Mixtures(data.train.x[torch.from_numpy(all_rows)], y, holder, raws, owner, pairs)


def measure(drawn: Sequence[Mixtures], lambdas: Sequence[float]) -> list[Row]:
    """Sample privacy by lambda, in natural logarithms; means over the draws.

    Mixup is measured on the mixtures of one device (Table II), Mix2up on the inversely mixed-up samples of all
    (Table III): equally many of each, since a smallest one depends on their number. Raises :class:`FedblendError` for a
    lambda at which the inverse does not exist.
    """
    rows = []
    for lam in lambdas:
        inverse_ratios([lam, 1 - lam])
        rows.append(Row(lam, *np.mean([_of_one_draw(one, lam) for one in drawn], axis=0).tolist()))
    return rows


def _of_one_draw(one: Mixtures, lam: float) -> list[float]:
    """The numbers of a :class:`Row` for one draw."""
    own = one.mixed[one.owner == 0]
    shared = [(mix(one.raw, own, lam), own), (one.mix2up(lam), one.contributors)]
    numbers = []
    for samples, contributors in shared:
        with np.errstate(divide="ignore"):
            logs = np.log(nearest(samples, one.raw, contributors))
        numbers += [logs.min(), logs.mean(), recognised(samples, one.raw, contributors)]
    return numbers


def _able(labels: np.ndarray, population: Population, devices: int, rng: np.random.Generator) -> list[int]:
    """Random clients with samples of at least two labels; looked at one after another until there are enough."""
    found: list[int] = []
    for client in rng.permutation(len(population)).tolist():
        own = labels[population.indices(client)]
        if len(own) and own.min() != own.max():
            found.append(client)
        if len(found) == devices:
            return found
    raise FedblendError(
        f"--devices {devices}: only {len(found)} of {len(population)} clients hold samples of two labels, which mixing "
        f"needs; valid: 2 to {len(found)}"
        if len(found) > 1
        else f"partition: {len(found)} of {len(population)} clients hold samples of two labels, but inverse Mixup "
        "takes two such devices; give clients more labels"
    )
