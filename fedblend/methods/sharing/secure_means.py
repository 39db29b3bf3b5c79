"""Means of clients' means, made of whole numbers that can be added under masks: nobody needs a single client's."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field

from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism
from fedblend.core.registry import Int, NonNegative, Positive, part
from fedblend.core.sharing import ClientData, Payload, Pool, Sharing
from fedblend.methods.aggregators.secure import as_whole, from_whole, least_of
from fedblend.methods.sharing.means import SharedMeans

WHOLE = "whole-"
"""What the names of a mean's tensors begin with while these are whole numbers."""


@part("sharing", "secure-means")
class SecureMeans(Sharing):
    """Mashed data (MAFL, Algorithm 1) of which the server learns sums over groups of clients, and no client's mean.

    As FedMix's Table 15: each client makes one mean of all its samples, and the server averages those of random groups
    of clients before it gives them out. Here groups are dealt before anybody shares, and means become whole numbers of
    ``server_average`` * ``range`` / 2^30, modulo 2^32, so that over Flower they can be added under masks (Bonawitz et
    al. 2017). Each number of an average is off by at most half such a step: with 3 and 16, 2.3e-8. Other engines make
    the same sums without masks. Clients share once: a group's sum cannot be made anew for one of them.
    """

    bytes_kind = "means"
    secure_aggregated = True

    server_average: Annotated[Int, Field(ge=2)] = 3
    """Clients to a group; where clients do not come out even, groups are larger, but never twice as large."""
    fewest: Annotated[Int, Field(ge=2)] = 3
    """Fewest clients whose sum the server may learn; more than half of a group is needed in any case."""
    range: Positive = 16.0
    """Largest number in a mean that can be told, of inputs or targets; a client that has a larger one sends nothing."""
    scale: Literal["input", "unit"] = "input"
    """Means on the model's input scale, or in pixel units, [0, 1]."""
    noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise on each client's mean input, as the option of `means`."""
    multiplier: NonNegative = 0.0
    """Gaussian noise on each client's mean that earns an (epsilon, delta) for a sample, as the option of `means`."""

    @pydantic.model_validator(mode="after")
    def _can_be_summed(self) -> SecureMeans:
        if self.server_average < self.fewest:
            raise ValueError(
                f"server_average: groups of {self.server_average} clients, but a sum is of {self.fewest} at least "
                f"(fewest); valid: {self.fewest} or more"
            )
        return self

    @property
    def means(self) -> SharedMeans:
        """What a client's mean is made by."""
        return SharedMeans(scale=self.scale, noise=self.noise, multiplier=self.multiplier)

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no mean reaches the policy's size, or fewer clients share than make a sum."""
        self.means.require_possible(sizes, minimum)
        able = int((sizes >= minimum).sum())
        if able < self.fewest:
            raise FedblendError(
                f"method.sharing.fewest: {self.fewest} clients to a sum, but only {able} hold {minimum} samples or "
                "more (policy.min_mean); valid: 2 or more, and as many clients"
            )

    def mechanism(self) -> Mechanism | str:
        """The noise of `means`: it is on each client's own mean, whatever these are summed with."""
        return self.means.mechanism()

    def share(self, local: ClientData) -> Payload | None:
        """One mean as whole numbers: "whole-x" int32 [1, ...] and "whole-y" int32 [1, outputs].

        Raises :class:`FedblendError` where a number is beyond ``range`` or not finite.
        """
        made = self.means.share(local)
        if made is None:
            return None
        for name, mean in made.items():
            if not bool((mean.abs() <= self.range).all()):
                raise FedblendError(
                    f"method.sharing.range: a number of the mean '{name}' is beyond {self.range:g}, or not finite; "
                    "valid: a larger range (coarser steps)"
                )
        return {WHOLE + name: as_whole(mean, self.range, self._part) for name, mean in made.items()}

    def form(self, x: torch.Tensor, outputs: int) -> Payload:
        """The form of what a client shares whose inputs are as x [1, ...], as zeros."""
        y = x.new_zeros(1, outputs)
        return {WHOLE + name: torch.zeros_like(t, dtype=torch.int32) for name, t in (("x", x), ("y", y))}

    def threshold(self, clients: int) -> int:
        """Clients of a group of so many that must share, and stay to the end."""
        return least_of(self.fewest, clients)

    def groups(self, clients: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The group of each client, int64 [clients] from 0, dealt at random as evenly as can be."""
        number = max(1, len(clients) // self.server_average)
        group = np.empty(len(clients), np.int64)
        group[rng.permutation(len(clients))] = np.arange(len(clients)) * number // max(1, len(clients))
        return group

    def pool_of_sums(self, entries: Pool, asked: np.ndarray, rng: np.random.Generator) -> Pool:
        """The mean of each group of the clients ``asked``, int64 in order, in which enough have shared."""
        group = self.groups(asked, rng)
        mine = group[np.searchsorted(asked, entries.owner)]
        there = np.bincount(mine, minlength=int(group.max(initial=-1)) + 1)
        enough = there >= [self.threshold(size) for size in np.bincount(group).tolist()]
        rows, count = torch.from_numpy(mine), torch.from_numpy(there[enough])
        tensors = {}
        for name, t in entries.tensors.items():
            total = torch.zeros(len(there), *t.shape[1:], dtype=torch.int64).index_add_(0, rows, t.long())
            share = (count * self._part).reshape(-1, *[1] * (t.dim() - 1))
            tensors[name.removeprefix(WHOLE)] = from_whole(total[torch.from_numpy(enough)], self.range, share).float()
        return Pool(tensors, np.full(int(enough.sum()), -1))

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """Entries read back one by one, for a trial of what they cost; rounds ask for :meth:`pool_of_sums`."""
        made = {n.removeprefix(WHOLE): from_whole(t, self.range, self._part) for n, t in entries.tensors.items()}
        return Pool({name: t.float() for name, t in made.items()}, entries.owner)

    @property
    def _part(self) -> float:
        """The part of a sum's range that each client may fill: groups are less than twice `server_average` large."""
        return 1 / (2 * self.server_average)
