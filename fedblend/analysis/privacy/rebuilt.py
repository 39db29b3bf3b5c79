"""How near what clients share comes to single raw samples: means by M_k, mixed-up seeds, seeds of target labels.

What is shared is compared with the raw sample nearest to it, by the measures that attacks on weights have too (MSE,
PSNR, SSIM), so that all of them stand on one scale. It is *recognised* where that sample is one that it was made of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from fedblend.analysis.attacks.metrics import WINDOW, mse, psnr, ssim
from fedblend.analysis.privacy import xor
from fedblend.analysis.privacy.samples import draw, nearest, nearest_of_all
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.sharing import ClientData
from fedblend.data.scale import Scaler
from fedblend.methods.sharing.means import SharedMeans, class_groups, random_groups
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds

MOST = 300
"""Shared samples that are measured, at most: the first of a random order of all."""

SIZES = (2, 3, 5, 10, 20, 50)
"""M_k that are measured beside the run's own, as far as clients hold that many samples."""

SAME = 100.0
"""PSNR in dB that the very picture counts for in a mean: a mean of two equal samples is one of them."""

REPEATS, DEVICES = 5, 10
"""Draws of mixed-up seeds that are measured, and devices in each."""


@dataclass(frozen=True)
class Nearness:
    """Of so many shared ``samples``, means: of each to the raw sample nearest to it among all that clients hold.

    ``mse`` on the model's scale, ``psnr`` in dB (at most 100 of each, as of the very picture) and ``ssim`` of pictures
    in [0, 1] (NaN for pictures that are too small), the Euclidean ``distance`` on stored values (pixels from 0 to 255),
    and the share that is ``recognised``.
    """

    mse: float
    psnr: float
    ssim: float
    distance: float
    recognised: float
    samples: int

    def table(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)


RAW = Nearness(0.0, math.inf, 1.0, 0.0, 1.0, 0)
"""What is known of a sample that leaves as it is."""


def nearness(made: torch.Tensor, raw: torch.Tensor, rows: np.ndarray, own: np.ndarray, scale: Scaler) -> Nearness:
    """Compare shared samples [n, C, H, W], in the units of stored values, with rows of ``raw``; ``own`` bool [n] says
    which of these rows they were made of."""
    found = raw[torch.from_numpy(rows)]
    pairs = [scale(images.float()) for images in (found, made)]
    pictures = [scale.to_unit(images) for images in pairs]
    alike = float(ssim(*pictures).mean()) if min(raw.shape[-2:]) >= WINDOW else math.nan
    far = nearest(made, raw, rows[:, None]).mean()
    return Nearness(
        float(mse(*pairs).mean()),
        float(psnr(*pictures).clip(max=SAME).mean()),
        alike,
        float(far),
        float(own.mean()),
        len(rows),
    )


def of_means(setup: Setup, sharing: SharedMeans, size: int | Literal["all"] | None = None) -> Nearness | None:
    """Of the means that clients send in the first round, by the run's rules; with ``size`` as M_k in place of its own.

    Which samples are in which mean follows from the client's keyed stream, as when it shared them. ``None`` where no
    client sends any. Raises :class:`FedblendError` as the sharing does.
    """
    sharing = sharing if size is None else replace(sharing, samples_per_mean=size)
    made, groups = _shared(setup, sharing)
    if not made:
        return None
    x, number = torch.cat(made), np.concatenate(groups)
    order = stream(setup.experiment.seed, "leaks").permutation(len(x))[:MOST]
    assert isinstance(setup.scale, Scaler)
    stored = (x - setup.scale.offset) / setup.scale.factor
    raw = setup.data.train.x[torch.from_numpy(setup.population.order)]
    rows = nearest_of_all(stored[torch.from_numpy(order)], raw)
    return nearness(stored[torch.from_numpy(order)], raw, rows, number[rows] == order, setup.scale)


def _shared(setup: Setup, sharing: SharedMeans) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """All means on the model's scale, and of each client's samples the number of the mean it is in, or -1."""
    experiment = setup.experiment
    minimum = 1 if experiment.unsafe else experiment.policy.min_mean
    sizes, made, groups, count = setup.sizes(0), [], [], 0
    for client in range(len(setup.population)):
        x, y = setup.samples(client, int(sizes[client]))
        number = np.full(len(setup.population.indices(client)), -1)
        local = ClientData(x, y, setup.task, setup.scale, _no_layers, _stream(setup, client), minimum)
        payload = sharing.share(local)
        if payload is not None:
            places = _groups(sharing, y.numpy(), _stream(setup, client))
            allowed = np.bincount(places) >= minimum
            numbers = np.where(allowed, count + np.cumsum(allowed) - 1, -1)
            number[: len(y)] = numbers[places]
            means = payload["x"]
            made.append(setup.scale.from_unit(means) if sharing.scale == "unit" else means)
            count += len(means)
        groups.append(number)
    return made, groups


def _no_layers(x: torch.Tensor, layer: int) -> torch.Tensor:
    raise AssertionError("means of inputs ask for no hidden states")


def _stream(setup: Setup, client: int) -> np.random.Generator:
    return stream(setup.experiment.seed, "share", 0, client)


def _groups(sharing: SharedMeans, labels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The groups that :meth:`SharedMeans.share` makes with the same random numbers."""
    size = len(labels) if sharing.samples_per_mean == "all" else sharing.samples_per_mean
    return (class_groups if sharing.split == "class" else _at_random)(rng, labels, size)


def _at_random(rng: np.random.Generator, labels: np.ndarray, size: int) -> np.ndarray:
    return random_groups(rng, len(labels), size)


def sizes_of(setup: Setup, sharing: SharedMeans) -> list[int | Literal["all"]]:
    """The M_k worth measuring: those that a client can reach, and all its samples."""
    held = int(setup.sizes(0).max(initial=0))
    own = [sharing.samples_per_mean] if isinstance(sharing.samples_per_mean, int) else []
    least = 1 if setup.experiment.unsafe else setup.experiment.policy.min_mean
    return [*sorted({m for m in (*SIZES, *own) if least <= m < held or m in own}), "all"]


def of_seeds(setup: Setup, sharing: MixedSeeds) -> dict[str, Nearness]:
    """Of mixtures as they leave ("Mixup"), and of what the server makes of them ("Mix2up") where it does.

    As Mix2FLD's Tables II and III are measured, at the run's lambda and number of samples, but of up to ten devices,
    since the mixtures of two may not match. Raises :class:`FedblendError` where none do.
    """
    assert isinstance(setup.scale, Scaler)
    devices = min(DEVICES, int((setup.population.sizes > 0).sum()))
    found: dict[str, list[Nearness]] = {}
    for repeat in range(REPEATS):
        one = draw(setup.data, setup.population, setup.experiment.seed, repeat, devices, sharing.samples)
        made = {"Mixup": (one.mixup(sharing.lam), one.mixed)}
        if sharing.inverse:
            made["Mix2up"] = (one.mix2up(sharing.lam), one.contributors)
        for name, (samples, contributors) in made.items():
            rows = nearest_of_all(samples, one.raw)
            own = (rows[:, None] == contributors).any(1)
            found.setdefault(name, []).append(nearness(samples, one.raw, rows, own, setup.scale))
    return {name: _mean(rows) for name, rows in found.items()}


def of_targets(setup: Setup, sharing: XorSeeds | MixedTargetSeeds) -> dict[str, Nearness]:
    """Of the seeds of target labels as they leave ("sent"), and of what the server decodes of them ("decoded").

    "guessed" are seeds that someone decodes who has none of the devices' dummies, but knows what the server's samples
    of the dummy's label usually look like (:func:`fedblend.analysis.privacy.xor.majorities`); MixFL's are not encoded.
    All are compared with the devices' raw samples. Raises :class:`FedblendError` where no device sends any.
    """
    assert isinstance(setup.scale, Scaler)
    one = xor.draw(setup.data, setup.population, sharing, setup.experiment.seed)
    chosen = stream(setup.experiment.seed, "leaks").permutation(len(one.seeds))[:MOST]
    devices = np.concatenate([one.targets, one.dummies], axis=1)[chosen]
    raw, made = one.raw[: one.private], {"sent": one.seeds}
    if one.guessed is not None:
        made |= {"guessed": one.guessed, "decoded": one.made}
    found = {}
    for name, seeds in made.items():
        samples = seeds[torch.from_numpy(chosen)].float()
        rows = nearest_of_all(samples, raw)
        found[name] = nearness(samples, raw, rows, (rows[:, None] == devices).any(1), setup.scale)
    return found


def by_chance(setup: Setup, size: int | Literal["all"]) -> float:
    """The share of means of ``size`` samples that would be recognised if any raw sample were as near as another."""
    sizes = setup.sizes(0)
    held = sizes[sizes > 0]
    return float((held if size == "all" else np.minimum(held, size)).mean() / held.sum())


def _mean(rows: Sequence[Nearness]) -> Nearness:
    means = {name: float(np.mean([getattr(row, name) for row in rows])) for name in rows[0].table()}
    return Nearness(**means | {"samples": sum(row.samples for row in rows)})  # type: ignore[arg-type]
