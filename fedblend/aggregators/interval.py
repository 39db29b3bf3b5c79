"""AggEnhance's trimmed averaging: updates that leave an interval are left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pydantic
import torch

from fedblend.aggregators.base import Aggregator, Tensors, Weighed
from fedblend.aggregators.kernels import mean_within
from fedblend.aggregators.mean import WeightedMean, as_stored
from fedblend.parts import part


@part("aggregator", "interval-mean")
class IntervalMean(Aggregator):
    """w + the weighted mean of those updates w_k - w that lie in [low, high], for each parameter by itself.

    AggEnhance, section 4.2: "we apply the averaging operator to the updates in [-0.5, 0.5]". An update is read as
    what a client changed, w_k - w with w the round's weights; weights themselves leave the interval wherever a
    normalisation scales by 1. The averaging operator is FedAvg's, weighted by samples, over the clients that are
    left; where none is, the parameter stays as it was. Whole-number tensors (batch norm's counters) are no
    parameters and get the plain weighted mean. The trimmed mean by rank is the aggregator `trimmed-mean`.
    """

    low: float = -0.5
    """Smallest update that is averaged."""
    high: float = 0.5
    """Largest update that is averaged."""

    @pydantic.model_validator(mode="after")
    def _is_an_interval(self) -> IntervalMean:
        if not self.low < self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}; valid: an interval such as [-0.5, 0.5]")
        return self

    def finish(self, partial: Any, weights: Tensors) -> dict[str, torch.Tensor]:
        """The means, each of what lies within the interval around the round's weights."""
        uploads: Sequence[Weighed] = [(tensors, weight) for tensors, weight in partial if weight > 0]
        return {
            name: self._parameter([u[name] for u, _ in uploads], [w for _, w in uploads], start.to(uploads[0][0][name]))
            if start.is_floating_point()
            else _plain(name, uploads)
            for name, start in weights.items()
        }

    def _parameter(self, rows: list[torch.Tensor], shares: list[float], start: torch.Tensor) -> torch.Tensor:
        return as_stored(mean_within(rows, shares, start, self.low, self.high), start.dtype)


def _plain(name: str, uploads: Iterable[Weighed]) -> torch.Tensor:
    return WeightedMean().aggregate(({name: tensors[name]}, weight) for tensors, weight in uploads)[name]
