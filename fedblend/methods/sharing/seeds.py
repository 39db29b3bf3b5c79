"""Seed samples for the server: raw, mixed up at devices, and inversely mixed up at the server (Mix2FLD)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, Sharing
from fedblend.methods.sharing.inverse import (
    coordinate,
    inverse_ratio,
    mix,
    pair_across,
    pairs_of_labels,
    pairs_to_mix,
    unmix_pairs,
)

PIXELS = 255
BYTE = 256


def short_labels(labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Labels in as few bytes as hold them all."""
    return labels.to(torch.uint8 if classes <= BYTE else torch.int32)


class Seeds(Sharing):
    """Base of sharings whose samples stay at the server."""

    bytes_kind = "seeds"
    for_server = True

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Anyone who holds samples can share."""


@part("sharing", "raw-seeds")
class RawSeeds(Seeds):
    """FLD's seeds: every device sends raw samples, once (Mix2FLD, section III-A). It breaks privacy.

    Entries are x [n, ...] and y [n, C], on the model's input scale at the server; as stored on the way.
    """

    unsafe = True
    bytes_kind = "raw"

    samples: Count = 10
    """Samples that each device sends, N_S; all it has, if that is fewer."""

    def share(self, local: ClientData) -> Payload | None:
        """Samples as stored, drawn without replacement, and their labels int64 [n]."""
        if not len(local.y):
            return None
        rows = torch.from_numpy(np.sort(local.rng.permutation(len(local.y))[: self.samples]))
        return {"x": local.x[rows], "y": short_labels(local.y[rows], local.task.outputs)}


@part("sharing", "mixed-seeds")
class MixedSeeds(Seeds):
    """MixFLD's and Mix2FLD's seeds: every device mixes pairs of its samples with different labels, once (equation 6).

    What travels of a seed is the mixture lambda x_i + (1 - lambda) x_j, rounded to the type that pixels are stored in
    (6,272 bits for one of MNIST), and its two labels. With ``inverse`` the server pairs mixtures of labels (a, b) and
    (b, a) across devices and superposes them so that labels come back hard (Proposition 1); those samples leave the
    range of pixels, and are not clipped. A device whose samples have one label only sends nothing.

    Labels that devices draw at random seldom match where there are many: of 100 classes one in 9,900 pairs is another's
    the other way round. With ``coordinated`` the server asks devices which labels they hold, and then each for certain
    pairs of labels, so that every mixture has a partner; devices thereby tell it their labels. What is asked, a few
    bytes, is not counted. It is not for devices at real sites, whose labels nobody here knows.
    """

    samples: Count = 10
    """Mixtures that each device sends, N_S."""
    lam: Annotated[Float, Field(gt=0, lt=1)] = 0.1
    """Share of the first sample, lambda; 0.5 cannot be undone."""
    inverse: bool = True
    """Mix inversely at the server (Mix2FLD), or use mixtures with their soft labels (MixFLD)."""
    generated: Count | None = None
    """Samples that the server makes for each device, N_I; unless given, as many as it got."""
    coordinated: bool = False
    """Let the server ask devices for matching pairs of labels, or let each draw its own."""

    @pydantic.model_validator(mode="after")
    def _can_be_undone(self) -> MixedSeeds:
        if self.inverse:
            inverse_ratio(self.lam)
        return self

    def share(self, local: ClientData) -> Payload | None:
        """Mixtures x [n, ...] in the type of the samples, their two labels y int64 [n, 2]."""
        labels = local.y.numpy().astype(np.int64)
        if len(np.unique(labels)) < 2:
            return None
        if self.coordinated:
            if local.request is None:
                raise FedblendError(
                    "method.sharing.coordinated: true, but this device was asked for no labels; valid: false where "
                    "devices are real sites"
                )
            pairs = pairs_of_labels(labels, local.request.pairs, local.rng)
        else:
            pairs = pairs_to_mix(labels, self.samples, local.rng)
        mixed = mix(local.x, pairs, self.lam)
        if not local.x.is_floating_point():
            mixed = mixed.round().clamp(0, PIXELS).to(local.x.dtype)
        return {"x": mixed, "y": short_labels(torch.from_numpy(labels[pairs]), local.task.outputs)}

    def requests_by_labels(self, held: np.ndarray, rng: np.random.Generator) -> dict[int, Request]:
        """Matching pairs of labels for all devices. Raises :class:`FedblendError` if no two share two labels."""
        nothing = np.empty(0, np.int64)
        asked = coordinate(held, self.samples, rng)
        return {device: Request(nothing, nothing, pairs) for device, pairs in enumerate(asked)}

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """Samples x on the scale they are stored in, in float, and labels: y int64 [n], or soft ones float [n, C].

        C is then one more than the largest label that came. Empty where no mixture has a partner on another device.
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
        made, of = unmix_pairs(x, labels, pairs, self.lam)
        return Pool({"x": made, "y": torch.from_numpy(of)}, np.full(len(of), -1))

    def _soft(self, labels: torch.Tensor) -> torch.Tensor:
        """Soft labels {a: lambda, b: 1 - lambda} of mixtures with labels (a, b)."""
        one_hot = F.one_hot(labels).float()
        return self.lam * one_hot[:, 0] + (1 - self.lam) * one_hot[:, 1]
