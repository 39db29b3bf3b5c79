"""Seeds of the labels that a server with data of its own lacks: XOR-encoded (XorMixFL) or mixed up (MixFL)."""

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
from fedblend.core.sharing import ClientData, Payload, Pool, Request
from fedblend.methods.sharing.seeds import Seeds, short_labels
from fedblend.methods.sharing.xor import decode, draw_within, encode, shortages, superpose
from fedblend.methods.sharing.xor_kernels import WHITE

Label = Annotated[Int, Field(ge=0)]
Inside = Annotated[Float, Field(gt=0, lt=1)]


class Drawn(NamedTuple):
    """Which samples of a device make its seeds.

    ``labels`` int64 [n] are the seeds' target labels, ``hidden`` int64 [n, k] the labels of their k dummies;
    ``targets`` int64 [n, p] are the device's samples that are blended into a target, ``dummies`` those of each dummy
    (-1: none).
    """

    labels: np.ndarray
    hidden: np.ndarray
    targets: np.ndarray
    dummies: list[np.ndarray]


@part("sharing", "base-samples")
class BaseSamples(Seeds):
    """Nothing is shared: the server trains on data of its own, those of one client (XorMixFL's standalone learning)."""

    leaves_client = False

    server: Label = 0
    """The client that is the server, counted from 0."""

    def pool_beside(self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator) -> Pool:
        """The base samples x [n, ...] and their labels y int64 [n]."""
        return Pool({"x": base[0], "y": base[1]}, np.full(len(base[1]), self.server))


@dataclass(frozen=True)
class _TargetSeeds(Seeds):
    """Base of sharings in which one client is the server, and asks the others for samples of its target labels.

    For a target label it asks for as many as its commonest label has more (q = m - n: 190), equally many of each
    device. Each seed is a sample of the target label, hidden by one of a dummy label (section 3).
    """

    server: Label = 0
    """The client that is the server, counted from 0; its samples are the base samples."""
    targets: tuple[Label, ...] | None = None
    """The target labels; unless given, all of which the server holds fewer samples than of its commonest label."""
    dummies: Count | tuple[Label, ...] | None = None
    """The dummy labels, or how many there are, M: those of which the server holds most; unless given, all that are no
    target labels.
    """
    p: Count = 1
    """Samples of one label that are blended into one; 1 blends none, and alpha plays no part."""
    alpha: Inside = 0.5
    """Share that the blended sample keeps at each further one (equation 1)."""

    _decodes = True

    @pydantic.model_validator(mode="after")
    def _no_label_is_both(self) -> _TargetSeeds:
        if () in (self.targets, self.dummies):
            raise ValueError(f"{'targets' if self.targets == () else 'dummies'}: is empty; valid: at least one label")
        if isinstance(self.dummies, tuple) and (both := set(self.dummies) & set(self.targets or ())):
            raise ValueError(f"dummies: {min(both)} is a target label; valid: other labels")
        return self

    def requests(self, base: np.ndarray, classes: int, clients: Sequence[int]) -> dict[int, Request]:
        """Section 3: q samples of each target label, spread evenly over ``clients``; the first get what is left over.

        Raises :class:`FedblendError` for labels that there are not, and if the server could decode nothing.
        """
        if not np.issubdtype(base.dtype, np.integer):
            raise FedblendError(f"method.sharing: '{self.name}' asks for samples by label; these data have none")
        counts = np.bincount(base, minlength=classes)
        short = shortages(counts, self._targets(counts))
        dummies = self._dummies(counts)
        devices = len(clients)
        return {
            client: Request(short // devices + (place < short % devices), dummies)
            for place, client in enumerate(clients)
        }

    def _targets(self, counts: np.ndarray) -> np.ndarray:
        """The target labels, int64."""
        if self.targets is None:
            return np.flatnonzero(counts < counts.max())
        return self._known("targets", self.targets, len(counts))

    def _dummies(self, counts: np.ndarray) -> np.ndarray:
        """The dummy labels in order, int64; given their number, those of which the server has most."""
        if isinstance(self.dummies, tuple):
            chosen = self._known("dummies", self.dummies, len(counts))
        else:
            others = np.setdiff1d(np.arange(len(counts)), self._targets(counts))
            most = others[np.argsort(-counts[others], kind="stable")]
            if self.dummies is not None and self.dummies > len(most):
                raise FedblendError(f"method.sharing.dummies: {self.dummies} of {len(most)} labels that are no targets")
            chosen = np.sort(most[: self.dummies])
        if self._decodes and not counts[chosen].all():
            lacking = chosen[counts[chosen] == 0].tolist()
            raise FedblendError(
                f"method.sharing.dummies: the server (client {self.server}) holds no samples of {lacking}, with which "
                "it would have to decode; valid: labels that it holds, or another server"
            )
        return chosen

    def _known(self, field: str, labels: tuple[int, ...], classes: int) -> np.ndarray:
        if max(labels) >= classes:
            raise FedblendError(f"method.sharing.{field}: {list(labels)} is not valid: labels from 0 to {classes - 1}")
        return np.unique(np.array(labels, np.int64))

    def drawn(self, labels: np.ndarray, request: Request | None, rng: np.random.Generator) -> Drawn | None:
        """Which samples, of labels int64 [n], a device makes its seeds of (Algorithm 1); ``None`` if it makes none.

        It sends none of a target label that it does not hold, and none at all without a dummy.
        """
        if request is None:
            return None
        held = np.bincount(labels, minlength=len(request.wanted))
        wanted = np.repeat(np.arange(len(held)), np.where(held > 0, request.wanted, 0))
        hidden = self._hidden(request.dummies, held, len(wanted), rng)
        if not len(wanted) or hidden is None:
            return None
        targets = draw_within(labels, wanted, self.p, rng)
        return Drawn(wanted, hidden, targets, [draw_within(labels, one, self.p, rng) for one in hidden.T])

    def _hidden(self, dummies: np.ndarray, held: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray | None:
        """The dummy labels of each seed int64 [count, k]: one, drawn from those that the device holds."""
        own = dummies[held[dummies] > 0]
        return own[rng.integers(len(own), size=(count, 1))] if len(own) else None

    def share(self, local: ClientData) -> Payload | None:
        """Seeds uint8 [n, ...], their target labels ``y`` [n] and their dummies' labels [n, k].

        Raises :class:`FedblendError` for data that are not stored in 8 bits.
        """
        if local.x.dtype != torch.uint8:
            kind = str(local.x.dtype).removeprefix("torch.")
            raise FedblendError(f"method.sharing: '{self.name}' works on pixels of 8 bits; these data are {kind}")
        drawn = self.drawn(local.y.numpy(), local.request, local.rng)
        if drawn is None:
            return None
        labels, hidden = (
            short_labels(torch.from_numpy(part), local.task.outputs) for part in (drawn.labels, drawn.hidden)
        )
        return {"seeds": self.made(local.x, drawn, local.rng), "y": labels, "dummies": hidden}

    def made(self, x: torch.Tensor, drawn: Drawn, rng: np.random.Generator) -> torch.Tensor:
        """At a device: the seeds, uint8 [n, ...]."""
        raise TypeError(f"{type(self).__name__} defines no made")

    def _levelling(self, entries: Pool, base: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Rows of the entries that level the server's labels: int64, q of each target label.

        Each entry that came is used once; where fewer came than were asked for, some are used again, and no label of
        which none came.
        """
        came = entries.tensors["y"].numpy().astype(np.int64)
        labels = np.unique(came)
        short = shortages(np.bincount(base, minlength=int(labels.max()) + 1), labels)
        return np.concatenate([np.resize(rng.permutation(np.flatnonzero(came == n)), short[n]) for n in labels])


@part("sharing", "xor-seeds")
class XorSeeds(_TargetSeeds):
    """XorMixFL's seeds: samples encoded by the XOR with a dummy, decoded at the server with its own (equations 2, 3).

    Once. What travels of a seed is the encoded sample, its label, and its dummy's label, which the server needs to
    decode. It is no encryption: where the dummy's pixel is 0, as most are in drawings on black, the target's pixel
    travels in clear; `fedblend privacy xor` measures how much that is. A device without samples of a target label sends
    none of it, and the server then decodes what it has more than once, each time with another sample of its own
    (Algorithm 2).
    """

    offset: Annotated[Int, Field(ge=0, le=WHITE)] = 0
    """Against that leak: every dummy pixel is raised by a random number of grey levels from 0 to this, which nobody is
    told, so that no dummy pixel is constant; it stays in what the server decodes, as noise.
    """

    def made(self, x: torch.Tensor, drawn: Drawn, rng: np.random.Generator) -> torch.Tensor:
        """Encoded samples (equation 2)."""
        return encode(x, drawn.targets, drawn.dummies[0], self.alpha, self.noise(x, len(drawn.labels), rng))

    def noise(self, x: torch.Tensor, count: int, rng: np.random.Generator) -> torch.Tensor | None:
        """What is added to ``count`` dummies: uint8 [count, ...] from 0 to ``offset``; ``None`` without."""
        if not self.offset:
            return None
        shape = (count, *x.shape[1:])
        return torch.from_numpy(rng.integers(0, self.offset, shape, np.uint8, endpoint=True))

    def pool_beside(self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator) -> Pool:
        """The server's samples and the decoded ones (equation 3): x uint8 [n, ...], y int64 [n], as many of each label.

        Decoded samples have the owner -1.
        """
        x, y = base
        if not len(entries):
            return Pool({"x": x, "y": y}, np.full(len(y), self.server))
        rows, decoded, _ = self.levelled(entries, base, rng)
        labels = entries.tensors["y"][rows].long()
        owner = np.concatenate([np.full(len(y), self.server), np.full(len(rows), -1)])
        return Pool({"x": torch.cat([x, decoded]), "y": torch.cat([y, labels])}, owner)

    def levelled(
        self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator
    ) -> tuple[np.ndarray, torch.Tensor, np.ndarray]:
        """What levels the server's labels: rows of the entries int64 [n], and of these what :meth:`decoded` tells."""
        rows = self._levelling(entries, base[1].numpy(), rng)
        chosen = Pool({name: t[rows] for name, t in entries.tensors.items()}, entries.owner[rows])
        return rows, *self.decoded(chosen, base, rng)

    def decoded(
        self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Each entry decoded once, uint8 [n, ...], and with which of the server's samples, int64 [n, p] (-1: none)."""
        x, y = base
        hidden = entries.tensors["dummies"][:, 0].numpy().astype(np.int64)
        dummies = draw_within(y.numpy(), hidden, self.p, rng)
        return decode(entries.tensors["seeds"], x, dummies, self.alpha), dummies


@part("sharing", "mixed-target-seeds")
class MixedTargetSeeds(_TargetSeeds):
    """MixFL's seeds: samples of target labels mixed up with dummies, used as they are with soft labels (section 1).

    Once. What travels of a seed is the mixture, rounded to 8 bits, its label, and its dummies' labels. A server needs
    no samples of a dummy label.
    """

    lam: Inside | None = None
    """Share of the target; unless given, as much as of each dummy: 0.5 with one."""
    equal_parts: bool = False
    """Mix the target with one sample of each of the M dummy labels, not of one of them; a device that lacks one of
    these labels sends nothing.
    """

    _decodes = False

    def shares(self, dummies: int) -> list[float]:
        """Shares of the target and of each of its dummies, with the sum 1."""
        own = 1 / (1 + dummies) if self.lam is None else self.lam
        return [own, *[(1 - own) / dummies] * dummies]

    def _hidden(self, dummies: np.ndarray, held: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray | None:
        """One dummy label, or all of them."""
        if not self.equal_parts:
            return super()._hidden(dummies, held, count, rng)
        return np.tile(dummies, (count, 1)) if held[dummies].all() else None

    def made(self, x: torch.Tensor, drawn: Drawn, rng: np.random.Generator) -> torch.Tensor:
        """Mixtures."""
        return superpose(x, [drawn.targets, *drawn.dummies], self.shares(len(drawn.dummies)), self.alpha)

    def pool_beside(self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator) -> Pool:
        """The server's samples and the mixtures: x uint8 [n, ...], y float [n, C], up to the largest label C - 1."""
        x, y = base
        if not len(entries):
            return Pool({"x": x, "y": y}, np.full(len(y), self.server))
        rows = torch.from_numpy(self._levelling(entries, y.numpy(), rng))
        own, hidden = (entries.tensors[name][rows].long() for name in ("y", "dummies"))
        classes = 1 + int(max(part.max() for part in (y, own, hidden) if len(part)))
        shares = self.shares(hidden.shape[1])
        soft = shares[0] * F.one_hot(own, classes).float() + shares[1] * F.one_hot(hidden, classes).sum(1).float()
        owner = np.concatenate([np.full(len(y), self.server), entries.owner[rows.numpy()]])
        labels = torch.cat([F.one_hot(y, classes).float(), soft])
        return Pool({"x": torch.cat([x, entries.tensors["seeds"][rows]]), "y": labels}, owner)
