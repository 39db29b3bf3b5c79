"""What an aggregator is, and the weighted mean of FedAvg."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fedblend.parts import part

Tensors = Mapping[str, torch.Tensor]
Upload = tuple[Tensors, float]


@dataclass
class Sums:
    """Weighted sums of uploads in float64, with the tensors' own types; sums of several machines add up."""

    weight: float = 0.0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    kinds: dict[str, torch.dtype] = field(default_factory=dict)

    def add(self, tensors: Tensors, weight: float) -> None:
        """Add one upload; one of weight 0 counts for nothing."""
        if weight == 0:
            return
        self.weight += weight
        for name, tensor in tensors.items():
            if name in self.tensors:
                self.tensors[name].add_(tensor, alpha=weight)
            else:
                self.tensors[name] = tensor.double() * weight
                self.kinds[name] = tensor.dtype

    def mean(self) -> dict[str, torch.Tensor]:
        """The sums over the weight; whole-number tensors (batch norm's counters) are rounded."""
        return {
            name: (t / self.weight if self.kinds[name].is_floating_point else (t / self.weight).round()).to(
                self.kinds[name]
            )
            for name, t in self.tensors.items()
        }


class Aggregator:
    """Base of all aggregators: a function of the uploads and their weights, in order of client.

    An author overrides :meth:`aggregate`. One that is a function of sums overrides :meth:`partial` and
    :meth:`finish` instead, so that uploads need not be kept, nor gathered from other machines.
    """

    def partial(self, uploads: Iterable[Upload]) -> Any:
        """What is kept of the uploads that one process has: :class:`Sums`, or a list of all."""
        return list(uploads)

    def finish(self, partial: Any) -> dict[str, torch.Tensor]:
        """One set of tensors from what was kept of all uploads."""
        return self.aggregate(partial)

    def aggregate(self, uploads: Sequence[Upload]) -> dict[str, torch.Tensor]:
        """One set of tensors from (tensors, weight) pairs; at least one weight must be above 0."""
        raise TypeError(f"{type(self).__name__} defines no aggregate")


@part("aggregator", "mean")
class WeightedMean(Aggregator):
    """sum_k p_k w_k with p_k = n_k / sum n over the round's clients (FedAvg; FedMix, section 3.1).

    The further 1/K in FedMix's Algorithms 1 and 3 would shrink the weights and is left out. Uploads are
    used one at a time and may be freed after; sums are in float64, so that equal uploads average to
    themselves and the mean lies in their convex hull.
    """

    def partial(self, uploads: Iterable[Upload]) -> Sums:
        """The weighted sums."""
        sums = Sums()
        for tensors, weight in uploads:
            sums.add(tensors, weight)
        return sums

    def finish(self, partial: Sums) -> dict[str, torch.Tensor]:
        """The mean."""
        return partial.mean()

    def aggregate(self, uploads: Iterable[Upload]) -> dict[str, torch.Tensor]:
        """The mean of uploads."""
        return self.finish(self.partial(uploads))
