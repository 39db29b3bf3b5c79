"""What an aggregator is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fedblend.core.registry import Part
from fedblend.core.trees import Tensors

WeightedUpload = tuple[Tensors, float]


class Aggregator(Part):
    """Base of all aggregators: a function of the uploads and their weights, in order of client.

    An author overrides :meth:`aggregate`. One that needs the round's own weights as well overrides :meth:`finish`.
    One that is a function of sums overrides :meth:`partial` and :meth:`finish`, so that uploads need not be kept,
    nor gathered from other machines. ``secure_aggregated`` is true where the server of a real federation learns a sum
    only.
    """

    secure_aggregated: bool = False

    @property
    def is_plain_mean(self) -> bool:
        """Whether the aggregate is the mean of all uploads, each counting alike."""
        return False

    def require_possible(self, cohort: int) -> None:
        """Raise :class:`FedblendError` if rounds of ``cohort`` uploads cannot be aggregated, before any is made."""

    def partial(self, uploads: Iterable[WeightedUpload]) -> Any:
        """What is kept of the uploads that one process has: :class:`Sums`, or a list of all."""
        return list(uploads)

    def unrounded(self, partial: Any) -> Any:
        """What was kept, such that :meth:`finish` gives float64 where it can: noise is added before rounding."""
        return partial

    def finish(self, partial: Any, weights: Tensors) -> dict[str, torch.Tensor]:
        """One set of tensors from what was kept of all uploads; ``weights`` are those that the round began with."""
        return self.aggregate(partial)

    def aggregate(self, uploads: Sequence[WeightedUpload]) -> dict[str, torch.Tensor]:
        """One set of tensors from (tensors, weight) pairs; at least one weight must be above 0."""
        raise TypeError(f"{type(self).__name__} defines no aggregate")


def counting(uploads: Iterable[WeightedUpload]) -> list[Tensors]:
    """The tensors of uploads that count at all: one of weight 0 was trained on nothing."""
    return [tensors for tensors, weight in uploads if weight > 0]
