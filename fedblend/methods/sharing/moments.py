"""Counts, sums and second moments of features by class: heads in closed form need nothing else of a client."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from fedblend.core.context import ModelSpec, Scale
from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism
from fedblend.core.registry import Count, Int, NonNegative, Positive, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, ServerSide, Sharing, SharingPlan
from fedblend.methods.requirements import fault_of_form, require_held
from fedblend.methods.sharing.features import features_of, width_of
from fedblend.methods.sharing.means import WHOLE, MaskedSums

CHUNK = 1024  # samples whose features are computed at a time
SENSITIVITY = 2.0  # Largest change of all scaled sums together, in the L2 norm, where one sample is replaced by another


def projection(width: int, to: int) -> torch.Tensor:
    """The fixed random matrix [width, to] with orthonormal columns, float64, that all clients and the server share."""
    return torch.linalg.qr(torch.from_numpy(np.random.default_rng(0).standard_normal((width, to))))[0]


def unpacked(grams: torch.Tensor) -> torch.Tensor:
    """The sum, float64 [d, d], of second moments whose upper triangles are the rows of ``grams``."""
    upper = grams.double().sum(0)
    width = math.isqrt(2 * len(upper))
    row, column = torch.triu_indices(width, width)
    whole = upper.new_zeros(width, width)
    whole[row, column] = whole[column, row] = upper
    return whole


@part("sharing", "moments")
class Moments(Sharing):
    """Share sums of features f, the inputs of the model's last layer, once (Fed3R, Fanì et al. 2024).

    A client sends S_c = sum of (f, 1) over its samples of class c, in float32 [C, d + 1], whose last column holds the
    counts, and G = sum of f f^T over all its samples, of which the upper triangle is sent. Sums over clients do not
    depend on who holds which sample. G takes 2 d (d + 1) bytes, S 4 C (d + 1): with d = 1280 and ten classes these are
    3.3 MB and 51 kB. All clients that hold samples receive the model for it. The server step `closed-head` reads them.

    The sum of one sample is its feature vector, and features can be inverted. G of n < d samples gives their features
    up to a rotation, and exactly where these are not negative: treat the G of one client as its features, and prefer
    `secure-moments`. Classes of fewer samples than `min_samples`, or than `policy.min_mean`, are left out, in G too.

    With `multiplier` each sum gets Gaussian noise. Features are scaled to at most the length `clip`, so that all of
    z z^T and z by class, of z = (f / clip, 1) / sqrt(2), change by at most 2 where one sample replaces another: their
    squared change is |z|^4 + |z'|^4 - 2 (z z')^2 + |z|^2 + |z'|^2 - 2 [y = y'] z z' <= 4, because 0 <= z z' <= 1. Then
    no class is left out, since counts get noise, too.
    """

    bytes_kind = "statistics"
    plan = SharingPlan("sums", to="server", sees_model=True)
    made_of = "label"
    if_empty = "let clients hold more samples of a class, or lower min_samples and policy.min_mean: {min_mean}"

    gram: Literal["shared", "none"] = "shared"
    """One second moment over all classes, or none (nearest class means, FedCOF)."""
    project: Count | None = None
    """Width that features are projected to, by a fixed random matrix with orthonormal columns (default: no change)."""
    parts: Count = 1
    """Random parts of a client's samples, each with sums of its own; FedCOF needs several where clients are few."""
    min_samples: Count = 2
    """Fewest samples of a class in a sum."""
    clip: Positive | None = None
    """Largest length of a feature vector; longer ones are scaled down to it."""
    multiplier: NonNegative = 0.0
    """Standard deviation of the noise over the sensitivity."""

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` for noise without a bound, and if no client has enough samples."""
        if self.multiplier and self.clip is None:
            raise FedblendError(
                f"method.sharing.multiplier: {self.multiplier:g} needs a largest length of features; valid: a number "
                "for method.sharing.clip, such as their usual length on public data"
            )
        require_held(sizes, {"method.sharing.min_samples": self.min_samples, "policy.min_mean": minimum})

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return self.parts

    @torch.no_grad()
    def share(self, local: ClientData) -> Payload | None:
        """Sums "sums" [parts, C, d + 1] and packed second moments "gram" [parts, d (d + 1) / 2], float32."""
        part_of, is_used = self._parts(local)
        if not is_used.any():
            return None
        assert local.model is not None
        f = self.features(local.model, local.scale, local.x)
        width, classes = f.shape[1], local.task.outputs
        upper = torch.triu_indices(width, width).unbind()
        sums, grams = torch.zeros(self.parts, classes, width + 1, dtype=torch.float64), []
        whole = torch.cat([f, f.new_ones(len(f), 1)], 1)
        for number in range(self.parts):
            rows = torch.from_numpy(is_used & (part_of == number))
            sums[number].index_add_(0, local.y[rows], whole[rows])
            if self.gram == "shared":
                grams.append(f[rows].T @ f[rows])
        if self.multiplier and self.clip is not None:
            deviation = SENSITIVITY * self.multiplier
            draw = lambda shape: torch.from_numpy(local.rng.standard_normal(shape))  # noqa: E731
            noise = math.sqrt(2) * deviation * draw(sums.shape)
            noise[..., :width] *= self.clip
            sums += noise
            for number, gram in enumerate(grams):
                drawn = 2 * self.clip**2 * deviation * draw(gram.shape)
                grams[number] = gram + (drawn + drawn.T) / 2
        return {"sums": sums.float()} | ({"gram": torch.stack(grams)[:, upper[0], upper[1]].float()} if grams else {})

    @torch.no_grad()
    def features(self, model: nn.Module, scale: Scale, x: torch.Tensor) -> torch.Tensor:
        """Features of stored samples, projected and clipped, float64 [n, d]."""
        f = features_of(model, scale, x, CHUNK)
        if self.project is not None:
            f = f @ projection(f.shape[1], self.project)
        return f if self.clip is None else f * (self.clip / f.norm(dim=1, keepdim=True)).clamp(max=1)

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """All entries, with the standard deviation of the noise on their second moments, "noise" [entries]."""
        if not self.multiplier or self.clip is None:
            return entries
        noise = torch.full((len(entries),), 2 * self.clip**2 * SENSITIVITY * self.multiplier)
        return Pool({**entries.tensors, "noise": noise}, entries.owner)

    def used(self, local: ClientData) -> np.ndarray:
        return self._parts(local)[1]

    def _parts(self, local: ClientData) -> tuple[np.ndarray, np.ndarray]:
        """The part of each sample, and whether its class has enough samples in that part."""
        y, least = local.y.numpy(), max(self.min_samples, local.minimum)
        part_of = local.rng.permutation(len(y)) % self.parts if self.parts > 1 else np.zeros(len(y), np.int64)
        if self.multiplier:
            return part_of, np.full(len(y), len(y) >= least)
        key = part_of * (local.task.outputs + 1) + y
        return part_of, np.bincount(key, minlength=1)[key] >= least if len(y) else np.zeros(0, bool)

    def fault(self, payload: Payload, samples: int, spec: ModelSpec) -> str | None:
        """Why sums are not those of ``samples`` samples in the model's classes and features, or ``None``."""
        form = {name: (*shape, torch.float32) for name, shape in self.form(spec).items()}
        if fault := fault_of_form(payload, form):
            return fault
        counts = payload["sums"][..., -1]
        if not self.multiplier and not (bool((counts >= 0).all()) and counts.sum() <= samples):
            return f"'sums' has counts that are not of {samples} samples"
        return None

    def form(self, spec: ModelSpec) -> dict[str, tuple[int, ...]]:
        """The shapes of a client's tensors."""
        width = self.project or width_of(spec.model)
        sums = {"sums": (self.parts, spec.task.outputs, width + 1)}
        return sums | ({"gram": (self.parts, width * (width + 1) // 2)} if self.gram == "shared" else {})

    def mechanism(self) -> Mechanism | str:
        """The noise on all sums together, one Gaussian release; clients' sizes are public."""
        if not self.multiplier:
            return "sums of features get no noise (method.sharing.multiplier)"
        return Mechanism("gaussian", self.multiplier, at_server=False)


@part("sharing", "secure-moments")
class SecureMoments(MaskedSums):
    """Share sums of features, as `moments`, of which the server learns the sum over all clients only.

    Numbers are encoded in integer steps of ``range`` * ``clients`` / 2^31, so that over Flower they can be added under
    masks (Bonawitz et al. 2017); other engines compute the same sums without masks. The features are those of the model
    as every site builds it. A class that one client alone holds is not hidden by others, and whoever knows the sum
    without a client learns that client's. With ``multiplier`` the noise of all clients together has the deviation that
    `moments` has at each: a client adds 1 / ``noise_over`` of its variance, and a sum of fewer clients than
    ``noise_over`` is not made.
    """

    bytes_kind = "statistics"
    plan = SharingPlan("sums", who="groups", to="server")
    made_of = "label"

    fewest: Annotated[Int, Field(ge=2)] = 3
    """Fewest clients whose sum the server may learn; more than half must share in any case."""
    range: Positive = 2.0**20
    """Largest number in a client's sums."""
    clients: Count = 100
    """Most clients in the sum."""
    project: Count | None = None
    """Width that features are projected to, as the option of `moments`."""
    clip: Positive | None = None
    """Largest length of a feature vector."""
    multiplier: NonNegative = 0.0
    """Standard deviation of the noise on the sum, over the sensitivity."""
    noise_over: Count = 1
    """Clients that share the noise."""

    @property
    def moments(self) -> Moments:
        alone = self.multiplier / math.sqrt(self.noise_over)
        return Moments(project=self.project, min_samples=1, clip=self.clip, multiplier=alone)

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` for noise without a bound, or where too few clients can share."""
        self.moments.require_possible(sizes, minimum)
        needed = self.threshold(int((sizes > 0).sum()))
        self.require_clients(sizes, minimum, needed, "noise_over" if needed == self.noise_over else "fewest")

    def threshold(self, clients: int) -> int:
        """More than half of the clients, and as many as share the noise.

        Raises :class:`FedblendError` for more than ``clients``.
        """
        if clients > self.clients:
            raise FedblendError(
                f"method.sharing.clients: {self.clients} in the sum at most, but {clients} hold samples; valid: "
                f"{clients} or more (coarser steps)"
            )
        return max(super().threshold(clients), self.noise_over)

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return 1

    def share(self, local: ClientData) -> Payload | None:
        """Sums as integers, int32 with the shapes of `moments`; ``None`` for fewer samples than the policy's mean."""
        if len(local.y) < local.minimum:
            return None
        sums = self.moments.share(replace(local, minimum=1))
        return None if sums is None else self.encoded(sums)

    def form(self, spec: ModelSpec) -> Payload:
        return {WHOLE + n: torch.zeros(shape, dtype=torch.int32) for n, shape in self.moments.form(spec).items()}

    def share_of(self, counts: torch.Tensor | int) -> torch.Tensor | float:
        return 1 / self.clients

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """The sum over all clients, with the deviation of its noise."""
        deviation = self.moments.multiplier * math.sqrt(len(entries))
        return replace(self.moments, multiplier=deviation).pool(super().make_pool(entries, server), server.rng)

    def mechanism(self) -> Mechanism | str:
        """The noise on the sum over all clients, for whoever sees the sum alone."""
        if not self.multiplier:
            return self.moments.mechanism()
        return Mechanism("gaussian", self.multiplier, at_server=True)
