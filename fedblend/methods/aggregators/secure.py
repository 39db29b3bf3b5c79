"""The mean from a sum of whole numbers, as secure aggregation gives it: nobody needs a single upload."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from fedblend.core.aggregator import Tensors, WeightedUpload
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Int, Positive, part
from fedblend.methods.aggregators.mean import WeightedMean, as_stored

LEVELS = 2**31 - 2**20
"""Steps from 0 to the largest number that a sum may reach: int32, less room for the rounding of two million clients."""

COUNTS = 2.0**24
"""Largest change of a whole number (batch norm's counters); steps are then 1/128."""


def as_whole(numbers: torch.Tensor, largest: float, share: float) -> torch.Tensor:
    """Numbers of at most ``largest``, times their ``share`` of a sum, as whole ones to be added modulo 2^32: int32."""
    return (numbers.double() * (share * LEVELS / largest)).round().to(torch.int32)


def from_whole(total: torch.Tensor, largest: float, share: float | torch.Tensor) -> torch.Tensor:
    """The mean behind a sum of :func:`as_whole` whose summands' shares sum to ``share``, float64."""
    return total.double() * (largest / LEVELS / share)


def least_of(fewest: int, clients: int) -> int:
    """Clients that must take part to the end, of so many: also the shares that give a secret back.

    More than half, so that no two answers of one client can give both secrets of another away.
    """
    return max(fewest, clients // 2 + 1)


@dataclass(frozen=True)
class Total:
    """A sum over clients of encoded changes, int32 modulo 2^32, and the sum of their shares, in (0, 1]."""

    numbers: torch.Tensor
    share: float


@part("aggregator", "secure-mean")
class SecureMean(WeightedMean):
    """The weighted mean of models from a sum of masked ones (Bonawitz et al. 2017; over Flower).

    A client's change w_k - w times its share p_k of the cohort's samples becomes whole numbers of ``range`` / 2^31,
    modulo 2^32; over Flower they leave it masked, so that the server learns their sum and no summand. Each number is
    off by at most half a step a client: with ``range`` 16, 4e-9. Other engines make the same sum of the same numbers
    without masks. What the server still learns of each client: its number of samples, its loss, that it took part.
    """

    secure_aggregated = True

    range: Positive = 16.0
    """Largest change of a number in one round that can be told; a client whose model moved further sends nothing."""
    fewest: Annotated[Int, Field(ge=2)] = 3
    """Fewest clients whose sum the server may learn; more than half of the cohort is needed in any case."""

    @property
    def is_plain_mean(self) -> bool:
        """Never: as steps, two updates can be further apart than they were clipped to, before the server's noise."""
        return False

    def require_possible(self, cohort: int) -> None:
        """Refuse a cohort that is smaller than the smallest sum."""
        if cohort < self.fewest:
            raise FedblendError(
                f"method.aggregator.fewest: {self.fewest} clients to a sum, but train.cohort is {cohort}; valid: 2 to "
                f"{cohort}"
            )

    def threshold(self, cohort: int) -> int:
        """Clients that must take part to the end, of so many."""
        return least_of(self.fewest, cohort)

    def share_of(self, samples: int, cohort: list[int]) -> float:
        """What a client with so many samples weighs among a cohort whose clients have ``cohort`` samples."""
        return self.weight_of(samples) / sum(map(self.weight_of, cohort)) if samples else 0.0

    def weight_of(self, samples: int) -> int:
        """What a client with so many samples weighs: their number, or the same as any that has some."""
        return samples if self.by == "samples" else int(samples > 0)

    def encoded(self, upload: Tensors, start: Tensors, share: float) -> torch.Tensor:
        """A client's summand, int32 [numbers], tensors by name. Raises :class:`FedblendError` beyond ``range``."""
        made = []
        for name, before in sorted(start.items()):
            change = upload[name].double() - before.double()
            largest = self.range if before.is_floating_point() else COUNTS
            if not bool((change.abs() <= largest).all()):
                raise FedblendError(
                    f"method.aggregator.range: a number of '{name}' changed by more than {largest:g} in one round, or "
                    "is not finite; valid: a larger range (coarser steps), or a smaller learning rate"
                )
            made.append(as_whole(change, largest, share).flatten())
        return torch.cat(made)

    def decoded(self, total: Total, start: Tensors) -> dict[str, torch.Tensor]:
        """The mean: the round's weights moved by the sum of changes over the sum of shares."""
        made, place = {}, 0
        for name, before in sorted(start.items()):
            largest = self.range if before.is_floating_point() else COUNTS
            numbers = total.numbers[place : place + before.numel()].reshape(before.shape)
            place += before.numel()
            made[name] = as_stored(before.double() + from_whole(numbers, largest, total.share), before.dtype)
        return {name: made[name] for name in start}

    def partial(self, uploads: Iterable[WeightedUpload]) -> list[WeightedUpload]:  # type: ignore[override]
        """All uploads: where they are not masked, shares are known only when all are there."""
        return list(uploads)

    def finish(self, partial: list[WeightedUpload] | Total, weights: Tensors) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The mean, of a sum that was made under masks or of uploads."""
        if isinstance(partial, list):
            sizes = [int(weight) for _, weight in partial]
            numbers = torch.zeros(sum(t.numel() for t in weights.values()), dtype=torch.int32)
            for (upload, _), size in zip(partial, sizes, strict=True):
                numbers += self.encoded(upload, weights, self.share_of(size, sizes))
            partial = Total(numbers, 1.0)
        return self.decoded(partial, weights)
