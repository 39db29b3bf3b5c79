"""From curves to what is drawn: a mean line and a band for each method's finished seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedblend.runs.summary import MEGABYTE

if TYPE_CHECKING:
    import pandas as pd

BAND_TEXT = "Line: mean over seeds. Band: from the lowest to the highest seed (no band: one seed)."


@dataclass(frozen=True)
class Line:
    """One line of a figure, a point a round: the mean over ``seeds`` and the range they span.

    ``megabytes`` sent up and down, all clients together, and ``clock``, the seconds of clients that compute side by
    side over their channel, from the beginning to each round. An unfinished run
    is a line of its own with one seed.
    """

    method: str
    seeds: tuple[int, ...]
    unfinished: bool
    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    megabytes: list[float]
    clock: list[float]

    @property
    def name(self) -> str:
        """What the legend calls it."""
        return f"{self.method}, unfinished (seed {self.seeds[0]})" if self.unfinished else self.method


def lines(curves: pd.DataFrame, column: str) -> list[Line]:
    """The lines of one column of :func:`~fedblend.runs.summary.curves`, in order of method.

    Of the finished runs of a method those rounds are kept that every one of them has, so that no mean
    jumps where a seed begins or ends. Methods without any value have no line.
    """
    made = []
    for method, of_method in curves.dropna(subset=[column]).groupby("method", sort=False):
        finished = of_method[of_method["finished"]]
        if len(finished):
            made.append(_line(str(method), finished, column, False))
        for _, run in of_method[~of_method["finished"]].groupby(["study", "run"], sort=False):
            made.append(_line(str(method), run, column, True))
    return made


def _line(method: str, points: pd.DataFrame, column: str, unfinished: bool) -> Line:
    seeds = points["seed"].nunique()
    points = points.assign(megabytes=(points["bytes_up"] + points["bytes_down"]) / MEGABYTE)
    by_round = points.groupby("round").agg(
        mean=(column, "mean"),
        low=(column, "min"),
        high=(column, "max"),
        megabytes=("megabytes", "mean"),
        clock=("clock", "mean"),
        seeds=("seed", "nunique"),
    )
    by_round = by_round[by_round["seeds"] == seeds]
    return Line(
        method,
        tuple(sorted(points["seed"].unique().tolist())),
        unfinished,
        by_round.index.tolist(),
        *(by_round[name].tolist() for name in ("mean", "low", "high", "megabytes", "clock")),
    )
