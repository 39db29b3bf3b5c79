"""Seed samples for the server (Mix2FLD): raw, mixed at the devices, or also inversely mixed at the server."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, ServerSide, Sharing, SharingPlan
from fedblend.methods.requirements import require_classes, require_numbers
from fedblend.methods.sharing.inverse_mixup import (
    coordinate,
    inverse_ratio,
    mix,
    pair_across,
    pairs_of_labels,
    pairs_to_mix,
    unmix_pairs,
)


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
