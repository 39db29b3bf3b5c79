"""The tables of the page: what each cell says, what it is sorted by, and which is the best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedblend.report.terminal import Row, best_of, final_score, last_evaluations, measure_of, rows_of, times
from fedblend.runs.groups import Group
from fedblend.runs.summary import MEGABYTE, NOTHING, duration, megabytes, plus_minus, rounds_to_target, score

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Cell:
    """What a cell says, the number it is sorted by (missing ones last), and whether it is the column's best."""

    text: str
    value: float | str | None = None
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """A table: headings with their explanations, and a row a method, whose name is the row's head."""

    headings: list[tuple[str, str]]
    rows: list[tuple[str, list[Cell]]]


Column = tuple[str, str, Callable[[Row], str], Callable[[Row], float], int]
"""Heading, explanation, what a cell says, what it is sorted by, and 1 or -1 where more or less is better."""


def _grid(rows: Sequence[Row], columns: Sequence[Column]) -> Grid:
    best = [best_of(rows, text, value, sign) for _, _, text, value, sign in columns]
    made = []
    for i, row in enumerate(rows):
        cells = []
        for (_, _, text, value, _), winners in zip(columns, best, strict=True):
            number = value(row)
            cells.append(Cell(text(row), None if math.isnan(number) else number, i in winners))
        made.append((str(row["method"]), cells))
    return Grid([(heading, why) for heading, why, *_ in columns], made)


def results(table: pd.DataFrame) -> Grid:
    """The main table of one data set: a row a method over its seeds."""
    rows = rows_of(table)
    measure = measure_of(rows)
    sign = 1 if measure == "accuracy" else -1
    last, mean_of_last = last_evaluations(rows)
    unit, time = times(rows)
    columns: list[Column] = [
        ("seeds", "finished runs averaged, or all where none is finished", *_seeds(), 0),
        (
            f"final {'accuracy (%)' if measure == 'accuracy' else 'loss'}",
            "after the last round; mean ± sample deviation over seeds",
            lambda row: final_score(row, row["measure"]),
            lambda row: row["final"],
            sign,
        ),
        (last, "the mean of the last evaluations, up to ten of them", mean_of_last, lambda row: row["last"], sign),
        ("best", "the best of all evaluations; it was picked on the test samples", *_scored("best"), sign),
    ]
    targets = {row["target"] for row in rows if not math.isnan(row["target"])}
    if targets:
        to = f"{100 * targets.pop():g} %" if len(targets) == 1 else "target"
        why = "the first evaluated round that reached it, over the seeds that did"
        columns.append((f"rounds to {to}", why, rounds_to_target, lambda row: row["target_round"], 0))
    columns += [
        ("up (MB)", "sent by all clients together, in the whole run", *_sent("bytes_up"), -1),
        ("down (MB)", "sent to all clients together, in the whole run", *_sent("bytes_down"), -1),
        (f"time ({unit})", "wall clock of a whole run, evaluation included", time, lambda row: row["seconds"], -1),
        ("peak memory (MB)", "largest of the process that made the run", *_memory(), 0),
        ("status", "whether all runs came to their end", *_status(), 0),
    ]
    return _grid(rows, columns)


def by_phase(table: pd.DataFrame) -> Grid | None:
    """Seconds of a run by phase, the longest first; ``None`` where no time was taken."""
    phases = [name for name in table.columns if str(name).startswith("seconds.") and table[name].sum() > 0]
    phases.sort(key=lambda name: -table[name].sum())
    columns: list[Column] = [
        (f"{name.removeprefix('seconds.')} (s)", "seconds of the whole run", *_taken(name), 0) for name in phases
    ]
    return _grid(rows_of(table), columns) if columns else None


def by_kind(table: pd.DataFrame) -> Grid | None:
    """Megabytes up and down by kind; ``None`` where nothing was sent."""
    columns: list[Column] = []
    for name in table.columns:
        direction, _, kind = str(name).partition(".")
        if kind and direction in ("bytes_up", "bytes_down") and table[name].sum() > 0:
            way = direction.removeprefix("bytes_")
            columns.append((f"{kind} {way} (MB)", f"{kind} sent {way}, whole run", *_sent(str(name)), 0))
    return _grid(rows_of(table), columns) if columns else None


def by_client(groups: Sequence[Group]) -> Grid | None:
    """Accuracies of the final model over clients that have tests of their own; ``None`` where none has."""
    rows: list[Row] = []
    sizes: dict[str, None] = {}
    for g in groups:
        finals = [o.evaluated[-1]["clients"] for o in g.counted if o.evaluated and "clients" in o.evaluated[-1]]
        if not finals:
            continue
        row: Row = {"method": g.name, "finished": sum(o.finished for o in g.outcomes)}
        for name in ("tested", "mean", "std", "p10"):
            row[name] = _mean([final[name] for final in finals])
        for size in dict.fromkeys(size for final in finals for size in final.get("by_size", {})):
            sizes[size] = None
            row[size] = _mean([final["by_size"][size]["mean"] for final in finals if size in final["by_size"]])
        rows.append(row)
    if not rows:
        return None
    columns: list[Column] = [
        ("clients tested", "clients with test samples of their own", *_plain("tested", 1, 0), 0),
        ("mean (%)", "over clients; each counts alike", *_plain("mean"), 1),
        ("deviation (%)", "between clients", *_plain("std"), -1),
        ("10th percentile (%)", "a tenth of the clients is at or below it", *_plain("p10"), 1),
    ]
    columns += [(f"{size} samples (%)", f"mean over clients with {size} samples", *_plain(size), 0) for size in sizes]
    return _grid(rows, columns)


def _seeds() -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    return lambda row: str(row["seeds"]), lambda row: row["seeds"]


def _status() -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    return lambda row: str(row["states"]), lambda row: row["unfinished"]


def _scored(name: str) -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    return lambda row: score(row["measure"], row[name], row[f"{name}_std"]), lambda row: row[name]


def _sent(name: str) -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    return lambda row: megabytes(row[name], ""), lambda row: row[name] / MEGABYTE


def _taken(name: str) -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    return lambda row: duration(row[name]), lambda row: row[name]


def _memory() -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    def text(row: Row) -> str:
        return NOTHING if math.isnan(row["peak_memory"]) else f"{row['peak_memory'] / MEGABYTE:,.0f}"

    return text, lambda row: row["peak_memory"]


def _plain(name: str, factor: float = 100, digits: int = 1) -> tuple[Callable[[Row], str], Callable[[Row], float]]:
    def value(row: Row) -> float:
        return row.get(name, math.nan)

    return lambda row: plus_minus(factor * value(row), digits=digits), value


def _mean(values: Sequence[Any]) -> float:
    return sum(values) / len(values) if values else math.nan
