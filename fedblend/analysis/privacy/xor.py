"""Sample privacy of XorMixFL's and MixFL's seeds: distances to raw samples (Table 3), and what leaks of them.

The paper measures "the minimum MDS value between the augmented sample and any raw sample contributing to the augmented
sample" (section 4.2): here the smallest Euclidean distance to a contributor on pixels from 0 to 255, and that distance
after multidimensional scaling of the sample and its contributors to two dimensions, as `sklearn.manifold.MDS` makes it.

A distance says nothing of what can be read off an encoded sample, so that this is measured too. An XOR hides a pixel
only as far as the dummy's is unknown; those of drawings on black are nearly all 0, where the target travels in clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedblend.analysis.privacy.samples import nearest, recognised
from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.sharing import Pool
from fedblend.methods.sharing.xor import blend
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds

STARTS, STEPS = 4, 300
"""Random starts of multidimensional scaling, of which the best counts, and the steps of each."""


@dataclass(frozen=True)
class Shared:
    """The seeds of all devices in one draw, and what they were made of.

    ``raw`` uint8 [n, ...] are all raw samples, the first ``private`` of them the devices', the others the server's;
    ``targets``, ``dummies`` int64 [m, ...] number those that a device made each seed of, ``own`` int64 [m, p] those
    that the server decoded it with (none in MixFL). ``blended`` uint8 [m, ...] are the blended targets, ``seeds`` what
    travels, ``made`` what the server trains on. ``guessed`` and ``blind`` uint8 [m, ...] are what can be told of the
    targets with and without the seeds (see :class:`Row`); ``None`` in MixFL.
    """

    raw: torch.Tensor
    private: int
    targets: np.ndarray
    dummies: np.ndarray
    own: np.ndarray
    blended: torch.Tensor
    seeds: torch.Tensor
    made: torch.Tensor
    guessed: torch.Tensor | None
    blind: torch.Tensor | None


@dataclass(frozen=True)
class Row:
    """Sample privacy of one way of sharing, means over the draws; shares are from 0 to 1.

    ``distance`` and ``mds`` are mean and standard deviation over what the server trains on. ``sent_recognised`` and
    ``made_recognised``: the nearest of the devices' raw samples is one that the device made the seed of, for what
    travels and for what the server trains on.

    Of an XOR only (``None`` in MixFL): ``clear``, pixels that are sent as they are, since the dummy's is 0;
    ``clear_ink``, the same among the target's pixels above 0; ``bits``, those of the target that are right when a
    seed is decoded by the majority of each bit in the server's samples of the dummy's label; ``blind``, those that are
    right when they are guessed by the majority in the server's samples of the target's label, without the seed.
    """

    distance: tuple[float, float]
    mds: tuple[float, float] | None
    sent_recognised: float
    made_recognised: float
    clear: float | None = None
    clear_ink: float | None = None
    bits: float | None = None
    blind: float | None = None


def draw(
    data: Dataset, population: Population, sharing: XorSeeds | MixedTargetSeeds, seed: int, repeat: int = 0
) -> Shared:
    """The seeds that all devices send when asked, and what the server makes of each of them.

    Everything follows from ``seed`` and ``repeat``. Raises :class:`FedblendError` for data that are not stored in 8
    bits or have no labels, a server that holds nothing, or if no device sends anything.
    """
    if data.train.x.dtype != torch.uint8 or data.task != "classification":
        raise FedblendError(
            f"data: '{data.name}' does not hold pixels of 8 bits with labels; valid: images with classes"
        )
    sizes = population.sizes
    if sharing.server >= len(sizes) or not sizes[sharing.server]:
        raise FedblendError(f"method.sharing.server: {sharing.server}: no such client, or it holds no samples")
    labels = data.train.y.numpy()
    rows = population.indices(sharing.server)
    base = data.train.x[torch.from_numpy(rows)], data.train.y[torch.from_numpy(rows)]
    clients = [client for client in np.flatnonzero(sizes).tolist() if client != sharing.server]
    requests = sharing.requests(labels[rows], data.outputs, clients)
    found, start = [], 0
    for client in clients:
        own = population.indices(client)
        x, rng = data.train.x[torch.from_numpy(own)], stream(seed, "sample privacy", repeat, client)
        drawn = sharing.drawn(labels[own], requests[client], rng)
        if drawn is not None:
            seeds = sharing.made(x, drawn, rng)
            places = [np.where(part >= 0, start + part, -1) for part in (drawn.targets, *drawn.dummies)]
            found.append((drawn, places, seeds, blend(x, drawn.targets, sharing.alpha)))
        start += len(own)
    if not found:
        raise FedblendError("method.sharing: no device holds what the server asks for; give devices the target labels")
    raw = data.train.x[torch.from_numpy(np.concatenate([*(population.indices(c) for c in clients), rows]))]
    seeds, blended = torch.cat([one[2] for one in found]), torch.cat([one[3] for one in found])
    targets = np.concatenate([one[1][0] for one in found])
    dummies = np.concatenate([np.concatenate(one[1][1:], axis=1) for one in found])
    made, used, guessed, blind = seeds, np.empty((len(seeds), 0), np.int64), None, None
    if isinstance(sharing, XorSeeds):
        hidden = np.concatenate([one[0].hidden for one in found])
        entries = Pool({"seeds": seeds, "dummies": torch.from_numpy(hidden)}, np.zeros(len(seeds), np.int64))
        made, used = sharing.decoded(entries, base, stream(seed, "sample privacy", repeat))
        used = np.where(used >= 0, start + used, -1)
        usual = majorities(*base, data.outputs)
        guessed = seeds ^ usual[torch.from_numpy(hidden[:, 0])]
        blind = usual[torch.from_numpy(np.concatenate([one[0].labels for one in found]))]
    return Shared(raw, start, targets, dummies, used, blended, seeds, made, guessed, blind)


def majorities(x: torch.Tensor, y: torch.Tensor, classes: int) -> torch.Tensor:
    """A picture of each label whose every bit is what most samples of it have there: uint8 [C, ...]; black if none."""
    flat, labels = x.flatten(1).numpy(), y.numpy()
    usual = np.zeros((classes, flat.shape[1]), np.uint8)
    for label in np.unique(labels):
        bits = np.unpackbits(flat[labels == label], axis=1)
        usual[label] = np.packbits(2 * bits.sum(0, dtype=np.int64) > len(flat[labels == label]))
    return torch.from_numpy(usual).reshape(classes, *x.shape[1:])


def measure(drawn: Sequence[Shared], mds: bool = False, seed: int = 0) -> Row:
    """What :class:`Row` tells, means over draws; with ``mds`` also Table 3's measure."""
    found = []
    for repeat, one in enumerate(drawn):
        devices = np.concatenate([one.targets, one.dummies], axis=1)
        devices = np.where(devices >= 0, devices, one.targets[:, :1])
        everyone = np.concatenate([devices, np.where(one.own >= 0, one.own, one.own[:, :1])], axis=1)
        distances = nearest(one.made, one.raw, everyone)
        numbers = [distances.mean(), distances.std()]
        scaled = mds_distances(one.made, one.raw, everyone, stream(seed, "scaling", repeat)) if mds else np.zeros(1)
        numbers += [scaled.mean(), scaled.std()]
        numbers += [recognised(sent, one.raw[: one.private], devices) for sent in (one.seeds, one.made)]
        found.append(numbers + _leaks(one))
    mean = np.mean(found, axis=0).tolist()
    return Row((mean[0], mean[1]), (mean[2], mean[3]) if mds else None, *mean[4:])


def _leaks(one: Shared) -> list[float]:
    """``clear``, ``clear_ink``, ``bits`` and ``blind`` of an XOR."""
    if one.guessed is None or one.blind is None:
        return []
    clear, ink = one.seeds == one.blended, one.blended > 0
    of_ink = float(clear[ink].float().mean()) if bool(ink.any()) else 0.0
    return [float(clear.float().mean()), of_ink, *(_right_bits(one.blended, told) for told in (one.guessed, one.blind))]


def _right_bits(x: torch.Tensor, told: torch.Tensor) -> float:
    """The share of bits in which two sets of pictures agree."""
    return 1 - float(np.unpackbits((x ^ told).flatten().numpy()).mean())


# Multidimensional scaling -----------------------------------------------------------------------------------


def mds_distances(
    samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """The smallest distance of each sample to its contributors, after scaling all of them to two dimensions: [n].

    ``contributors`` int64 [n, k] number rows of ``raw``. Of {STARTS} random starts the one of least stress counts.
    """
    points = torch.cat([samples.flatten(1)[:, None], raw.flatten(1)[torch.from_numpy(contributors)]], dim=1).double()
    wanted = torch.cdist(points, points)
    best, stress = torch.zeros(len(points)), torch.full((len(points),), torch.inf, dtype=torch.float64)
    for _ in range(STARTS):
        placed = scale_down(wanted, torch.from_numpy(rng.random((*points.shape[:2], 2))), STEPS)
        between = torch.cdist(placed, placed)
        found = (between - wanted).square().sum((1, 2)) / 2
        best = torch.where(found < stress, between[:, 0, 1:].amin(1), best)
        stress = torch.minimum(found, stress)
    return best.numpy()


def scale_down(wanted: torch.Tensor, placed: torch.Tensor, steps: int) -> torch.Tensor:
    """Points whose distances come near to those wanted (SMACOF, metric): float64 [n, k, d].

    ``wanted`` float64 [n, k, k] of n sets of k points each, ``placed`` float64 [n, k, d] where they begin. Each step
    is a Guttman transform, all sets at once.
    """
    for _ in range(steps):
        between = torch.cdist(placed, placed)
        ratio = -wanted / torch.where(between == 0, 1e-5, between)
        ratio.diagonal(dim1=1, dim2=2).sub_(ratio.sum(2))
        placed = ratio @ placed / wanted.shape[1]
    return placed
