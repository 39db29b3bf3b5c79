"""Krum and Multi-Krum: the uploads that have the nearest neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

import torch
from pydantic import Field

from fedblend.core.aggregator import Aggregator, Tensors, WeightedUpload, counting
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Int, part
from fedblend.methods.aggregators.kernels import squared_distances
from fedblend.methods.aggregators.mean import WeightedMean

FEWEST = 3
"""Uploads beyond 2 f that Krum needs: 2 f + 2 < n (Blanchard et al. 2017, proposition 4.2)."""


@part("aggregator", "krum")
class Krum(Aggregator):
    """The one upload that is nearest to its n - f - 2 nearest neighbours, unchanged.

    Blanchard et al. 2017, "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", section 4: the
    score of an upload is the sum of its squared distances to its n - f - 2 nearest others, f being ``byzantine``;
    the lowest score wins, and of equal ones the client of the lowest number. Needs n >= 2 f + 3 uploads. Every upload
    counts once, however many samples it was trained on, as in the paper. Whole-number tensors (batch norm's
    counters) are no parameters and take no part in distances.
    """

    byzantine: Annotated[Int, Field(ge=0)] = 1
    """Clients of a round, f, that may send anything; `train.cohort` must be 2 f + 3 or more."""

    def require_possible(self, cohort: int) -> None:
        """Refuse more such clients than a cohort can have."""
        _require_byzantine(self.byzantine, cohort, "train.cohort is")

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        """The winner's tensors."""
        kept = counting(uploads)
        winner = kept[nearest(kept, self.byzantine)[0]]
        # Copies: an upload may be a view of all clients of a stack, which would live as long as it.
        return {name: tensor.clone() for name, tensor in winner.items()}


@part("aggregator", "multi-krum")
class MultiKrum(Aggregator):
    """The mean of the m uploads with Krum's lowest scores (Blanchard et al. 2017, section 4); see `krum`.

    m = 1 is Krum. The paper lets m be up to n, where it is the plain mean; here m is at most n - f, since more
    would always take in what Krum is to keep out. Every upload counts once. Whole-number tensors are rounded.
    """

    byzantine: Annotated[Int, Field(ge=0)] = 1
    """Clients of a round, f, that may send anything; `train.cohort` must be 2 f + 3 or more."""
    kept: Count | None = None
    """Uploads that are averaged, m; unless given, all but `byzantine`. Where fewer arrive, at most all but those."""

    def require_possible(self, cohort: int) -> None:
        """Refuse more such clients than a cohort can have, and a mean that must take them in."""
        _require_byzantine(self.byzantine, cohort, "train.cohort is")
        if self.kept is not None and self.kept > cohort - self.byzantine:
            raise FedblendError(
                f"method.aggregator.kept: {self.kept} of a train.cohort of {cohort} would keep some of the byzantine = "
                f"{self.byzantine} clients; valid: 1 to {cohort - self.byzantine}"
            )

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        """The mean of the winners."""
        kept = counting(uploads)
        most = len(kept) - self.byzantine
        winners = nearest(kept, self.byzantine)[: min(self.kept or most, most)]
        # In order of client, so that the sum does not depend on the scores.
        return WeightedMean().aggregate((kept[i], 1.0) for i in sorted(winners))


def nearest(uploads: Sequence[Tensors], byzantine: int) -> list[int]:
    """The places of uploads by their score, lowest first. Raises :class:`FedblendError` if they are too few."""
    _require_byzantine(byzantine, len(uploads), "good ones are")
    distances = torch.zeros(len(uploads), len(uploads), dtype=torch.float64)
    for name, tensor in uploads[0].items():
        if tensor.is_floating_point():
            distances += squared_distances([upload[name] for upload in uploads])
    order: list[int] = scores(distances, byzantine).argsort(stable=True).tolist()
    return order


def scores(distances: torch.Tensor, byzantine: int) -> torch.Tensor:
    """Each upload's sum of squared distances to its n - f - 2 nearest others, from those of all pairs [n, n]."""
    others = distances.clone().fill_diagonal_(torch.inf)
    return others.sort(1).values[:, : len(others) - byzantine - 2].sum(1)


def _require_byzantine(byzantine: int, uploads: int, there_are: str) -> None:
    """Raise :class:`FedblendError` unless Krum can stand so many."""
    needed = 2 * byzantine + FEWEST
    if uploads < needed:
        valid = f"0 to {(uploads - FEWEST) // 2}" if uploads >= FEWEST else f"a train.cohort of {needed} or more"
        raise FedblendError(
            f"method.aggregator.byzantine: {byzantine} needs {needed} uploads a round or more, 2 byzantine + {FEWEST}, "
            f"but {there_are} {uploads}; valid: {valid}"
        )
