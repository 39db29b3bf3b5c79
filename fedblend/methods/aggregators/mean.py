"""The weighted mean of FedAvg."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field

from fedblend.core.aggregator import Aggregator, Tensors, WeightedUpload
from fedblend.core.columns import Column, column
from fedblend.core.registry import part


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
