"""Sample privacy of XorMixFL's and MixFL's seeds: distances to raw samples (Table 3), and leaked pixels and bits.

The paper measures "the minimum MDS value between the augmented sample and any raw sample contributing to the augmented
sample" (section 4.2). Two readings are measured, on pixels from 0 to 255: the smallest Euclidean distance to a
contributor, and that distance after multidimensional scaling of the sample and its contributors to two dimensions, as
`sklearn.manifold.MDS` does it.

A distance does not show how much of the target can be read off an encoded sample, so leaked pixels and bits are
measured too. An XOR hides a pixel only as far as the dummy's pixel is unknown. Drawings on black have dummy pixels that
are nearly all 0; there the target's pixel is sent in clear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedblend.analysis.privacy.mixup_privacy import place_in_plane, recognised_share, smallest_distances
from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.sharing import Pool
from fedblend.methods.sharing.xor import blend
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds

STARTS = 4  # Random starts of multidimensional scaling, of which the one of least stress is used


@dataclass(frozen=True)
class SharedSeeds:
    """The seeds of all devices in one draw, and the samples that they were made of; -1 fills short rows."""

    raw: torch.Tensor
    """All raw samples, uint8 [n, ...]: the devices' first, then the server's."""
    device_samples: int
    targets: np.ndarray
    """Rows of ``raw`` that are blended into each target, int64 [m, p]."""
    dummies: np.ndarray
    """Rows of ``raw`` that are blended into each seed's dummies, int64 [m, ...]."""
    server_dummies: np.ndarray
    """Rows of ``raw`` that the server decodes each seed with, int64 [m, p]; [m, 0] in MixFL."""
    blended: torch.Tensor
    """The blended targets, uint8 [m, ...]."""
    seeds: torch.Tensor
    """The seeds as they are sent, uint8 [m, ...]."""
    server_samples: torch.Tensor
    """The samples that the server trains on, uint8 [m, ...]."""
    guessed: torch.Tensor | None
    """Targets guessed with the seeds, uint8 [m, ...] (see :class:`XorPrivacy`); ``None`` in MixFL."""
    blind: torch.Tensor | None
    """Targets guessed without the seeds, uint8 [m, ...]; ``None`` in MixFL."""


@dataclass(frozen=True)
class XorPrivacy:
    """Sample privacy of one sharing, means over the draws; shares are from 0 to 1.

    A sample is *recognised* where the nearest device sample is one that the device made the seed of. The last four
    fields are of an XOR only, and ``None`` in MixFL.
    """

    distance: tuple[float, float]
    """Smallest distance to a contributor: mean and standard deviation over the samples that the server trains on."""
    mds: tuple[float, float] | None
    """The same after multidimensional scaling; ``None`` where this is not measured."""
    sent_recognised: float
    made_recognised: float
    """Share of the samples that the server trains on that are recognised."""
    clear: float | None = None
    """Share of the pixels that are sent in clear, because the dummy's pixel is 0."""
    clear_ink: float | None = None
    """The same share among the target's pixels above 0."""
    bits: float | None = None
    """Share of the target's bits that are right when a seed is decoded with a guessed dummy: the majority of each bit
    in the server's samples of the dummy's label."""
    blind: float | None = None
    """Share of the target's bits that are right when guessed without the seed: the majority of each bit in the server's
    samples of the target's label."""


def make_seeds(
    data: Dataset, population: Population, sharing: XorSeeds | MixedTargetSeeds, seed: int, repeat: int = 0
) -> SharedSeeds:
    """The seeds that all devices send on request, and the sample that the server makes of each.

    The result is a function of ``seed`` and ``repeat``. Raises :class:`FedblendError` for data that are not stored in 8
    bits or have no labels, for a server without samples, or if no device sends a seed.
    """
    if data.train.x.dtype != torch.uint8 or data.task != "classification":
        raise FedblendError(f"data: '{data.name}' does not hold 8-bit pixels with labels; valid: images with classes")
    sizes = population.sizes
    if sharing.server >= len(sizes) or not sizes[sharing.server]:
        raise FedblendError(f"method.sharing.server: {sharing.server}: no such client, or it holds no samples")
    labels = data.train.y.numpy()
    rows = population.indices(sharing.server)
    base = data.train.x[torch.from_numpy(rows)], data.train.y[torch.from_numpy(rows)]
    clients = [client for client in np.flatnonzero(sizes).tolist() if client != sharing.server]
    requests = sharing.spread(labels[rows], data.outputs, clients)
    drawn, seeds, blended, targets, dummies, start = [], [], [], [], [], 0
    for client in clients:
        own = population.indices(client)
        x, rng = data.train.x[torch.from_numpy(own)], stream(seed, "sample privacy", repeat, client)
        recipe = sharing.draw_recipe(labels[own], requests[client], rng)
        if recipe is not None:
            drawn.append(recipe)
            seeds.append(sharing.make_seeds(x, recipe, rng))
            blended.append(blend(x, recipe.targets, sharing.alpha))
            all_dummies = np.concatenate(recipe.dummies, axis=1)
            targets.append(np.where(recipe.targets >= 0, start + recipe.targets, -1))
            dummies.append(np.where(all_dummies >= 0, start + all_dummies, -1))
        start += len(own)
    if not drawn:
        raise FedblendError(
            "method.sharing: no device holds samples that the server requests; valid: a partition in which devices "
            "hold the target labels"
        )
    raw = data.train.x[torch.from_numpy(np.concatenate([*(population.indices(c) for c in clients), rows]))]
    sent = torch.cat(seeds)
    server_samples, server_dummies, guessed, blind = sent, np.empty((len(sent), 0), np.int64), None, None
    if isinstance(sharing, XorSeeds):
        dummy_labels = np.concatenate([recipe.dummy_labels for recipe in drawn])
        entries = Pool({"seeds": sent, "dummies": torch.from_numpy(dummy_labels)}, np.zeros(len(sent), np.int64))
        server_samples, used = sharing.decode_entries(entries, base, stream(seed, "sample privacy", repeat))
        server_dummies = np.where(used >= 0, start + used, -1)
        majority = bit_majorities(*base, data.outputs)
        guessed = sent ^ majority[torch.from_numpy(dummy_labels[:, 0])]
        blind = majority[torch.from_numpy(np.concatenate([recipe.labels for recipe in drawn]))]
    return SharedSeeds(
        raw=raw,
        device_samples=start,
        targets=np.concatenate(targets),
        dummies=np.concatenate(dummies),
        server_dummies=server_dummies,
        blended=torch.cat(blended),
        seeds=sent,
        server_samples=server_samples,
        guessed=guessed,
        blind=blind,
    )


def bit_majorities(x: torch.Tensor, y: torch.Tensor, classes: int) -> torch.Tensor:
    """One image for each label, of the majority of each bit over the label's samples: uint8 [C, ...]; 0 without any."""
    flat, labels = x.flatten(1).numpy(), y.numpy()
    majority = np.zeros((classes, flat.shape[1]), np.uint8)
    for label in np.unique(labels):
        bits = np.unpackbits(flat[labels == label], axis=1)
        majority[label] = np.packbits(2 * bits.sum(0, dtype=np.int64) > len(flat[labels == label]))
    return torch.from_numpy(majority).reshape(classes, *x.shape[1:])


def measure_seeds(drawn: Sequence[SharedSeeds], mds: bool = False, seed: int = 0) -> XorPrivacy:
    """Mean privacy over the draws; with ``mds`` also Table 3's measure."""
    found = []
    for repeat, one in enumerate(drawn):
        devices = np.concatenate([one.targets, one.dummies], axis=1)
        devices = np.where(devices >= 0, devices, one.targets[:, :1])
        server = np.where(one.server_dummies >= 0, one.server_dummies, one.server_dummies[:, :1])
        everyone = np.concatenate([devices, server], axis=1)
        distances = smallest_distances(one.server_samples, one.raw, everyone)
        scaled = np.zeros(1)
        if mds:
            scaled = mds_distances(one.server_samples, one.raw, everyone, stream(seed, "scaling", repeat))
        raw = one.raw[: one.device_samples]
        recognised = [recognised_share(samples, raw, devices) for samples in (one.seeds, one.server_samples)]
        found.append([distances.mean(), distances.std(), scaled.mean(), scaled.std(), *recognised, *_xor_leaks(one)])
    mean = np.mean(found, axis=0).tolist()
    return XorPrivacy((mean[0], mean[1]), (mean[2], mean[3]) if mds else None, *mean[4:])


def _xor_leaks(one: SharedSeeds) -> list[float]:
    """``clear``, ``clear_ink``, ``bits`` and ``blind`` of an XOR; empty in MixFL."""
    if one.guessed is None or one.blind is None:
        return []
    clear, ink = one.seeds == one.blended, one.blended > 0
    clear_ink = float(clear[ink].float().mean()) if bool(ink.any()) else 0.0
    bits = [1 - float(np.unpackbits((one.blended ^ guess).numpy()).mean()) for guess in (one.guessed, one.blind)]
    return [float(clear.float().mean()), clear_ink, *bits]


def mds_distances(
    samples: torch.Tensor, raw: torch.Tensor, contributors: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Smallest distance of each sample to its contributors, after scaling them all to two dimensions: float64 [n].

    ``contributors`` int64 [n, k] are rows of ``raw``.
    """
    points = torch.cat([samples.flatten(1)[:, None], raw.flatten(1)[torch.from_numpy(contributors)]], dim=1)
    placed = np.stack([place_in_plane(one, rng, STARTS) for one in points])
    return np.asarray(np.linalg.norm(placed[:, 1:] - placed[:, :1], axis=2).min(1))
