"""Seed samples for the server (Mix2FLD, section III): raw, mixed at the devices, or inversely mixed at the server.

A *mixture* is lambda s_i + (1 - lambda) s_j of two samples of one device with different labels a and b. Its label is
the ordered pair (a, b). The inverse superposes a mixture of (a, b) with one of (b, a) from another device, so that b
cancels and a sample of label a remains. Labels are integers outside the superposition, so they stay exact although
pixels are rounded.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, ServerSide, Sharing, SharingPlan
from fedblend.methods.requirements import require_classes, require_numbers

SINGULAR = 1e-9  # Eigenvalue 2 lambda - 1 of the mixing matrix (whose largest is 1) that counts as 0


def compact_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Labels in the smallest type that holds all classes: uint8 for up to 256 classes, else int32."""
    return labels.to(torch.uint8 if classes <= 256 else torch.int32)


class Seeds(Sharing):
    """Base of sharings whose samples stay at the server."""

    bytes_kind = "seeds"
    plan = SharingPlan("seeds")
    if_empty = (
        "let clients hold two labels each, and send more seeds or coordinated ones: inverse mixing pairs seeds of the "
        "same two labels"
    )

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Accept any sizes: a client with one sample can share."""


@part("sharing", "raw-seeds")
class RawSeeds(Seeds):
    """Send raw samples of every device to the server, once (FLD; Mix2FLD, section III-A). This breaks privacy.

    Samples are sent as stored: x [n, ...] and their targets y [n]. With an objective that reads such samples, as
    `virtual-samples` does, all clients receive them: a small set of raw samples that clients hold beside their own data
    (Zhao et al. 2018; there the server collects the set apart, balanced by class).
    """

    bytes_kind = "raw"
    plan = SharingPlan("raw")

    samples: Count = 10
    """Samples that each device sends, N_S; a device with fewer samples sends all."""

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return min(samples, self.samples)

    def share(self, local: ClientData) -> Payload | None:
        """Samples as stored, drawn without replacement, and their targets; labels in the smallest type."""
        if not len(local.y):
            return None
        rows = torch.from_numpy(np.sort(local.rng.permutation(len(local.y))[: self.samples]))
        y = local.y[rows]
        classes = local.task.kind == "classification"
        return {"x": local.x[rows], "y": compact_labels(y, local.task.outputs) if classes else y}


@part("sharing", "mixed-seeds")
class MixedSeeds(Seeds):
    """Mix pairs of a device's samples with different labels, once (MixFLD and Mix2FLD, equation 6).

    A device sends the mixture lambda x_i + (1 - lambda) x_j, rounded to the type that pixels are stored in (6,272 bits
    for one MNIST image), and its two labels. With ``inverse`` the server pairs mixtures of labels (a, b) and (b, a)
    across devices and superposes them, so that each result has one label (Proposition 1). These samples leave the range
    of pixels and are not clipped. A device whose samples all have one label sends nothing.

    With many classes random label pairs seldom match: of 100 classes two mixtures match with probability 1 / 9,900.
    With ``coordinated`` the server first collects the labels that devices hold, then requests certain label pairs of
    each, so that every mixture has a partner. The server thereby learns each device's labels. These requests, a few
    bytes, are not counted. ``coordinated`` is not available over Flower, where the server does not collect labels.
    """

    samples: Count = 10
    """Mixtures that each device sends, N_S."""
    lam: Annotated[Float, Field(gt=0, lt=1)] = 0.1
    """Share of the first sample, lambda; 0.5 has no inverse."""
    inverse: bool = True
    """Mix inversely at the server (Mix2FLD); if false, use the mixtures with their soft labels (MixFLD)."""
    generated: Count | None = None
    """Samples that the server makes for each device, N_I (default: as many as the device sent)."""
    coordinated: bool = False
    """Let the server request matching label pairs; if false, each device draws its own."""

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return self.samples if samples > 1 else 0

    @pydantic.model_validator(mode="after")
    def _has_inverse(self) -> MixedSeeds:
        if self.inverse:
            inverse_ratio(self.lam)
        return self

    def share(self, local: ClientData) -> Payload | None:
        """Mixtures x [n, ...] in the type of the samples, and their two labels y [n, 2].

        Raises :class:`FedblendError` for data without classes, for text, and with ``coordinated`` and without a
        request.
        """
        require_classes(self, local.task, "means")
        require_numbers(self, local.scale, "means")
        labels = local.y.numpy().astype(np.int64)
        if len(np.unique(labels)) < 2:
            return None
        if self.coordinated:
            if local.request is None:
                raise FedblendError(
                    "method.sharing.coordinated: true, but the server requested no labels of this device; valid: false "
                    "where devices are real sites"
                )
            pairs = pairs_of_labels(labels, local.request.pairs, local.rng)
        else:
            pairs = pairs_to_mix(labels, self.samples, local.rng)
        mixed = mix(local.x, pairs, self.lam)
        if not local.x.is_floating_point():
            mixed = mixed.round().clamp(0, 255).to(local.x.dtype)
        return {"x": mixed, "y": compact_labels(torch.from_numpy(labels[pairs]), local.task.outputs)}

    def requests(self, server: ServerSide) -> dict[int, Request]:
        """Matching label pairs for all devices, if coordinated.

        Raises :class:`FedblendError` if no two devices share two labels.
        """
        if not self.coordinated:
            return {}
        empty = np.empty(0, np.int64)
        requested = coordinate(server.labels_held(), self.samples, server.rng)
        return {device: Request(empty, empty, pairs) for device, pairs in enumerate(requested)}

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """Samples x in float on the scale that they are stored in, and labels: y int64 [n], or soft ones float [n, C].

        C is one more than the largest label received. Empty where no mixture has a partner on another device.
        """
        if not len(entries):
            return entries
        x, labels = entries.tensors["x"].float(), entries.tensors["y"].numpy().astype(np.int64)
        if not self.inverse:
            return Pool({"x": x, "y": self._soft(entries.tensors["y"].long())}, entries.owner)
        devices = len(np.unique(entries.owner))
        count = devices * self.generated if self.generated else len(entries)
        try:
            pairs = pair_across(labels, entries.owner, count, rng)
        except FedblendError:
            return Pool({}, np.empty(0, np.int64))
        unmixed, hard = unmix_pairs(x, labels, pairs, self.lam)
        return Pool({"x": unmixed, "y": torch.from_numpy(hard)}, np.full(len(hard), -1))

    def _soft(self, labels: torch.Tensor) -> torch.Tensor:
        """Soft labels {a: lambda, b: 1 - lambda} of mixtures with labels (a, b)."""
        one_hot = F.one_hot(labels).float()
        return self.lam * one_hot[:, 0] + (1 - self.lam) * one_hot[:, 1]


# Mixup before collection ------------------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Pairs of mixtures for the inverse."""

    chosen: np.ndarray
    """Numbers of mixtures, int64 [pairs, 2]: (s, t) gives a sample of the first label of s."""
    repeated: int
    """Pairs that repeat another pair."""


def pairs_to_mix(labels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` ordered pairs (i, j) of a device's samples whose labels differ: int64 [count, 2].

    Uniform over all such pairs, with replacement. ``labels`` are int64 [n]. Raises :class:`FedblendError` if all
    labels are the same.
    """
    order, sizes, starts = _by_label(labels)
    partners = len(labels) - sizes[labels]
    if not partners.any():
        raise FedblendError(
            f"a device with {len(labels)} samples of {np.count_nonzero(sizes)} label cannot mix samples of "
            "different labels; valid: devices with at least two labels"
        )
    first = rng.choice(len(labels), count, p=partners / partners.sum())
    # The r-th sample of another label, in order of label: skip the samples of the own label.
    own = labels[first]
    place = rng.integers(partners[first])
    place += np.where(place >= starts[own], sizes[own], 0)
    return np.stack([first, order[place]], axis=1)


def pairs_of_labels(labels: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A pair of samples for each wanted pair of labels (a, b): int64 [count, 2], each uniform within its label.

    ``labels`` int64 [n] are a device's. ``wanted`` int64 [count, 2] is of :func:`coordinate`; where it is -1 the pair
    is drawn as by :func:`pairs_to_mix`. Raises :class:`FedblendError` for labels of which the device has no samples.
    """
    order, sizes, starts = _by_label(labels, int(wanted.max(initial=0)) + 1)
    requested = wanted[wanted[:, 0] >= 0]
    if not sizes[requested].all():
        missing = sorted(set(requested[sizes[requested] == 0].tolist()))
        raise FedblendError(f"the server requested labels {missing} of a device that has no samples of them")
    chosen = np.empty((len(wanted), 2), np.int64)
    chosen[wanted[:, 0] >= 0] = order[starts[requested] + rng.integers(sizes[requested])]
    if len(requested) < len(wanted):
        chosen[wanted[:, 0] < 0] = pairs_to_mix(labels, len(wanted) - len(requested), rng)
    return chosen


def coordinate(held: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Label pairs that the server requests of devices, so that mixtures match: int64 [devices, count, 2].

    ``held`` bool [devices, classes] is true where a device has samples of a label. For each of ``count`` mixtures two
    labels are drawn, uniformly among the pairs that at least two devices hold. Of the devices that hold both labels, a
    random half mixes (a, b), the others (b, a). So every requested mixture has a partner on another device. -1 stands
    for no request, of a device without both labels. Raises :class:`FedblendError` if no two devices share two labels.
    """
    both = held.T.astype(np.int64) @ held.astype(np.int64)
    a, b = np.nonzero(np.triu(both >= 2, 1))
    if not len(a):
        raise FedblendError(
            f"no two of {len(held)} devices hold the same two labels, so that none of their mixtures can be paired; "
            "valid: a partition in which devices share labels"
        )
    drawn = rng.integers(len(a), size=count)
    a, b = a[drawn], b[drawn]
    holds_both = held[:, a] & held[:, b]
    # Devices in random order, those that hold both labels first; every second one swaps the labels.
    rank = np.argsort(np.argsort(np.where(holds_both, rng.random(holds_both.shape), 2.0), axis=0), axis=0)
    swapped = rank % 2 == rng.integers(2, size=count)
    requested = np.stack([np.where(swapped, b, a), np.where(swapped, a, b)], axis=2)
    return np.where(holds_both[:, :, None], requested, -1)


def mix(x: torch.Tensor, pairs: np.ndarray, lam: float) -> torch.Tensor:
    """Mixtures lambda x_i + (1 - lambda) x_j (equation 6): [count, ...] of samples x [n, ...], in floating point.

    ``pairs`` are int64 [count, 2]; ``lam`` in (0, 1), in the paper below 0.5.
    """
    x = x if x.is_floating_point() else x.float()
    return lam * x[torch.from_numpy(pairs[:, 0])] + (1 - lam) * x[torch.from_numpy(pairs[:, 1])]


# Inverse Mixup after collection -----------------------------------------------------------------------------


def inverse_ratio(lam: float) -> float:
    """lambda_hat of two mixtures for the target n = 1 (equations 9 and 10): lambda / (2 lambda - 1).

    Raises :class:`FedblendError` for lambda = 0.5 and outside [0, 1].

    >>> round(inverse_ratio(0.4), 12)
    -2.0
    """
    return float(_inverse_ratios(lam)[0])


def pair_across(labels: np.ndarray, owner: np.ndarray, count: int, rng: np.random.Generator) -> Pairs:
    """``count`` ordered pairs (s, t) of mixtures with symmetric labels on different devices.

    ``labels`` int64 [n, 2] are the mixtures' label pairs (a, b), ``owner`` int64 [n] their devices. If s has the labels
    (a, b), t has (b, a). Both (s, t) and (t, s) count: they are the targets n = 1 and n = 2 of one pair. Pairs are
    drawn without replacement. Where there are fewer than ``count``, all are used and the rest is drawn with
    replacement. Raises :class:`FedblendError` if there is no pair.
    """
    candidates = _Candidates(np.asarray(labels, np.int64), np.asarray(owner, np.int64))
    if not candidates.total:
        raise FedblendError(
            f"none of {len(owner)} mixtures of {len(np.unique(owner))} devices has a partner with the same two labels "
            "in reverse order on another device; valid: more samples of each device, or coordinated labels"
        )
    repeated = max(0, count - candidates.total)
    drawn = rng.choice(candidates.total, count - repeated, replace=False)
    again = rng.integers(candidates.total, size=repeated)
    return Pairs(candidates.at(np.concatenate([drawn, again])), repeated)


def unmix_pairs(mixed: torch.Tensor, labels: np.ndarray, pairs: Pairs, lam: float) -> tuple[torch.Tensor, np.ndarray]:
    """Inversely mixed samples of paired mixtures (equation 7), and their labels int64 [pairs].

    Pair (s, t) gives lambda_hat s + (1 - lambda_hat) t with the first label of s. Samples leave the range of pixels
    and are not clipped. Raises :class:`FedblendError` for lambda = 0.5.
    """
    first, second = (mixed[torch.from_numpy(rows)].double() for rows in pairs.chosen.T)
    weights = _inverse_ratios(lam)
    unmixed = weights[0] * first + weights[1] * second
    return unmixed.to(mixed.dtype), np.asarray(labels[pairs.chosen[:, 0], 0])


# Helpers ----------------------------------------------------------------------------------------------------


def _inverse_ratios(lam: float) -> list[float]:
    """lambda_hat and 1 - lambda_hat, which superpose the soft labels of two mixtures to one label (Proposition 1)."""
    if not 0 <= lam <= 1:
        raise FedblendError(f"lambda: {lam} is not valid: a number from 0 to 1")
    if abs(2 * lam - 1) < SINGULAR:
        raise FedblendError(f"lambda: mixing with the ratios {[lam, 1 - lam]} has no inverse; valid: other ones")
    weights: list[float] = np.linalg.solve([[lam, 1 - lam], [1 - lam, lam]], np.eye(2))[:, 0].tolist()
    return weights


def _by_label(labels: np.ndarray, classes: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Samples in order of label, and the size and start of each label, of at least ``classes`` labels."""
    sizes = np.bincount(labels, minlength=classes)
    return np.argsort(labels, kind="stable"), sizes, np.cumsum(sizes) - sizes


class _Candidates:
    """All pairs of :func:`pair_across`, numbered without listing them: mixtures are sorted by labels and device."""

    def __init__(self, labels: np.ndarray, owner: np.ndarray) -> None:
        classes, devices = int(labels.max(initial=0)) + 1, int(owner.max(initial=0)) + 1
        key = (labels[:, 0] * classes + labels[:, 1]) * devices + owner
        self.order = np.argsort(key, kind="stable")
        ordered = key[self.order]
        symmetric = (labels[:, 1] * classes + labels[:, 0]) * devices
        self.start = np.searchsorted(ordered, symmetric)
        # The device's own mixtures are in the middle of those with symmetric labels, and are skipped.
        self.own = np.searchsorted(ordered, symmetric + owner)
        self.own_size = np.searchsorted(ordered, symmetric + owner, side="right") - self.own
        partners = np.searchsorted(ordered, symmetric + devices) - self.start - self.own_size
        partners[labels[:, 0] == labels[:, 1]] = 0
        self.ends = np.cumsum(partners)
        self.before = self.ends - partners
        self.total = int(partners.sum())

    def at(self, numbers: np.ndarray) -> np.ndarray:
        """The pairs with these numbers, int64 [numbers, 2]."""
        s = np.searchsorted(self.ends, numbers, side="right")
        place = self.start[s] + numbers - self.before[s]
        place += np.where(place >= self.own[s], self.own_size[s], 0)
        return np.stack([s, self.order[place]], axis=1)
