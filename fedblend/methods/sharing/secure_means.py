"""Averages of clients' means, summed as masked integers so that the server needs no single client's mean."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field

from fedblend.core.context import ModelSpec
from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism
from fedblend.core.registry import Int, NonNegative, Positive, part
from fedblend.core.sharing import ClientData, Payload, Pool, ServerSide, Sharing, SharingPlan
from fedblend.methods.aggregators.secure import from_integers, min_clients, to_integers
from fedblend.methods.sharing.means import SharedMeans

WHOLE = "whole-"  # Prefix of the tensor names of means that are encoded as integers


class MaskedSums(Sharing):
    """Base of sharings whose payloads are integers that the server receives as sums over groups of clients only."""

    plan = SharingPlan(who="groups")
    fewest: int
    range: float

    def form(self, spec: ModelSpec) -> Payload:
        """Zeros with the names, shapes and types of a client's payload."""
        raise TypeError(f"{type(self).__name__} defines no form")

    def require_clients(self, sizes: np.ndarray, minimum: int, needed: int, field: str) -> None:
        """Raise :class:`FedblendError` if fewer clients hold enough samples than the ``field`` demands for a sum."""
        sharing = int((sizes >= minimum).sum())
        if sharing < needed:
            raise FedblendError(
                f"method.sharing.{field}: {needed} clients to a sum, but only {sharing} hold {minimum} samples or more "
                "(policy.min_mean); valid: fewer, or more clients"
            )

    def threshold(self, clients: int) -> int:
        """Clients of a group of ``clients`` that must share and take part to the end."""
        return min_clients(self.fewest, clients)

    def groups(self, clients: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The group of each client, int64 [clients] from 0; by default all are in one."""
        return np.zeros(len(clients), np.int64)

    def share_of(self, counts: torch.Tensor | int) -> torch.Tensor | float:
        """The share of a sum's range that ``counts`` clients take together; 1 where the sum itself is wanted."""
        return 1.0

    def encoded(self, payload: Payload) -> Payload:
        """A client's numbers as integers. Raises :class:`FedblendError` for a number beyond ``range`` or not finite."""
        for name, numbers in payload.items():
            if not bool((numbers.abs() <= self.range).all()):
                raise FedblendError(
                    f"method.sharing.range: a number of '{name}' is beyond {self.range:g}, or not finite; valid: a "
                    "larger range (coarser steps)"
                )
        share = float(self.share_of(1))
        return {WHOLE + name: to_integers(numbers, self.range, share) for name, numbers in payload.items()}

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """One entry for each group of the clients asked in which enough clients have shared."""
        group = self.groups(server.clients, server.rng)
        group_of_entry = group[np.searchsorted(server.clients, entries.owner)]
        counts = np.bincount(group_of_entry, minlength=int(group.max(initial=-1)) + 1)
        enough = counts >= [self.threshold(size) for size in np.bincount(group).tolist()]
        rows, count = torch.from_numpy(group_of_entry), torch.from_numpy(counts[enough])
        tensors = {}
        for name, t in entries.tensors.items():
            total = torch.zeros(len(counts), *t.shape[1:], dtype=torch.int64).index_add_(0, rows, t.long())
            share = self.share_of(count.reshape(-1, *[1] * (t.dim() - 1)))
            tensors[name.removeprefix(WHOLE)] = from_integers(
                total[torch.from_numpy(enough)], self.range, share
            ).float()
        return Pool(tensors, np.full(int(enough.sum()), -1))

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """Decode entries one by one, to measure their cost; rounds use :meth:`make_pool`."""
        tensors = {n: from_integers(t, self.range, self.share_of(1)) for n, t in entries.tensors.items()}
        return Pool({name.removeprefix(WHOLE): t.float() for name, t in tensors.items()}, entries.owner)


@part("sharing", "secure-means")
class SecureMeans(MaskedSums):
    """Share mashed data (MAFL, Algorithm 1) of which the server learns sums over groups of clients only.

    As in FedMix's Table 15, each client makes one mean of all its samples, and the server averages the means of random
    groups of clients before it distributes them. Here groups are drawn before clients share. Means are encoded in
    integer steps of ``server_average`` * ``range`` / 2^30, modulo 2^32, so that over Flower they can be added under
    masks (Bonawitz et al. 2017). The rounding error of a number of an average is at most half a step: 2.3e-8 with 3 and
    16. Other engines compute the same sums without masks. Clients share once, because a group's sum cannot be renewed
    for one of its clients.
    """

    bytes_kind = "means"
    plan = SharingPlan("inputs", who="groups")

    server_average: Annotated[Int, Field(ge=2)] = 3
    """Clients in a group; groups are larger, but less than twice as large, where clients cannot be divided evenly."""
    fewest: Annotated[Int, Field(ge=2)] = 3
    """Fewest clients whose sum the server may learn; in addition, more than half of a group must share."""
    range: Positive = 16.0
    """Largest number in a mean, of inputs or targets; a site with a larger one sends nothing, a simulation ends."""
    scale: Literal["input", "unit"] = "input"
    """Scale of the means: the model's input scale, or pixels in [0, 1]."""
    noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise on each client's mean input, as the option of `means`."""
    multiplier: NonNegative = 0.0
    """Gaussian noise on each client's mean that gives an (epsilon, delta) for a sample, as the option of `means`."""

    @pydantic.model_validator(mode="after")
    def _check_group_size(self) -> SecureMeans:
        if self.server_average < self.fewest:
            raise ValueError(
                f"server_average: groups of {self.server_average} clients are smaller than the smallest sum, fewest = "
                f"{self.fewest}; valid: {self.fewest} or more"
            )
        return self

    @property
    def means(self) -> SharedMeans:
        return SharedMeans(scale=self.scale, noise=self.noise, multiplier=self.multiplier)

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no mean reaches the policy's size, or too few clients can share."""
        self.means.require_possible(sizes, minimum)
        self.require_clients(sizes, minimum, self.fewest, "fewest")

    def mechanism(self) -> Mechanism | str:
        return self.means.mechanism()

    def share(self, local: ClientData) -> Payload | None:
        """One mean as integers: "whole-x" int32 [1, ...] and "whole-y" int32 [1, outputs].

        Raises :class:`FedblendError` where a number is beyond ``range`` or not finite.
        """
        means = self.means.share(local)
        return None if means is None else self.encoded(means)

    def form(self, spec: ModelSpec) -> Payload:
        x = spec.scale(torch.zeros(1, *spec.shape))
        return {
            f"{WHOLE}x": torch.zeros(x.shape, dtype=torch.int32),
            f"{WHOLE}y": torch.zeros(1, spec.task.outputs, dtype=torch.int32),
        }

    def groups(self, clients: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        number = max(1, len(clients) // self.server_average)
        group = np.empty(len(clients), np.int64)
        group[rng.permutation(len(clients))] = np.arange(len(clients)) * number // max(1, len(clients))
        return group

    def share_of(self, counts: torch.Tensor | int) -> torch.Tensor | float:
        """A group has less than twice ``server_average`` clients."""
        return counts * (1 / (2 * self.server_average))
