"""Robust aggregators: median, trimmed means and Krum, which leave out extreme values or extreme uploads."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field, Strict

from fedblend.core.aggregator import Aggregator, LocalWork, Tensors, WeightedUpload, counting
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, Int, part
from fedblend.methods.aggregators.mean import WeightedMean, as_stored

CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 26
"""Numbers of all uploads that are processed at a time. As float32 they fill half of a core's second-level cache, or 256
MB on a GPU."""

FEWEST = 3  # Uploads beyond 2 f that Krum needs: 2 f + 2 < n (Blanchard et al. 2017, proposition 4.2)

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


@part("aggregator", "krum")
class Krum(Aggregator):
    """Select the one upload that is nearest to its n - f - 2 nearest neighbours, unchanged.

    Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", section 4. The
    score of an upload is the sum of its squared distances to its n - f - 2 nearest other uploads; f is ``byzantine``.
    The lowest score is selected; of equal scores, the client with the lowest number. Krum needs n >= 2 f + 3 uploads.
    An upload that is refused for what it holds, such as NaN, is one of the f, so that f is smaller in that round; one
    that does not arrive is not. Every upload counts once, independent of its number of samples, as in the paper.
    Integer tensors (batch norm's counters) are no parameters and are left out of distances.
    """

    works_on = "extras"

    byzantine: Annotated[Int, Field(ge=0)] = 1
    """Clients of a round, f, that may send anything; `train.cohort` must be 2 f + 3 or more."""

    def require_possible(self, cohort: int) -> None:
        """Raise :class:`FedblendError` if a cohort is too small for ``byzantine``."""
        _require_byzantine(self.byzantine, cohort, "train.cohort is")

    def for_round(self, work: LocalWork) -> Krum:
        return replace(self, byzantine=max(0, self.byzantine - work.invalid))

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        counted = counting(uploads)
        selected = counted[by_score(counted, self.byzantine)[0]]
        # Copies, because an upload may be a view of the memory of all clients of a stack.
        return {name: tensor.clone() for name, tensor in selected.items()}


@part("aggregator", "multi-krum")
class MultiKrum(Krum):
    """Average the m uploads with Krum's lowest scores (Blanchard et al. 2017, section 4); see `krum`.

    m = 1 is Krum. The paper allows m up to n, which is the plain mean. Here m is at most n - f, because a larger m
    would always include uploads that Krum is meant to exclude. AggregaThor takes m = n - f - 2. Every upload counts
    once; Flower weights the selected ones by samples. Integer tensors are rounded.
    """

    kept: Count | None = None
    """Uploads that are averaged, m (default: all but `byzantine`); never more than the uploads received less
    `byzantine`.
    """

    def require_possible(self, cohort: int) -> None:
        """Raise :class:`FedblendError` if a cohort is too small for ``byzantine`` or for ``kept``."""
        super().require_possible(cohort)
        if self.kept is not None and self.kept > cohort - self.byzantine:
            raise FedblendError(
                f"method.aggregator.kept: {self.kept} of a train.cohort of {cohort} would keep some of the byzantine = "
                f"{self.byzantine} clients; valid: 1 to {cohort - self.byzantine}"
            )

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        counted = counting(uploads)
        most = len(counted) - self.byzantine
        selected = by_score(counted, self.byzantine)[: min(self.kept or most, most)]
        # In order of client, so that the sum does not depend on the scores.
        return WeightedMean().aggregate((counted[i], 1.0) for i in sorted(selected))


def by_score(uploads: Sequence[Tensors], byzantine: int) -> list[int]:
    """The numbers of the uploads, lowest score first. Raises :class:`FedblendError` if they are too few."""
    _require_byzantine(byzantine, len(uploads), "valid uploads are")
    distances = torch.zeros(len(uploads), len(uploads), dtype=torch.float64)
    for name, tensor in uploads[0].items():
        if tensor.is_floating_point():
            distances += squared_distances([upload[name] for upload in uploads])
    order: list[int] = scores(distances, byzantine).argsort(stable=True).tolist()
    return order


def scores(distances: torch.Tensor, byzantine: int) -> torch.Tensor:
    """Each upload's sum of squared distances to its n - f - 2 nearest others, from those of all pairs [n, n]."""
    to_others = distances.clone().fill_diagonal_(torch.inf)
    return to_others.sort(1).values[:, : len(to_others) - byzantine - 2].sum(1)


def _require_byzantine(byzantine: int, uploads: int, subject: str) -> None:
    """Raise :class:`FedblendError` if the uploads are too few for ``byzantine``; ``subject`` names them."""
    needed = 2 * byzantine + FEWEST
    if uploads < needed:
        valid = f"0 to {(uploads - FEWEST) // 2}" if uploads >= FEWEST else f"a train.cohort of {needed} or more"
        raise FedblendError(
            f"method.aggregator.byzantine: {byzantine} needs {needed} uploads a round or more, 2 byzantine + {FEWEST}, "
            f"but {subject} {uploads}; valid: {valid}"
        )


# Computations over the uploads of a cohort, some parameters at a time: a row is a client's tensor. -------------


def chunks(rows: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parameters of all rows, stacked as [rows, some], with their slice of the flattened rows."""
    flat = [row.reshape(-1) for row in rows]
    width = max(1, (CPU_CHUNK if flat[0].device.type == "cpu" else GPU_CHUNK) // len(flat))
    for start in range(0, len(flat[0]), width):
        place = slice(start, start + width)
        yield place, torch.stack([row[place] for row in flat])


def mean_of_order(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """For each parameter the mean of its ``low``-th to ``high - 1``-th smallest values over the rows, counted from 0.

    The result has the rows' shape, in float32 where they are float32, else in float64. All numbers must be finite.
    """
    out = torch.empty(rows[0].numel(), dtype=_precision(rows[0]), device=rows[0].device)
    for place, chunk in chunks(rows):
        values = chunk.to(out.dtype)
        if values.device.type == "cpu":
            # NumPy sorts short rows with vector instructions (benchmarks/aggregators.py).
            ordered = torch.from_numpy(np.sort(values.t().contiguous().numpy(), axis=1)).t()
        else:
            ordered = values.sort(0).values
        out[place] = ordered[low:high].mean(0, dtype=torch.float64)
    return out.view(rows[0].shape)


def squared_distances(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """sum (row_i - row_j)^2 of all pairs, float64 [rows, rows], on the CPU.

    The sums are of differences. A matrix product would compute <i, i> + <j, j> - 2 <i, j>, which loses small
    differences of two uploads that are far from the origin.
    """
    number = len(rows)
    above = torch.zeros(number * (number - 1) // 2, dtype=torch.float64, device=rows[0].device)
    for _, chunk in chunks(rows):
        above += torch.pdist(chunk.to(_precision(chunk))).double().square()
    found = torch.zeros(number, number, dtype=torch.float64)
    i, j = torch.triu_indices(number, number, 1)
    found[i, j] = above.cpu()
    return found + found.t()


def mean_within(
    rows: Sequence[torch.Tensor], weights: Sequence[float], origin: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """``origin`` plus the weighted mean of the differences row - origin in [low, high]; ``origin`` without any.

    The result has the rows' shape, in float32 where they are float32, else in float64.
    """
    shares = torch.tensor(weights, dtype=torch.float64, device=origin.device)
    start = origin.reshape(-1).double()
    out = torch.empty(len(start), dtype=_precision(origin), device=origin.device)
    for place, chunk in chunks(rows):
        updates = chunk.double() - start[place]
        counted = ((updates >= low) & (updates <= high)) * shares[:, None]
        weight = counted.sum(0)
        out[place] = start[place] + (counted * updates).sum(0) / weight.where(weight > 0, 1.0)
    return out.view(origin.shape)


def _precision(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype == torch.float32 else torch.float64
