"""The weighted mean of FedAvg; also from a sum of integers, so that the server needs no single upload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedblend.core.aggregator import Aggregator, Tensors, WeightedUpload
from fedblend.core.columns import Column, column
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Int, Positive, part

LEVELS = 2**31 - 2**20
"""Steps from 0 to the largest sum: the range of int32, less a margin for the rounding of two million clients."""

COUNTS = 2.0**24  # Largest change of an integer (batch norm's counters); steps are then 1/128


@dataclass
class Sums:
    """Weighted sums of uploads in float64; sums of several processes can be added."""

    weight: float = 0.0
    """Sum of the weights."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """Weighted sums by name, float64."""
    kinds: dict[str, torch.dtype] = field(default_factory=dict)
    """Type of each tensor in the uploads, and so of the mean."""

    def add(self, tensors: Tensors, weight: float) -> None:
        """Add one upload; an upload of weight 0 is ignored."""
        if weight == 0:
            return
        self.weight += weight
        for name, tensor in tensors.items():
            if name in self.tensors:
                self.tensors[name].add_(tensor, alpha=weight)
            else:
                self.tensors[name] = tensor.double() * weight
                self.kinds[name] = tensor.dtype

    def unrounded(self) -> Sums:
        """The same sums, whose mean stays in float64 where tensors are of a floating-point type."""
        kinds = {n: torch.float64 if kind.is_floating_point else kind for n, kind in self.kinds.items()}
        return replace(self, kinds=kinds)

    def mean(self) -> dict[str, torch.Tensor]:
        """The sums divided by the weight; integer tensors (batch norm's counters) are rounded."""
        return {name: as_stored(t / self.weight, self.kinds[name]) for name, t in self.tensors.items()}


def as_stored(values: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Values converted to a type, rounded if it is an integer type."""
    return (values if kind.is_floating_point else values.round()).to(kind)


@part("aggregator", "mean")
class WeightedMean(Aggregator):
    """Average the uploads: sum_k p_k w_k with p_k = n_k / sum n over the round's clients (FedAvg; FedMix, section 3.1).

    The further factor 1/K in FedMix's Algorithms 1 and 3 would shrink the weights and is left out. Uploads are
    used one at a time and may be freed afterwards. Sums are in float64, so that equal uploads average to
    themselves and the mean lies in their convex hull.
    """

    by: Annotated[Literal["samples", "clients"] | Column, Field(union_mode="left_to_right")] = "samples"
    """Weights of the mean: the clients' numbers of samples, equal weights (noise at the server needs these), or a
    number for each client: a list, or "FILE.csv:COLUMN"."""

    @property
    def is_plain_mean(self) -> bool:
        return self.by == "clients"

    def weigh(self, client: int, samples: int) -> float:
        return float(samples) if self.by in ("samples", "clients") else float(column(self.by)[client]) * (samples > 0)

    def partial(self, uploads: Iterable[WeightedUpload]) -> Sums:
        sums = Sums()
        for tensors, weight in uploads:
            sums.add(tensors, float(weight > 0) if self.by == "clients" else weight)
        return sums

    def unrounded(self, partial: Any) -> Any:
        return partial.unrounded() if isinstance(partial, Sums) else partial

    def finish(self, partial: Sums, weights: Tensors) -> dict[str, torch.Tensor]:
        return partial.mean()

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        return self.partial(uploads).mean()


def to_integers(numbers: torch.Tensor, largest: float, share: float) -> torch.Tensor:
    """Encode numbers of at most ``largest``, times their ``share`` of a sum, as int32 to be added modulo 2^32."""
    return (numbers.double() * (share * LEVELS / largest)).round().to(torch.int32)


def from_integers(total: torch.Tensor, largest: float, share: float | torch.Tensor) -> torch.Tensor:
    """Decode a sum of :func:`to_integers` to the mean, float64; the shares of the summands sum to ``share``."""
    return total.double() * (largest / LEVELS / share)


def min_clients(fewest: int, clients: int) -> int:
    """Clients, of ``clients``, that must take part to the end; also the secret shares that recover a secret.

    It is more than half, so that two responses of each client cannot reveal both secrets of another client.
    """
    return max(fewest, clients // 2 + 1)


@dataclass(frozen=True)
class Total:
    """A sum over clients of encoded changes, int32 modulo 2^32, and the sum of their shares, in (0, 1]."""

    numbers: torch.Tensor
    share: float


@part("aggregator", "secure-mean")
class SecureMean(WeightedMean):
    """Compute the weighted mean of models from a sum of masked models (Bonawitz et al. 2017; over Flower).

    A client's change w_k - w times its share p_k of the cohort's samples is encoded in integer steps of ``range`` /
    2^31, modulo 2^32. Over Flower clients mask these integers, so that the server learns their sum and no summand. The
    rounding error of a number is at most half a step for each client: 4e-9 with ``range`` 16. Other engines compute the
    same sum without masks. The server still learns of each client its number of samples, and that it took part.
    """

    works_on = "sums"

    by: Literal["samples", "clients"] = "samples"
    """Weights of the mean: the clients' numbers of samples, or equal weights."""
    range: Positive = 16.0
    """Largest change of a number in one round; a client whose model changed more sends nothing."""
    fewest: Annotated[Int, Field(ge=2)] = 3
    """Fewest clients whose sum the server may learn; in addition, more than half of the cohort must take part."""

    @property
    def is_plain_mean(self) -> bool:
        """False: rounded to steps, two updates can differ by more than the norm that they were clipped to."""
        return False

    def require_possible(self, cohort: int) -> None:
        """Raise :class:`FedblendError` for a cohort of fewer clients than ``fewest``."""
        if cohort < self.fewest:
            raise FedblendError(
                f"method.aggregator.fewest: {self.fewest} clients to a sum, but train.cohort is {cohort}; valid: 2 to "
                f"{cohort}"
            )

    def threshold(self, cohort: int) -> int:
        return min_clients(self.fewest, cohort)

    def share_of(self, samples: int, cohort: list[int]) -> float:
        """The share of a client with ``samples`` samples in a cohort whose clients have ``cohort`` samples."""
        return self.weight_of(samples) / sum(map(self.weight_of, cohort)) if samples else 0.0

    def weight_of(self, samples: int) -> int:
        return samples if self.by == "samples" else int(samples > 0)

    def largest(self, tensor: torch.Tensor) -> float:
        """The largest change of a tensor's numbers in one round."""
        return self.range if tensor.is_floating_point() else COUNTS

    def fault(self, upload: Tensors, start: Tensors) -> str:
        for name, before in sorted(start.items()):
            if not bool(((upload[name].double() - before.double()).abs() <= self.largest(before)).all()):
                return (
                    f"method.aggregator.range: a number of '{name}' changed by more than {self.largest(before):g} in "
                    "one round, or is not finite; valid: a larger range (coarser steps), or a smaller learning rate"
                )
        return ""

    def encoded(self, upload: Tensors, start: Tensors, share: float) -> torch.Tensor:
        """A client's summand, int32 [numbers], tensors in order of name.

        Raises :class:`FedblendError` for changes beyond ``range``.
        """
        if fault := self.fault(upload, start):
            raise FedblendError(fault)
        changes = [(upload[name].double() - before.double(), before) for name, before in sorted(start.items())]
        return torch.cat([to_integers(change, self.largest(of), share).flatten() for change, of in changes])

    def decoded(self, total: Total, start: Tensors) -> dict[str, torch.Tensor]:
        """The mean: the round's weights plus the sum of changes over the sum of shares."""
        mean, place = {}, 0
        for name, before in sorted(start.items()):
            numbers = total.numbers[place : place + before.numel()].reshape(before.shape)
            place += before.numel()
            mean[name] = as_stored(
                before.double() + from_integers(numbers, self.largest(before), total.share), before.dtype
            )
        return {name: mean[name] for name in start}

    def partial(self, uploads: Iterable[WeightedUpload]) -> list[WeightedUpload]:  # type: ignore[override]
        """All uploads, because shares are known only when all uploads have arrived; on the CPU, where sums are made."""
        return [({name: tensor.cpu() for name, tensor in upload.items()}, weight) for upload, weight in uploads]

    def finish(self, partial: list[WeightedUpload] | Total, weights: Tensors) -> dict[str, torch.Tensor]:  # type: ignore[override]
        if isinstance(partial, list):
            sizes = [int(weight) for _, weight in partial]
            numbers = torch.zeros(sum(t.numel() for t in weights.values()), dtype=torch.int32)
            for (upload, _), size in zip(partial, sizes, strict=True):
                numbers += self.encoded(upload, weights, self.share_of(size, sizes))
            partial = Total(numbers, 1.0)
        return self.decoded(partial, weights)
