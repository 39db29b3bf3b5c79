"""Aggregators that exclude extreme values of each parameter over the clients: median and trimmed means."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import pydantic
import torch
from pydantic import Field, Strict

from fedblend.core.aggregator import Aggregator, LocalWork, Tensors, WeightedUpload, counting
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Float, part
from fedblend.methods.aggregators.mean import WeightedMean, as_stored
from fedblend.methods.aggregators.rows import mean_of_order, mean_within

Bound = Annotated[float, Strict()]
"""End of an interval; it may be infinite."""


@part("aggregator", "median")
class Median(Aggregator):
    """Take the median of each parameter over the clients; of an even number, the mean of the two middle values.

    Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", Algorithm 1, option
    I. Every upload counts once, independent of its number of samples, as in the paper, whose workers hold equally
    many. Less than half of the clients cannot move a parameter beyond the values of the other clients. Integer tensors
    are rounded.
    """

    works_on = "extras"

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        counted = counting(uploads)
        return _means_of_order(counted, (len(counted) - 1) // 2)


@part("aggregator", "trimmed-mean")
class TrimmedMean(Aggregator):
    """Average each parameter over the clients without its largest and its smallest values.

    Yin et al. 2018, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", Algorithm 1, option
    II, with beta = ``share``. Every upload counts once, as in the paper. Of K clients in a round beta K uploads,
    rounded down, are left out at each end, also where some do not arrive. That many clients cannot move a parameter
    beyond the values of the other clients. A round needs one upload more than it leaves out. Integer tensors are
    rounded. AggEnhance's "trimmed mean" is the aggregator `interval-mean`.
    """

    works_on = "extras"

    share: Annotated[Float, Field(ge=0, lt=0.5)] = 0.1
    """Share of the round's clients whose uploads are left out at each end, separately for each parameter."""

    def require_possible(self, cohort: int) -> None:
        """Raise :class:`FedblendError` for a share above 0 that would leave out no upload."""
        if self.share > 0 and not self.trimmed(cohort):
            least = math.ceil(1000 / cohort) / 1000
            valid = f"from {least} to below 0.5, or 0" if cohort > 2 else "0, or a train.cohort of 3 or more"
            raise FedblendError(
                f"method.aggregator.share: {self.share} of a train.cohort of {cohort} is less than one client, so that "
                f"nothing would be left out; valid: {valid}"
            )

    def trimmed(self, uploads: int) -> int:
        """The number of uploads that are left out at each end, of ``uploads``.

        >>> TrimmedMean(share=0.29).trimmed(100), TrimmedMean(share=0.49).trimmed(2)
        (29, 0)
        """
        # Rounded first, because 0.29 * 100 is below 29 in floating point.
        return min(int(round(self.share * uploads, 9)), (uploads - 1) // 2)

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        counted = counting(uploads)
        return _means_of_order(counted, self.trimmed(len(counted)))

    def for_round(self, work: LocalWork) -> Aggregator:
        """The aggregator that leaves out as many uploads as the round's clients demand."""
        return _TrimmedMeanOf(self, work.clients) if work.clients else self


class _TrimmedMeanOf(Aggregator):
    """The trimmed mean in a round of ``clients`` clients, whatever number of uploads has arrived."""

    name = TrimmedMean.name

    def __init__(self, of: TrimmedMean, clients: int) -> None:
        self.of, self.clients = of, clients

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        """The trimmed means. Raises :class:`FedblendError` for too few uploads."""
        counted, trimmed = counting(uploads), self.of.trimmed(self.clients)
        if len(counted) <= 2 * trimmed:
            raise FedblendError(
                f"method.aggregator.share: {self.of.share} of {self.clients} clients leaves out {trimmed} uploads at "
                f"each end and needs {2 * trimmed + 1}, but valid uploads are {len(counted)}; valid: a smaller share, "
                "or a larger train.cohort"
            )
        return _means_of_order(counted, trimmed)


def _means_of_order(uploads: list[Tensors], trimmed: int) -> dict[str, torch.Tensor]:
    """The mean of each parameter without its ``trimmed`` smallest and largest values."""
    return {
        name: as_stored(mean_of_order([u[name] for u in uploads], trimmed, len(uploads) - trimmed), tensor.dtype)
        for name, tensor in uploads[0].items()
    }


@part("aggregator", "interval-mean")
class IntervalMean(Aggregator):
    """Average, separately for each parameter, the updates w_k - w that lie in [low, high].

    AggEnhance, section 4.2: "we apply the averaging operator to the updates in [-0.5, 0.5]". An update is taken to be
    a client's change w_k - w of the round's weights w; weights themselves are outside the interval wherever a
    normalisation scales by 1. The averaging operator is FedAvg's, weighted by samples, over the clients whose update
    lies in the interval. Without such a client the parameter is unchanged. Integer tensors (batch norm's counters) are
    no parameters and get the plain weighted mean. The trimmed mean by rank is the aggregator `trimmed-mean`.

    Hardly an update is outside [-0.5, 0.5], so that this reading is FedAvg. ``of`` has two others: the interval is of
    the weights w_k, or of how far an update is from the weighted mean of updates, in standard deviations over clients.
    """

    low: Bound = -0.5
    """Smallest update that is averaged."""
    high: Bound = 0.5
    """Largest update that is averaged."""
    of: Literal["updates", "weights", "deviations"] = "updates"
    """What must lie in the interval."""

    @pydantic.model_validator(mode="after")
    def _is_an_interval(self) -> IntervalMean:
        if not self.low < self.high:
            raise ValueError(f"low: {self.low} is not below high: {self.high}; valid: an interval such as [-0.5, 0.5]")
        return self

    def finish(self, partial: Any, weights: Tensors) -> dict[str, torch.Tensor]:
        uploads: Sequence[WeightedUpload] = [(tensors, weight) for tensors, weight in partial if weight > 0]
        return {
            name: self._parameter([u[name] for u, _ in uploads], [w for _, w in uploads], start.to(uploads[0][0][name]))
            if start.is_floating_point()
            else WeightedMean().aggregate(({name: tensors[name]}, weight) for tensors, weight in uploads)[name]
            for name, start in weights.items()
        }

    def _parameter(self, rows: list[torch.Tensor], shares: list[float], start: torch.Tensor) -> torch.Tensor:
        if self.of == "updates":
            return as_stored(mean_within(rows, shares, start, self.low, self.high), start.dtype)
        zero = torch.zeros_like(start)
        if self.of == "weights":
            any_within = torch.stack([(row >= self.low) & (row <= self.high) for row in rows]).any(0)
            made = mean_within(rows, shares, zero, self.low, self.high).where(any_within, start)
        else:
            stacked, share = torch.stack(rows), torch.tensor(shares).to(start)
            share = (share / share.sum()).view(-1, *[1] * start.dim())
            mean = (share * stacked).sum(0)
            spread = (share * (stacked - mean).square()).sum(0).sqrt().clamp(min=torch.finfo(start.dtype).tiny)
            made = mean + spread * mean_within([*((stacked - mean) / spread)], shares, zero, self.low, self.high)
        return as_stored(made, start.dtype)
