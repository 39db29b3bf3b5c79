"""Mashed data: means of a client's samples (MAFL), also as masked integers, and the controls of FedMix's Table 9."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field

from fedblend.core.context import ModelSpec
from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism
from fedblend.core.registry import Count, Fraction, Int, NonNegative, Positive, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, ServerSide, Sharing, SharingPlan, rows_of
from fedblend.methods.aggregators.mean import from_integers, min_clients, to_integers
from fedblend.methods.requirements import entries_in, fault_of_form, require_held

WHOLE = "whole-"  # Prefix of the tensor names of means that are encoded as integers
CHUNK = 1024  # Samples that are scaled at a time, because scaled one-hot text is 300 times larger than stored text
REACH = 10.0  # Deviations by which Gaussian noise may move a number; it moves one further with a probability of 2e-23
ROUNDING = 1e-3  # Part of the range of samples by which float32 may move a mean


def group_means(
    local: ClientData, groups: np.ndarray, read: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[Payload, np.ndarray]:
    """Means of inputs and targets by group, float64: x [groups, ...] and y [groups, outputs], and the groups' sizes.

    ``groups`` int64 [n] is the group of each sample, counted from 0. ``read`` converts stored samples to the inputs
    that are averaged. Sums are in float64, so that a mean does not depend on the size of the chunks.
    """
    count = np.bincount(groups)
    where = torch.from_numpy(groups)
    sums: torch.Tensor | None = None
    for rows, stored in zip(where.split(CHUNK), local.x.split(CHUNK), strict=True):
        some = read(stored).double()
        sums = some.new_zeros(len(count), *some.shape[1:]) if sums is None else sums
        sums.index_add_(0, rows, some)
    targets = local.task.encode(local.y).double()
    y = torch.zeros(len(count), targets.shape[1], dtype=torch.float64).index_add_(0, where, targets)
    assert sums is not None
    size = torch.from_numpy(count).double()
    x = sums / size.reshape(-1, *[1] * (sums.dim() - 1))
    return {"x": x, "y": y / size[:, None]}, count


def random_groups(rng: np.random.Generator, n: int, size: int) -> np.ndarray:
    """Divide n samples at random into groups of ``size``; the last may be smaller. int64 [n]."""
    return rng.permutation(n) // size


def class_groups(rng: np.random.Generator, labels: np.ndarray, size: int) -> np.ndarray:
    """Groups of ``size`` within each class (FedMix, Table 16); each class's last may be smaller. int64 [n]."""
    order = np.lexsort((rng.random(len(labels)), labels))
    place = np.empty(len(labels), np.int64)
    place[order] = np.arange(len(labels))
    first = np.searchsorted(labels[order], labels)
    key = labels * (len(labels) + 1) + (place - first) // size
    return np.unique(key, return_inverse=True)[1]


@part("sharing", "means")
class SharedMeans(Sharing):
    """Share mashed data (MAFL, Algorithm 1): a client splits its samples into groups of M_k and sends their means.

    The mean of a group that is smaller than the client's policy allows is not sent.
    """

    bytes_kind = "means"
    plan = SharingPlan("inputs")

    samples_per_mean: Count | Literal["all"] = "all"
    """Samples in a mean (M_k), or "all" for one mean of all samples of a client; the last group may be smaller."""
    split: Literal["random", "class"] = "random"
    """Random groups, or groups within one class (Table 16)."""
    scale: Literal["input", "unit"] = "input"
    """Scale of the means: the model's input scale, as the formula requires, or pixels in [0, 1], because the paper does
    not define it.
    """
    threshold: Count = 1
    """Samples below which a client sends nothing (appendix H)."""
    noise: NonNegative = 0.0
    """Standard deviation of Gaussian noise on each mean input, on the model's input scale (appendix I); it gives no
    (epsilon, delta), because targets get no noise.
    """
    multiplier: NonNegative = 0.0
    """Gaussian noise on mean inputs and targets that gives an (epsilon, delta) for a sample: its standard deviation as
    a multiple of the largest change of a mean that one sample can cause.
    """
    server_average: Count = 1
    """Entries in the random groups that the server averages before it distributes them (Table 15)."""
    refresh: Fraction | None = None
    """Share of clients with new data at which these clients share again (section 3.4; default: never)."""

    @property
    def made_of(self) -> Literal["samples", "label"]:  # type: ignore[override]
        return "label" if self.split == "class" else "samples"

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no client reaches the threshold, or no mean the policy's size.

        Classes are not considered, so that means within a class may still be smaller.
        """
        require_held(sizes, {"method.sharing.threshold": self.threshold})
        held = int(sizes.max(initial=0))
        largest = held if self.samples_per_mean == "all" else min(held, self.samples_per_mean)
        if largest < minimum:
            more = "give the clients or the means more samples (or state 1, with unsafe = true)"
            valid = f"valid: 2 to {largest}" if largest > 1 else more
            raise FedblendError(
                f"policy.min_mean: {minimum} samples, but no mean can be of more than {largest} (the largest client "
                f"holds {held} at the start, method.sharing.samples_per_mean is {self.samples_per_mean!r}), so that "
                f"no client would share; {valid}"
            )

    def share(self, local: ClientData) -> Payload | None:
        """Means of inputs x [groups, ...] and of targets y [groups, outputs]; ``None`` below the threshold."""
        unit = self.scale == "unit"
        if self.multiplier:
            # Clipped to the bounds that the noise is sized for, because a site's samples may exceed its scale.
            after = (lambda x: x) if unit else local.scale.from_unit
            return self._means(local, lambda x: after(local.scale.to_unit(local.scale(x))))
        # Not clipped before the mean: with bounds of a server's choice it would be of the sample beyond them alone.
        return self._means(local, local.scale, local.scale.to_unit if unit else None)

    def _means(
        self,
        local: ClientData,
        read: Callable[[torch.Tensor], torch.Tensor],
        convert: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Payload | None:
        n = len(local.y)
        if self.multiplier and local.task.kind != "classification":
            raise FedblendError(
                f"method.sharing.multiplier: {self.multiplier} needs targets that are classes; these are "
                f"{'numbers without bounds' if local.task.kind == 'regression' else 'several labels'}; valid: 0"
            )
        if n < self.threshold or n == 0:
            return None
        payload, count = group_means(local, self.groups(local), read)
        allowed = torch.from_numpy(count >= local.minimum)
        if not bool(allowed.any()):
            return None
        payload = {name: tensor[allowed] for name, tensor in payload.items()}
        payload["x"] = convert(payload["x"]) if convert else payload["x"]
        if self.noise:
            drawn = local.rng.standard_normal(payload["x"].shape, np.float32)
            payload["x"] = payload["x"] + self.noise * torch.from_numpy(drawn)
        if self.multiplier:
            payload = self._private(payload, count[allowed.numpy()], local)
        # After the noise: a mean that is rounded before may move by more than the noise is sized for.
        return {name: tensor.float() for name, tensor in payload.items()}

    def groups(self, local: ClientData) -> np.ndarray:
        """The group of each sample, int64 [n]."""
        n = len(local.y)
        size = n if self.samples_per_mean == "all" else self.samples_per_mean
        if self.split == "class" and local.task.kind == "classification":
            return class_groups(local.rng, local.y.numpy(), size)
        return random_groups(local.rng, n, size)

    def used(self, local: ClientData) -> np.ndarray:
        groups = self.groups(local)
        large: np.ndarray = np.bincount(groups)[groups] >= local.minimum
        return large

    def _private(self, payload: Payload, count: np.ndarray, local: ClientData) -> Payload:
        """Means with noise in proportion to the largest change that one sample can cause in each."""
        distance = {"x": local.scale.diameter(tuple(local.x.shape[1:])), "y": math.sqrt(2)}
        if self.scale == "unit":
            distance["x"] = math.sqrt(payload["x"][0].numel())
        noisy = {}
        for name, mean in payload.items():
            size = torch.from_numpy(self.multiplier * distance[name] / count).reshape(-1, *[1] * (mean.dim() - 1))
            noisy[name] = mean + size * torch.from_numpy(local.rng.standard_normal(tuple(mean.shape)))
        return noisy

    def fault(self, payload: Payload, samples: int, spec: ModelSpec) -> str | None:
        """Why means are not inputs of the model with targets, or ``None``; hidden states have forms of their own.

        A mean beyond the bounds of samples is none: mixed in, it would move the models of all clients at will, and no
        aggregator sees it.
        """
        if not self.plan.leaves:
            return None
        if self.plan.form == "inputs":
            n, shape = entries_in(payload), spec.scale(torch.zeros(1, *spec.shape)).shape[1:]
            form = {"x": (n, *shape, torch.float32), "y": (n, spec.task.outputs, torch.float32)}
            if fault := fault_of_form(payload, form):
                return fault
        for name, (low, high, deviation) in self._bounds(spec).items():
            if name in payload:
                slack = REACH * deviation + ROUNDING * (high - low)
                if not bool(((payload[name] >= low - slack) & (payload[name] <= high + slack)).all()):
                    return f"it sent means '{name}' with a number beyond the bounds of samples and their noise"
        return None

    def _bounds(self, spec: ModelSpec) -> dict[str, tuple[torch.Tensor, torch.Tensor, float]]:
        """Smallest and largest numbers of a mean without noise, and the noise's deviation; where they are known.

        The noise is that on a mean of one sample, since the size of each mean is its client's knowledge.
        """
        unit = torch.zeros(1), torch.ones(1)
        bounds = {} if spec.task.kind == "regression" else {"y": (*unit, self.multiplier * math.sqrt(2))}
        if self.plan.form == "inputs" and self.scale == "unit":
            most = math.sqrt(math.prod(spec.scale(torch.zeros(1, *spec.shape)).shape))
            bounds["x"] = (*unit, self.noise + self.multiplier * most)
        elif self.plan.form == "inputs" and (spec.bounded or self.multiplier):
            zero, one = spec.scale.ends()
            deviation = self.noise + self.multiplier * spec.scale.diameter(spec.shape)
            bounds["x"] = (torch.minimum(zero, one), torch.maximum(zero, one), deviation)
        return bounds

    def mechanism(self) -> Mechanism | str:
        """The noise on the pair of input and target: two Gaussian releases with `multiplier`, each of one sample.

        Each sample is in one mean, chosen independently of the data. Sizes of clients and groups are public. So
        replacing one sample by another changes one mean of m samples by at most the diameter of the inputs' bounds over
        m, and its target by sqrt(2) / m.
        """
        if not self.multiplier:
            return "means get no noise in proportion to their sensitivity (method.sharing.multiplier)"
        if self.split == "class":
            return 'means within a class (method.sharing.split = "class") depend on labels in more than one place'
        return Mechanism("gaussian", self.multiplier / math.sqrt(2), at_server=False)

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """All means, or the means of random groups of ``server_average`` entries."""
        if self.server_average == 1 or not len(entries):
            return entries
        groups = torch.from_numpy(random_groups(rng, len(entries), self.server_average))
        count = torch.bincount(groups)
        mixed = {
            name: torch.zeros(len(count), *t.shape[1:], dtype=torch.float64)
            .index_add_(0, groups, t.double())
            .div_(count.reshape(-1, *[1] * (t.dim() - 1)))
            .float()
            for name, t in entries.tensors.items()
        }
        return Pool(mixed, np.full(len(count), -1))


@part("sharing", "local-means")
class LocalMeans(SharedMeans):
    """Make means that each client uses only itself; nothing leaves it (a control of FedMix's Table 9)."""

    plan = SharingPlan("inputs", to="own")

    def view(self, pool: Pool, client: int) -> Pool:
        return rows_of(pool, pool.owner == client)


@part("sharing", "noise")
class Noise(Sharing):
    """Use noise in place of means; nothing leaves a client (a control of FedMix's Table 9).

    Each client makes one entry: every number of x is from N(0, sigma^2) on the model's input scale, and y is the
    uniform distribution (zeros in regression, 1/2 for each label of multi-label data).
    """

    bytes_kind = "means"
    plan = SharingPlan("inputs", to="nobody")

    sigma: NonNegative = 1.0
    """Standard deviation of the noise, on the model's input scale."""

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return min(samples, 1)

    def share(self, local: ClientData) -> Payload | None:
        if not len(local.y):
            return None
        shape = local.scale(local.x[:1]).shape
        x = self.sigma * torch.from_numpy(local.rng.standard_normal(shape, np.float32))
        level = {"classification": 1 / local.task.outputs, "multi-label": 0.5}.get(local.task.kind, 0.0)
        return {"x": x, "y": torch.full((1, local.task.outputs), level)}


@part("sharing", "hidden-means")
class HiddenMeans(SharedMeans):
    """Share means of hidden states after ``layer`` layers of the round's global model (FedMix, appendix E).

    Clients send them in every round, because they change with the weights. The objective ``hidden-mix`` needs them.
    """

    bytes_kind = "hidden-means"
    plan = SharingPlan("hidden", "each-round", sees_model=True)

    layer: Count = 2
    """Layers before the hidden states that are averaged; the objective must have the same."""

    @pydantic.model_validator(mode="after")
    def _require_bounds(self) -> HiddenMeans:
        if self.multiplier:
            raise ValueError(f"multiplier: {self.multiplier} needs bounds, which hidden states do not have; valid: 0")
        return self

    def share(self, local: ClientData) -> Payload | None:
        """Means of hidden states x [groups, ...] and of targets y [groups, outputs]."""
        return self._means(local, lambda x: local.hidden(local.scale(x), self.layer))


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
