"""Similarity of shared samples to raw samples: means by M_k, mixed seeds, and seeds of target labels.

Each shared sample is compared with the nearest raw sample, by the measures of attacks on weights (MSE, PSNR, SSIM), so
that leaks of both kinds can be compared. A shared sample is *recognised* where the nearest raw sample is one that it
was made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal

import numpy as np
import torch

from fedblend.analysis.attacks.image_similarity import WINDOW, mse, psnr, ssim
from fedblend.analysis.privacy import xor_privacy
from fedblend.analysis.privacy.mixup_privacy import make_mixtures, nearest_rows, smallest_distances
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.sharing import ClientData, Pool
from fedblend.data.scale import Scaler
from fedblend.methods.sharing.means import SharedMeans
from fedblend.methods.sharing.seeds import MixedSeeds
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds

MAX_SAMPLES = 300  # Most shared samples that are measured: the first of a random order of all
SIZES = (2, 3, 5, 10, 20, 50)  # M_k that are measured besides the run's own, as far as clients hold that many samples
IDENTICAL_PSNR = 100.0  # PSNR in dB of an identical image, in averages: the mean of two equal samples is one of them
REPEATS, DEVICES = 5, 10  # Draws of mixed seeds that are measured, and most devices in each


@dataclass(frozen=True)
class Similarity:
    """Mean similarity of shared samples, each to the nearest of all raw samples that clients hold."""

    mse: float
    """Mean squared error on the model's scale."""
    psnr: float
    """Peak signal-to-noise ratio in dB, of images in [0, 1]; at most 100 for each sample."""
    ssim: float
    """Structural similarity of images in [0, 1]; NaN for images that are too small."""
    distance: float
    """Euclidean distance on stored values (pixels from 0 to 255)."""
    recognised: float
    samples: int


RAW = Similarity(0.0, math.inf, 1.0, 0.0, 1.0, 0)  # Similarity of a raw sample to itself


def similarity(
    shared: torch.Tensor, raw: torch.Tensor, is_own: Callable[[np.ndarray], np.ndarray], scale: object
) -> Similarity:
    """Compare shared samples [n, C, H, W], in the units of stored values, with the nearest of ``raw``.

    ``is_own`` tells of rows int64 [n] of ``raw`` where the shared sample was made of that row.
    """
    assert isinstance(scale, Scaler)
    rows = nearest_rows(shared, raw)
    scaled = [scale(images.float()) for images in (raw[torch.from_numpy(rows)], shared)]
    unit = [scale.to_unit(images) for images in scaled]
    return Similarity(
        mse=float(mse(*scaled).mean()),
        psnr=float(psnr(*unit).clip(max=IDENTICAL_PSNR).mean()),
        ssim=float(ssim(*unit).mean()) if min(raw.shape[-2:]) >= WINDOW else math.nan,
        distance=float(smallest_distances(shared, raw, rows[:, None]).mean()),
        recognised=float(is_own(rows).mean()),
        samples=len(rows),
    )


def similarity_of_means(
    setup: Setup, sharing: SharedMeans, size: int | Literal["all"] | None = None
) -> Similarity | None:
    """Similarity of the means that clients send in the first round; ``size`` replaces the run's M_k.

    The samples of each mean are those that the client's random stream chose in the run. ``None`` where no client sends
    a mean. Raises :class:`FedblendError` as the sharing does.
    """
    sharing = sharing if size is None else replace(sharing, samples_per_mean=size)
    means, groups = _shared_means(setup, sharing)
    if not means:
        return None
    x, number = torch.cat(means), np.concatenate(groups)
    order = stream(setup.experiment.seed, "leaks").permutation(len(x))[:MAX_SAMPLES]
    raw = setup.data.train.x[torch.from_numpy(setup.population.order)]
    shared = _stored(setup, x[torch.from_numpy(order)])
    return similarity(shared, raw, lambda rows: number[rows] == order, setup.scale)


def _shared_means(setup: Setup, sharing: SharedMeans) -> tuple[list[torch.Tensor], list[np.ndarray]]:
    """All means on the model's scale, and for each client's samples the number of their mean, or -1."""
    minimum = setup.experiment.policy.min_mean
    sizes, all_means, groups, count = setup.sizes(0), [], [], 0
    for client in range(len(setup.population)):
        x, y = setup.samples(client, int(sizes[client]))
        rngs = partial(stream, setup.experiment.seed, "share", 0, client)
        number = np.full(len(setup.population.indices(client)), -1)
        local = ClientData(x, y, setup.task, setup.scale, _no_layers, rngs(), minimum)
        payload = sharing.share(local)
        if payload is not None:
            # The same random numbers as the payload's, from the beginning.
            places = sharing.groups(replace(local, rng=rngs()))
            allowed = np.bincount(places) >= minimum
            numbers = np.where(allowed, count + np.cumsum(allowed) - 1, -1)
            number[: len(y)] = numbers[places]
            means = payload["x"]
            all_means.append(setup.scale.from_unit(means) if sharing.scale == "unit" else means)
            count += len(means)
        groups.append(number)
    return all_means, groups


def _no_layers(x: torch.Tensor, layer: int) -> torch.Tensor:
    raise AssertionError("means of inputs need no hidden states")


def similarity_of_entries(setup: Setup, entries: Pool) -> Similarity:
    """Similarity of shared inputs x, such as synthetic samples, each of one class (y, one-hot).

    One is recognised where the nearest raw sample is of the client that sent it, and of its class.
    """
    order = stream(setup.experiment.seed, "leaks").permutation(len(entries))[:MAX_SAMPLES]
    x, y = (entries.tensors[name][torch.from_numpy(order)] for name in ("x", "y"))
    held = torch.from_numpy(setup.population.order)

    def is_own(rows: np.ndarray) -> np.ndarray:
        of_class = (setup.data.train.y[held][torch.from_numpy(rows)] == y.argmax(1)).numpy()
        return of_class & (setup.population.owners()[rows] == entries.owner[order])

    return similarity(_stored(setup, x), setup.data.train.x[held], is_own, setup.scale)


def _stored(setup: Setup, x: torch.Tensor) -> torch.Tensor:
    """Inputs on the model's scale, in the units of stored values."""
    assert isinstance(setup.scale, Scaler)
    return (x - setup.scale.offset) / setup.scale.factor


def mean_sizes(setup: Setup, sharing: SharedMeans) -> list[int | Literal["all"]]:
    """The M_k to measure: those that a client can reach, the run's own, and "all"."""
    held = int(setup.sizes(0).max(initial=0))
    own = [sharing.samples_per_mean] if isinstance(sharing.samples_per_mean, int) else []
    least = setup.experiment.policy.min_mean
    return [*sorted({m for m in (*SIZES, *own) if least <= m < held or m in own}), "all"]


def similarity_of_mixed_seeds(setup: Setup, sharing: MixedSeeds) -> dict[str, Similarity]:
    """Similarity of mixtures as sent ("Mixup"), and with ``inverse`` of the inversely mixed samples ("Mix2up").

    Measured as Mix2FLD's Tables II and III, at the run's lambda and number of samples, but of up to ten devices,
    because the mixtures of two may not match. Raises :class:`FedblendError` where none match.
    """
    devices = min(DEVICES, int((setup.population.sizes > 0).sum()))
    found: dict[str, list[Similarity]] = {}
    for repeat in range(REPEATS):
        one = make_mixtures(setup.data, setup.population, setup.experiment.seed, repeat, devices, sharing.samples)
        shared = {"Mixup": (one.mixup(sharing.lam), one.mixed)}
        if sharing.inverse:
            shared["Mix2up"] = (one.mix2up(sharing.lam), one.contributors)
        for name, (samples, contributors) in shared.items():
            found.setdefault(name, []).append(similarity(samples, one.raw, _is_any(contributors), setup.scale))
    return {name: _mean(rows) for name, rows in found.items()}


def similarity_of_target_seeds(setup: Setup, sharing: XorSeeds | MixedTargetSeeds) -> dict[str, Similarity]:
    """Similarity of seeds of target labels as sent ("sent"), and as decoded by the server ("decoded").

    "guessed" are seeds decoded without the devices' dummies, by the majority of each bit in the server's samples of the
    dummy's label (:func:`fedblend.analysis.privacy.xor_privacy.bit_majorities`). MixFL's seeds are only "sent". All are
    compared with the devices' raw samples. Raises :class:`FedblendError` where no device sends a seed.
    """
    one = xor_privacy.make_seeds(setup.data, setup.population, sharing, setup.experiment.seed)
    chosen = stream(setup.experiment.seed, "leaks").permutation(len(one.seeds))[:MAX_SAMPLES]
    devices = np.concatenate([one.targets, one.dummies], axis=1)[chosen]
    raw, shared = one.raw[: one.device_samples], {"sent": one.seeds}
    if one.guessed is not None:
        shared |= {"guessed": one.guessed, "decoded": one.server_samples}
    return {
        name: similarity(seeds[torch.from_numpy(chosen)].float(), raw, _is_any(devices), setup.scale)
        for name, seeds in shared.items()
    }


def recognised_by_chance(setup: Setup, size: int | Literal["all"]) -> float:
    """The share of means of ``size`` samples that would be recognised if all raw samples were equally near."""
    sizes = setup.sizes(0)
    held = sizes[sizes > 0]
    return float((held if size == "all" else np.minimum(held, size)).mean() / held.sum())


def _is_any(own: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Whether a row is among those [n, m] that its shared sample was made of."""
    return lambda rows: (rows[:, None] == own).any(1)


def _mean(rows: Sequence[Similarity]) -> Similarity:
    means = {name: float(np.mean([getattr(row, name) for row in rows])) for name in asdict(rows[0])}
    return Similarity(**means | {"samples": sum(row.samples for row in rows)})  # type: ignore[arg-type]
