"""Columns that the tables of the page and of the terminal share: a cell for each method over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.runs.groups import Group
from fedblend.runs.summary import MINUTE, NOTHING, averaged, duration, plus_minus, rows_of, score

MethodRow = dict[str, Any]
"""A method's row of :func:`~fedblend.runs.summary.table`, by column name."""

CellText = Callable[[MethodRow], str]
CellValue = Callable[[MethodRow], float]


@dataclass(frozen=True)
class Column:
    """A column of a table, with a cell for each method."""

    heading: str
    text: CellText
    """The text of a cell."""
    value: CellValue
    """The number by which cells are compared and sorted; NaN: none."""
    sign: int
    """1 where more is better, -1 where less is better, 0 where neither is."""
    explanation: str = ""


def method_rows(groups: Sequence[Group]) -> list[MethodRow]:
    """The rows of methods on one data set; a method that failed before its first round has NaN as scores."""
    scores = dict.fromkeys(("final", "last", "best", "chosen"), math.nan)
    return [row | scores if row["failed"] else row for row in rows_of(groups)]


def best_rows(rows: Sequence[MethodRow], text: CellText, value: CellValue, sign: int) -> set[int]:
    """The indices of the rows with the best value (largest by ``sign`` 1, smallest by -1), and those of equal text.

    Only methods with the largest number of finished seeds are compared. The set is empty if all compared cells have
    the same text, if there is none, or if ``sign`` is 0.
    """
    seeds = max((row["finished"] for row in rows), default=0)
    compared = [i for i, row in enumerate(rows) if row["finished"] == seeds > 0]
    values = {i: value(rows[i]) for i in compared if not math.isnan(value(rows[i]))}
    if not sign or not values:
        return set()
    best = max(values, key=lambda i: sign * values[i])
    equal = {i for i in values if text(rows[i]) == text(rows[best])}
    return equal if len(equal) < len(values) else set()


def measure_of(rows: Sequence[MethodRow]) -> str:
    """The measure of the methods of one data set: ``accuracy``, or ``loss`` in regression."""
    return next((row["measure"] for row in rows if row["seeds"]), "accuracy")


def final_score(row: MethodRow) -> str:
    """The final accuracy or loss, or "failed" where no run of the method made a round."""
    return "failed" if row["failed"] else score(row["measure"], row["final"], row["final_std"])


def last_evaluations(rows: Sequence[MethodRow]) -> tuple[str, CellText]:
    """Heading and cells of the mean of the last evaluations. Their number is in the heading if all methods share it."""
    evaluated = [row for row in rows if row["seeds"]]
    counts = {averaged(row) for row in [row for row in evaluated if not row["failed"]] or evaluated}

    def text(row: MethodRow) -> str:
        mean = score(row["measure"], row["last"], row["last_std"])
        return f"{mean} (n = {averaged(row)})" if len(counts) > 1 and not math.isnan(row["last"]) else mean

    return f"mean of last {next(iter(counts)) if len(counts) == 1 else 'n'}", text


def chosen_columns(rows: Sequence[MethodRow]) -> list[Column]:
    """The test score in the round that was best on validation; empty where no run has samples for validation."""
    if all(math.isnan(row["chosen"]) for row in rows):
        return []

    def text(row: MethodRow) -> str:
        if math.isnan(row["chosen"]):
            return NOTHING
        rounds = plus_minus(row["chosen_round"], digits=0 if len(row["chosen_by_seed"]) == 1 else 1)
        return f"{score(row['measure'], row['chosen'], row['chosen_std'])} (round {rounds})"

    why = "on the test samples, in the round that was best on the validation samples (the mean round over seeds)"
    sign = 1 if measure_of(rows) == "accuracy" else -1
    return [Column("best on validation", text, lambda row: row["chosen"], sign, why)]


def metric_columns(rows: Sequence[MethodRow]) -> list[Column]:
    """The final values of the experiment's metrics."""
    names = dict.fromkeys(name.removeprefix("metric.") for row in rows for name in row if name.startswith("metric."))
    means = [name for name in names if not (name.endswith("_std") and name.removesuffix("_std") in names)]

    def column(name: str) -> Column:
        def value(row: MethodRow) -> float:
            return math.nan if row["failed"] else float(row.get(f"metric.{name}", math.nan))

        def text(row: MethodRow) -> str:
            return plus_minus(value(row), row.get(f"metric.{name}_std", math.nan), 3)

        found = [sign for row in rows if not math.isnan(sign := float(row.get(f"larger.{name}", math.nan)))]
        why = "after the last round, on the test samples; mean ± sample deviation over seeds"
        return Column(name, text, value, -1 if found[:1] == [0.0] else 1, why)

    return [column(name) for name in means]


def times(rows: Sequence[MethodRow]) -> tuple[str, CellText]:
    """Unit and cells of the whole time: minutes, or seconds where a run took less than a minute."""
    minutes = all(row["seconds"] >= MINUTE for row in rows if row["seeds"])
    return "min" if minutes else "s", lambda row: duration(row["seconds"] / (MINUTE if minutes else 1))
