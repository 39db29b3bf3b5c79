"""Seeds of the labels that the server's own data lack: XOR-encoded (XorMixFL) or mixed (MixFL)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import numpy as np
import pydantic
import torch
from pydantic import Field
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, Int, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, ServerSide, SharingPlan
from fedblend.data.scale import Scaler
from fedblend.methods.requirements import refusal
from fedblend.methods.sharing.seeds import Seeds, compact_labels
from fedblend.methods.sharing.xor import WHITE, decode, draw_within, encode, shortages, superpose

Label = Annotated[Int, Field(ge=0)]
OpenFraction = Annotated[Float, Field(gt=0, lt=1)]


class SeedRecipe(NamedTuple):
    """The samples of a device that its n seeds are made of; -1 fills rows of sample numbers."""

    labels: np.ndarray
    """Target label of each seed, int64 [n]."""
    dummy_labels: np.ndarray
    """Labels of the k dummies of each seed, int64 [n, k]."""
    targets: np.ndarray
    """Samples that are blended into each target, int64 [n, p]."""
    dummies: list[np.ndarray]
    """Samples that are blended into each dummy, k arrays int64 [n, p]."""


@part("sharing", "base-samples")
class BaseSamples(Seeds):
    """Share nothing; the server trains on its own data, those of one client (XorMixFL's standalone learning)."""

    plan = SharingPlan("seeds", to="nobody")
    numeric_inputs = False

    server: Label = 0
    """The client that acts as the server, counted from 0."""

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """The base samples x [n, ...] and their labels y int64 [n]."""
        assert server.base is not None
        x, y = server.base
        return Pool({"x": x, "y": y}, np.full(len(y), self.server))


@dataclass(frozen=True)
class _TargetSeeds(Seeds):
    """Base of sharings in which one client acts as the server and requests samples of its target labels.

    For each target label the server requests q = m - n samples (190 in the paper): m samples of its commonest label
    less n of the target label. It requests equally many of each device. Each seed is a sample of the target label,
    combined with a sample of a dummy label (section 3).
    """

    server: Label = 0
    """The client that acts as the server, counted from 0; its samples are the base samples."""
    targets: tuple[Label, ...] | None = None
    """The target labels (default: all labels of which the server has fewer samples than of its commonest label)."""
    dummies: Count | tuple[Label, ...] | None = None
    """The dummy labels, or their number M, for the M labels of which the server has most samples (default: all labels
    that are no target labels).
    """
    p: Count = 1
    """Samples of one label that are blended into one; 1 blends none, and alpha has no effect."""
    alpha: OpenFraction = 0.5
    """Share that the blend keeps when a further sample is blended in (equation 1)."""

    _decodes = True
    if_empty = (
        "choose another server, targets or dummies: a client makes seeds of a target label and a dummy label that it "
        "holds both"
    )

    @pydantic.model_validator(mode="after")
    def _no_label_is_both(self) -> _TargetSeeds:
        if () in (self.targets, self.dummies):
            raise ValueError(f"{'targets' if self.targets == () else 'dummies'}: is empty; valid: at least one label")
        if isinstance(self.dummies, tuple) and (both := set(self.dummies) & set(self.targets or ())):
            raise ValueError(f"dummies: {min(both)} is a target label; valid: other labels")
        return self

    def requests(self, server: ServerSide) -> dict[int, Request]:
        assert server.base is not None
        others = server.clients[server.clients != self.server].tolist()
        return self.spread(server.base[1].numpy(), server.spec.task.outputs, others)

    def spread(self, base: np.ndarray, classes: int, clients: Sequence[int]) -> dict[int, Request]:
        """Request q samples of each target label, spread evenly over ``clients``; the first ones get the remainder.

        ``base`` int64 [n] are the server's labels (section 3). Raises :class:`FedblendError` for labels that do not
        exist, and for dummy labels that the server cannot decode.
        """
        if not np.issubdtype(base.dtype, np.integer):
            raise refusal(self, "requests samples by label, but these data have no labels", "data with classes")
        counts = np.bincount(base, minlength=classes)
        short = shortages(counts, self._targets(counts))
        dummies = self._dummies(counts)
        devices = len(clients)
        return {
            client: Request(short // devices + (place < short % devices), dummies)
            for place, client in enumerate(clients)
        }

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return 0 if request is None else int(request.wanted.sum())

    def _targets(self, counts: np.ndarray) -> np.ndarray:
        if self.targets is None:
            return np.flatnonzero(counts < counts.max())
        return self._checked_labels("targets", self.targets, len(counts))

    def _dummies(self, counts: np.ndarray) -> np.ndarray:
        """The dummy labels in ascending order, int64."""
        if isinstance(self.dummies, tuple):
            chosen = self._checked_labels("dummies", self.dummies, len(counts))
        else:
            candidates = np.setdiff1d(np.arange(len(counts)), self._targets(counts))
            by_count = candidates[np.argsort(-counts[candidates], kind="stable")]
            if self.dummies is not None and self.dummies > len(by_count):
                raise FedblendError(
                    f"method.sharing.dummies: {self.dummies} is more than the {len(by_count)} labels that are no "
                    f"targets; valid: 1 to {len(by_count)}"
                )
            chosen = np.sort(by_count[: self.dummies])
        if self._decodes and not counts[chosen].all():
            missing = chosen[counts[chosen] == 0].tolist()
            raise FedblendError(
                f"method.sharing.dummies: the server (client {self.server}) has no samples of {missing} to decode "
                "with; valid: labels of which the server has samples, or another server"
            )
        return chosen

    def _checked_labels(self, field: str, labels: tuple[int, ...], classes: int) -> np.ndarray:
        if max(labels) >= classes:
            raise FedblendError(f"method.sharing.{field}: {list(labels)} is not valid: labels from 0 to {classes - 1}")
        return np.unique(np.array(labels, np.int64))

    def draw_recipe(self, labels: np.ndarray, request: Request | None, rng: np.random.Generator) -> SeedRecipe | None:
        """Draw the samples that a device with the labels int64 [n] makes its seeds of (Algorithm 1).

        The device makes no seeds of a target label of which it has no samples. ``None`` where it makes no seeds: it got
        no request, or has no samples of a target label, or none of a dummy label.
        """
        if request is None:
            return None
        counts = np.bincount(labels, minlength=len(request.wanted))
        wanted = np.repeat(np.arange(len(counts)), np.where(counts > 0, request.wanted, 0))
        dummy_labels = self._draw_dummy_labels(request.dummies, counts, len(wanted), rng)
        if not len(wanted) or dummy_labels is None:
            return None
        targets = draw_within(labels, wanted, self.p, rng)
        dummies = [draw_within(labels, column, self.p, rng) for column in dummy_labels.T]
        return SeedRecipe(wanted, dummy_labels, targets, dummies)

    def _draw_dummy_labels(
        self, dummies: np.ndarray, counts: np.ndarray, seeds: int, rng: np.random.Generator
    ) -> np.ndarray | None:
        """One dummy label for each seed, int64 [seeds, 1], of those that the device has; ``None`` if it has none."""
        own = dummies[counts[dummies] > 0]
        return own[rng.integers(len(own), size=(seeds, 1))] if len(own) else None

    def share(self, local: ClientData) -> Payload | None:
        """Seeds uint8 [n, ...], their target labels ``y`` [n] and their dummies' labels [n, k].

        Raises :class:`FedblendError` for data that are not stored in 8 bits, and for text.
        """
        if local.x.dtype != torch.uint8 or not isinstance(local.scale, Scaler):
            kind = str(local.x.dtype).removeprefix("torch.") if isinstance(local.scale, Scaler) else "text"
            raise refusal(self, f"needs 8-bit pixels (uint8); these data are {kind}", "images")
        recipe = self.draw_recipe(local.y.numpy(), local.request, local.rng)
        if recipe is None:
            return None
        labels, dummy_labels = (
            compact_labels(torch.from_numpy(labels), local.task.outputs)
            for labels in (recipe.labels, recipe.dummy_labels)
        )
        return {"seeds": self.make_seeds(local.x, recipe, local.rng), "y": labels, "dummies": dummy_labels}

    def make_seeds(self, x: torch.Tensor, recipe: SeedRecipe, rng: np.random.Generator) -> torch.Tensor:
        """At a device: make the seeds, uint8 [n, ...], of its samples ``x``."""
        raise TypeError(f"{type(self).__name__} defines no make_seeds")

    def _balancing_rows(self, entries: Pool, base: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Rows of the entries that balance the server's labels ``base``: int64, q of each target label.

        Each entry is used once. Where fewer entries arrived than were requested, some are used again. A label without
        entries gets none.
        """
        received = entries.tensors["y"].numpy().astype(np.int64)
        labels = np.unique(received)
        short = shortages(np.bincount(base, minlength=int(labels.max()) + 1), labels)
        return np.concatenate([np.resize(rng.permutation(np.flatnonzero(received == n)), short[n]) for n in labels])


@part("sharing", "xor-seeds")
class XorSeeds(_TargetSeeds):
    """Encode samples by the XOR with a dummy; the server decodes them with its own dummies (XorMixFL, equations 2, 3).

    Devices share once. A device sends the encoded sample, its label, and its dummy's label, which the server needs to
    decode. The XOR is no encryption. Where the dummy's pixel is 0, as most pixels of drawings on black are, the
    target's pixel is sent in clear; `fedblend paper xor` measures the share of such pixels. A device sends no seeds
    of a target label of which it has no samples. The server then decodes other seeds of that label more than once, each
    time with another dummy (Algorithm 2).
    """

    offset: Annotated[Int, Field(ge=0, le=WHITE)] = 0
    """Most grey levels that are added to each dummy pixel, against that leak. Each pixel gets a random number of levels
    from 0 to this, which only the device knows; it remains as noise in the decoded sample.
    """

    def make_seeds(self, x: torch.Tensor, recipe: SeedRecipe, rng: np.random.Generator) -> torch.Tensor:
        noise = self.dummy_noise(x, len(recipe.labels), rng)
        return encode(x, recipe.targets, recipe.dummies[0], self.alpha, noise)

    def dummy_noise(self, x: torch.Tensor, count: int, rng: np.random.Generator) -> torch.Tensor | None:
        """Noise for ``count`` dummies: uint8 [count, ...] from 0 to ``offset``; ``None`` if that is 0."""
        if not self.offset:
            return None
        shape = (count, *x.shape[1:])
        return torch.from_numpy(rng.integers(0, self.offset, shape, np.uint8, endpoint=True))

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """The server's samples and decoded ones (equation 3), balanced by label: x uint8 [n, ...], y int64 [n].

        Decoded samples have the owner -1.
        """
        assert server.base is not None
        x, y = server.base
        if not len(entries):
            return Pool({"x": x, "y": y}, np.full(len(y), self.server))
        rows, decoded, _ = self.balance(entries, server.base, server.rng)
        labels = entries.tensors["y"][rows].long()
        owner = np.concatenate([np.full(len(y), self.server), np.full(len(rows), -1)])
        return Pool({"x": torch.cat([x, decoded]), "y": torch.cat([y, labels])}, owner)

    def balance(
        self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator
    ) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
        """The rows of the entries int64 [n] that balance the server's labels, and :meth:`decode_entries` of them."""
        rows = self._balancing_rows(entries, base[1].numpy(), rng)
        chosen = Pool({name: t[rows] for name, t in entries.tensors.items()}, entries.owner[rows])
        return rows, *self.decode_entries(chosen, base, rng)

    def decode_entries(
        self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Decode each entry once: samples uint8 [n, ...], and the server's samples used, int64 [n, p] (-1: none)."""
        x, y = base
        dummy_labels = entries.tensors["dummies"][:, 0].numpy().astype(np.int64)
        dummies = draw_within(y.numpy(), dummy_labels, self.p, rng)
        return decode(entries.tensors["seeds"], x, dummies, self.alpha), dummies


@part("sharing", "mixed-target-seeds")
class MixedTargetSeeds(_TargetSeeds):
    """Mix samples of target labels with dummies; the server uses the mixtures with soft labels (MixFL, section 1).

    Devices share once. A device sends the mixture, rounded to 8 bits, its label, and its dummies' labels. The server
    needs no samples of the dummy labels.
    """

    lam: OpenFraction | None = None
    """Share of the target (default: the same as of each dummy, so 0.5 with one dummy)."""
    equal_parts: bool = False
    """Mix the target with one sample of each of the M dummy labels, instead of with one sample of one dummy label. A
    device that lacks one of these labels sends nothing.
    """

    _decodes = False

    def shares(self, dummies: int) -> list[float]:
        """Shares of the target and of each of its dummies, with the sum 1."""
        target = 1 / (1 + dummies) if self.lam is None else self.lam
        return [target, *[(1 - target) / dummies] * dummies]

    def _draw_dummy_labels(
        self, dummies: np.ndarray, counts: np.ndarray, seeds: int, rng: np.random.Generator
    ) -> np.ndarray | None:
        """One dummy label for each seed, or with ``equal_parts`` all of them, int64 [seeds, M]."""
        if not self.equal_parts:
            return super()._draw_dummy_labels(dummies, counts, seeds, rng)
        return np.tile(dummies, (seeds, 1)) if counts[dummies].all() else None

    def make_seeds(self, x: torch.Tensor, recipe: SeedRecipe, rng: np.random.Generator) -> torch.Tensor:
        return superpose(x, [recipe.targets, *recipe.dummies], self.shares(len(recipe.dummies)), self.alpha)

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """The server's samples and the mixtures: x uint8 [n, ...], y float [n, C]; the largest label is C - 1."""
        assert server.base is not None
        x, y = server.base
        if not len(entries):
            return Pool({"x": x, "y": y}, np.full(len(y), self.server))
        rows = torch.from_numpy(self._balancing_rows(entries, y.numpy(), server.rng))
        target, dummies = (entries.tensors[name][rows].long() for name in ("y", "dummies"))
        classes = 1 + int(max(labels.max() for labels in (y, target, dummies) if len(labels)))
        shares = self.shares(dummies.shape[1])
        soft = shares[0] * F.one_hot(target, classes).float() + shares[1] * F.one_hot(dummies, classes).sum(1).float()
        owner = np.concatenate([np.full(len(y), self.server), entries.owner[rows.numpy()]])
        labels = torch.cat([F.one_hot(y, classes).float(), soft])
        return Pool({"x": torch.cat([x, entries.tensors["seeds"][rows]]), "y": labels}, owner)
