"""Krum and Multi-Krum: the uploads with the smallest distances to their nearest neighbours."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Annotated

import torch
from pydantic import Field

from fedblend.core.aggregator import Aggregator, LocalWork, Tensors, WeightedUpload, counting
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Int, part
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.aggregators.rows import squared_distances

FEWEST = 3  # Uploads beyond 2 f that Krum needs: 2 f + 2 < n (Blanchard et al. 2017, proposition 4.2)


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
