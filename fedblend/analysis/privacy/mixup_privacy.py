"""Sample privacy of Mixup and Mix2up: the distance of a shared sample from the raw samples that it was made of.

Mix2FLD (section IV, Tables II and III) defines it for a mixture as log(min{||s^ - s_i||, ||s^ - s_j||}): the natural
logarithm of the smaller Euclidean distance to its two raw samples, on pixels from 0 to 255. A Mix2up sample is
inversely mixed from two mixtures, and its distance is the smallest to their four raw samples.

It cites a chapter on multidimensional scaling for this, so distances after scaling are measured too: all shared samples
and the raw samples that they were made of are placed in a plane together.

The paper states one number for N_S = 100 samples and does not define how they are combined. Here both the smallest
distance of these samples and the mean of their logarithms are measured. The paper's Table II grows with lambda as the
definition predicts (as log lambda). It implies a distance between raw samples of e^6.768 = 869 for MNIST. That is below
the smallest distance of 100 samples there (about 1,760), and a third of the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError, missing_package
from fedblend.core.random import stream
from fedblend.methods.sharing import seeds

LAMBDAS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.49)
"""Mixing ratios of Tables II and III; the paper heads the first and last column 0.001 and 0.499."""

SAMPLES = 100  # N_S of Tables II and III

STEPS, TOLERANCE = 300, 1e-8
"""Multidimensional scaling: most steps of a start, and the relative change of stress at which it has converged."""

CHUNK = 4096  # Raw samples that shared samples are compared with at a time


@dataclass(frozen=True)
class Mixtures:
    """The raw samples of mixtures, and the mixtures that are inversely mixed; the same for every lambda."""

    raw: torch.Tensor
    """All samples of the devices, uint8 or float [n, ...]."""
    y: np.ndarray
    """Their labels, int64 [n]."""
    holder: np.ndarray
    """Their devices, int64 [n]."""
    mixed: np.ndarray
    """Rows i and j of ``raw`` of each mixture, int64 [mixtures, 2]."""
    owner: np.ndarray
    """Device of each mixture, int64 [mixtures]."""
    pairs: seeds.Pairs

    @property
    def labels(self) -> np.ndarray:
        """The label pairs of the mixtures, int64 [mixtures, 2]."""
        return self.y[self.mixed]

    def mixup(self, lam: float) -> torch.Tensor:
        """All mixtures at one lambda."""
        return seeds.mix(self.raw, self.mixed, lam)

    def mix2up(self, lam: float) -> torch.Tensor:
        """All inversely mixed samples at one lambda."""
        return seeds.unmix_pairs(self.mixup(lam), self.labels, self.pairs, lam)[0]

    @property
    def contributors(self) -> np.ndarray:
        """The four raw samples of each inversely mixed sample, int64 [pairs, 4]: i, j of s, then of t."""
        return self.mixed[self.pairs.chosen].reshape(-1, 4)


@dataclass(frozen=True)
class MixupPrivacy:
    """Sample privacy at one lambda, means over the draws.

    For Mixup and for Mix2up: the logarithm of the smallest distance, the mean of all logarithms, and the share of
    *recognised* samples. A shared sample is recognised where the nearest raw sample, of all that the devices hold, is
    one that it was made of.
    """

    lam: float
    mixup_smallest: float
    mixup_mean: float
    mixup_recognised: float
    mix2up_smallest: float
    mix2up_mean: float
    mix2up_recognised: float


def smallest_distances(samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray) -> np.ndarray:
    """The smallest Euclidean distance of each sample to its contributors: float64 [n].

    ``contributors`` int64 [n, k] are rows of ``raw``.
    """
    flat = samples.double().flatten(1)
    distances = [
        (flat - raw[torch.from_numpy(column)].double().flatten(1)).norm(dim=1) for column in contributors.T.copy()
    ]
    return torch.stack(distances).amin(0).numpy()


def place_in_plane(points: torch.Tensor, rng: np.random.Generator, starts: int = 1) -> np.ndarray:
    """Scale points [n, ...] to two dimensions, so that distances change as little as may be: float64 [n, 2].

    Scaling is metric SMACOF (`sklearn.manifold.smacof`); of several random ``starts`` the one of least stress is used.
    Raises :class:`FedblendError` if scikit-learn (extra ``analysis``) is not installed.
    """
    try:
        from sklearn.manifold import smacof  # Takes a second to import, and only these measures need it.
    except ImportError:
        raise missing_package("multidimensional scaling (mds)", "scikit-learn", "analysis") from None

    flat = points.double().flatten(1)
    placed, _ = smacof(
        torch.cdist(flat, flat).numpy(),
        n_components=2,
        n_init=starts,
        max_iter=STEPS,
        eps=TOLERANCE,
        random_state=int(rng.integers(2**31)),
        normalized_stress=False,
    )
    return np.asarray(placed)


def jointly_scaled_distances(
    samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """As :func:`smallest_distances`, after scaling all samples and all their contributors to a plane together."""
    rows, places = np.unique(contributors, return_inverse=True)
    chosen = raw[torch.from_numpy(rows)].to(samples.dtype)
    placed = torch.from_numpy(place_in_plane(torch.cat([samples, chosen]), rng))
    return smallest_distances(placed[: len(samples)], placed[len(samples) :], places.reshape(contributors.shape))


def nearest_rows(samples: torch.Tensor, raw: torch.Tensor) -> np.ndarray:
    """The row of ``raw`` nearest to each sample: int64 [n]."""
    flat = samples.double().flatten(1)
    best, row = torch.full((len(flat),), float("inf"), dtype=torch.float64), torch.zeros(len(flat), dtype=torch.int64)
    for start in range(0, len(raw), CHUNK):
        distance, place = torch.cdist(flat, raw[start : start + CHUNK].double().flatten(1)).min(1)
        row = torch.where(distance < best, start + place, row)
        best = torch.minimum(distance, best)
    return row.numpy()


def recognised_share(samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray) -> float:
    """The share of samples whose nearest raw sample is one of their contributors (as in :func:`smallest_distances`)."""
    return float((nearest_rows(samples, raw)[:, None] == contributors).any(1).mean())


def make_mixtures(
    data: Dataset,
    population: Population,
    seed: int,
    repeat: int = 0,
    devices: int = 2,
    samples: int = SAMPLES,
    coordinated: bool = False,
) -> Mixtures:
    """Draw mixtures of ``devices`` clients, ``samples`` (N_S) of each, and as many inversely mixed samples.

    With ``coordinated`` the labels of mixtures match; with many classes few would otherwise (see :class:`MixedSeeds`).
    The result is a function of ``seed`` and ``repeat``. Raises :class:`FedblendError` for data that cannot be mixed,
    for too few clients with two labels, and for clients whose mixtures do not match.
    """
    if data.task != "classification" or data.kind in ("text", "tokens"):
        kind = data.task if data.task != "classification" else data.kind
        raise FedblendError(
            f"data: '{data.name}' is {kind}, but mixing needs classes; valid: images or features with classes"
        )
    rng = stream(seed, "sample privacy", repeat)
    labels = data.train.y.numpy()
    rows = [population.indices(client) for client in _clients_of_two_labels(labels, population, devices, rng)]
    requested: Sequence[np.ndarray | None] = [None] * devices
    if coordinated:
        held = np.stack([np.bincount(labels[own], minlength=len(data.classes)) > 0 for own in rows])
        requested = list(seeds.coordinate(held, samples, rng))
    mixed, start = [], 0
    for own, wanted in zip(rows, requested, strict=True):
        y = labels[own]
        pairs_of = seeds.pairs_to_mix(y, samples, rng) if wanted is None else seeds.pairs_of_labels(y, wanted, rng)
        mixed.append(start + pairs_of)
        start += len(own)
    all_rows, owner = np.concatenate(rows), np.repeat(np.arange(devices), samples)
    y, all_mixed = labels[all_rows], np.concatenate(mixed)
    try:
        pairs = seeds.pair_across(y[all_mixed], owner, samples, rng)
    except FedblendError as error:
        raise FedblendError(f"--samples {samples}: {error} (--coordinated)") from None
    holder = np.repeat(np.arange(devices), [len(own) for own in rows])
    return Mixtures(data.train.x[torch.from_numpy(all_rows)], y, holder, all_mixed, owner, pairs)


def measure_mixtures(drawn: Sequence[Mixtures], lambdas: Sequence[float]) -> list[MixupPrivacy]:
    """Sample privacy by lambda, in natural logarithms; means over the draws.

    Mixup is measured on the mixtures of one device (Table II), Mix2up on the inversely mixed samples of all devices
    (Table III). Both are equally many, because a smallest distance depends on their number. Raises
    :class:`FedblendError` for a lambda that has no inverse.
    """
    rows = []
    for lam in lambdas:
        seeds.inverse_ratio(lam)
        rows.append(MixupPrivacy(lam, *np.mean([_measure_one(one, lam) for one in drawn], axis=0).tolist()))
    return rows


def measure_scaled(drawn: Sequence[Mixtures], lam: float, seed: int) -> dict[str, float]:
    """Logarithms of the smallest distance after joint scaling, and means of all logarithms; means over the draws."""
    numbers = []
    for repeat, one in enumerate(drawn):
        rng = stream(seed, "scaling", repeat)
        logs = [np.log(jointly_scaled_distances(x, one.raw, rows, rng)) for x, rows in _shared(one, lam)]
        numbers.append([figure for log in logs for figure in (log.min(), log.mean())])
    names = [f"{kind}_scaled_{figure}" for kind in ("mixup", "mix2up") for figure in ("smallest", "mean")]
    return dict(zip(names, np.mean(numbers, axis=0).tolist(), strict=True))


def _shared(one: Mixtures, lam: float) -> list[tuple[torch.Tensor, np.ndarray]]:
    """The mixtures of one device, and the inversely mixed samples of all, each with their contributors."""
    own = one.mixed[one.owner == 0]
    return [(seeds.mix(one.raw, own, lam), own), (one.mix2up(lam), one.contributors)]


def _measure_one(one: Mixtures, lam: float) -> list[float]:
    numbers = []
    for samples, contributors in _shared(one, lam):
        with np.errstate(divide="ignore"):
            logs = np.log(smallest_distances(samples, one.raw, contributors))
        numbers += [logs.min(), logs.mean(), recognised_share(samples, one.raw, contributors)]
    return numbers


def _clients_of_two_labels(
    labels: np.ndarray, population: Population, devices: int, rng: np.random.Generator
) -> list[int]:
    """``devices`` random clients with samples of at least two labels."""
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
        "needs two such devices; valid: a partition with more labels for each client"
    )
