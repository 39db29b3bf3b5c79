"""Tables of the page: a row for each method, a column for each result or cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedblend.report.columns import (
    Column,
    MethodRow,
    best_row,
    chosen_columns,
    difference_columns,
    evaluated_alike,
    final_score,
    last_evaluations,
    measure_of,
    metric_columns,
    rounds_of_all_seeds,
    times,
)
from fedblend.report.figures import phases_of
from fedblend.report.privacy import Guarantee, shares_raw_samples
from fedblend.runs.groups import Group, Outcome
from fedblend.runs.summary import (
    MEGABYTE,
    NOTHING,
    duration,
    megabytes,
    plus_minus,
    rounds_to_target,
    score,
    target_text,
)


@dataclass(frozen=True)
class Cell:
    """A cell of the page: its text, the number it is sorted by (missing ones last), and whether it is the best."""

    text: str
    value: float | str | None = None
    best: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table of the page."""

    headings: list[tuple[str, str]]
    """Headings with their explanations."""
    rows: list[tuple[str, list[Cell]]]
    """The name and the cells of each method."""


def _page_table(rows: Sequence[MethodRow], columns: Sequence[Column]) -> PageTable:
    best = [best_row(rows, column) for column in columns]
    lines = []
    for i, row in enumerate(rows):
        cells = []
        for column, winner in zip(columns, best, strict=True):
            number = column.value(row)
            cells.append(Cell(column.text(row), number if math.isfinite(number) else None, i == winner))
        lines.append((str(row["method"]), cells))
    return PageTable([(column.heading, column.explanation) for column in columns], lines)


def results_table(rows: Sequence[MethodRow], baseline: str | None = None) -> PageTable:
    """The main table of one data set: a row for each method over its seeds, with differences to ``baseline``."""
    accuracy = measure_of(rows) == "accuracy"
    sign = 1 if accuracy else -1
    over_evaluations = sign if evaluated_alike(rows) else 0
    last, mean_of_last = last_evaluations(rows)
    unit, time = times(rows)

    def best_score(row: MethodRow) -> str:
        return score(row["measure"], row["best"], row["best_std"])

    def memory(row: MethodRow) -> str:
        return NOTHING if math.isnan(row["peak_memory"]) else f"{row['peak_memory'] / MEGABYTE:,.0f}"

    columns = [
        Column("seeds", lambda row: str(row["seeds"]), lambda row: row["seeds"], 0,
               "finished runs averaged, or all where none is finished"),
        Column(f"final {'accuracy (%)' if accuracy else 'loss'}", final_score, lambda row: row["final"], sign,
               "after the last round; mean ± sample deviation over seeds"),
        *difference_columns(rows, baseline),
        Column(last, mean_of_last, lambda row: row["last"], over_evaluations,
               "the mean of the last evaluations, ten at most"),
        *(chosen_columns(rows) or [
            Column("best", best_score, lambda row: row["best"], over_evaluations,
                   "the best of all evaluations; it was selected on the test samples"),
        ]),
    ]  # fmt: skip
    targets = {target_text(row) for row in rows if not math.isnan(row["target"])}
    if targets:
        to = f"rounds to {targets.pop()}" if len(targets) == 1 else "rounds to target"
        where = " on the validation samples" if any(row["target_on_validation"] for row in rows) else ""
        why = f"the first evaluated round that reached it{where}, over the seeds that did"
        columns.append(Column(to, rounds_to_target, rounds_of_all_seeds, -abs(over_evaluations), why))
    columns += [
        _bytes_column("bytes_up", "up (MB)", "sent by all clients together, in the whole run", -1),
        _bytes_column("bytes_down", "down (MB)", "sent to all clients together, in the whole run", -1),
        Column(f"time ({unit})", time, lambda row: row["seconds"], -1, "wall clock of a whole run, with evaluation"),
        Column("peak memory (MB)", memory, lambda row: row["peak_memory"], 0, "the largest of the run's process"),
        Column("status", lambda row: str(row["states"]), lambda row: row["unfinished"], 0, "whether all runs finished"),
    ]
    return _page_table(rows, columns)


def metrics_table(rows: Sequence[MethodRow]) -> PageTable | None:
    """The final values of the experiment's metrics; ``None`` without any. They would make the main table too wide."""
    columns = metric_columns(rows)
    return _page_table(rows, columns) if columns else None


def time_table(rows: Sequence[MethodRow]) -> PageTable | None:
    """Seconds of a run by phase, the longest phase first; ``None`` where no time was recorded."""
    columns = [_seconds_column(f"seconds.{phase}") for phase in phases_of(rows)]
    return _page_table(rows, columns) if columns else None


def bytes_table(rows: Sequence[MethodRow]) -> PageTable | None:
    """Megabytes up and down by kind; ``None`` where nothing was sent."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        direction, _, kind = name.partition(".")
        if kind and direction in ("bytes_up", "bytes_down") and sum(row[name] for row in rows) > 0:
            way = direction.removeprefix("bytes_")
            columns.append(_bytes_column(name, f"{kind} {way} (MB)", f"{kind} sent {way}, whole run", 0))
    return _page_table(rows, columns) if columns else None


def client_table(groups: Sequence[Group]) -> PageTable | None:
    """Accuracies of the final model over clients with test samples of their own; ``None`` where none has."""
    rows: list[MethodRow] = []
    for g in groups:
        tested = [o for o in g.counted if o.evaluated and o.evaluated[-1].clients is not None]
        if tested:
            by_seed = {o.seed: _over_clients([o]) for o in tested if o.finished}
            more = {"method": g.name, "by_seed": by_seed, "unsafe": shares_raw_samples(g.outcomes[0])}
            rows.append(_over_clients(tested) | more)
    sizes = dict.fromkeys(size for row in rows for size in row["sizes"])
    if not rows:
        return None
    columns = [
        Column("clients tested", lambda row: plus_minus(row["tested"], digits=0), lambda row: row["tested"], 0,
               "clients with test samples of their own"),
        _percent_column("mean", "mean (%)", "over clients, each with the same weight", 1),
        _percent_column("std", "deviation (%)", "between clients", -1),
        _percent_column("p10", "10th percentile (%)", "a tenth of the clients is at or below it", 1),
    ]  # fmt: skip
    columns += [
        _percent_column(size, f"{size} samples (%)", f"mean over clients with {size} samples") for size in sizes
    ]
    return _page_table(rows, columns)


def _over_clients(outcomes: Sequence[Outcome]) -> MethodRow:
    """Accuracies over clients, and by the number of their samples (``sizes``), as means over runs."""
    finals = [clients for o in outcomes if (clients := o.evaluated[-1].clients) is not None]
    row: MethodRow = {name: fmean(final[name] for final in finals) for name in ("tested", "mean", "std", "p10")}
    row["sizes"] = list(dict.fromkeys(size for final in finals for size in final.get("by_size", {})))
    for size in row["sizes"]:
        row[size] = fmean(final["by_size"][size]["mean"] for final in finals if size in final.get("by_size", {}))
    return row


def privacy_table(found: Sequence[Guarantee]) -> PageTable | None:
    """What is guaranteed about the payloads of each method; ``None`` where no method adds noise."""
    headings = ["what left the clients", "protects", "(ε, δ)", "in words"]
    rows = [(one.method, [Cell(one.what), Cell(one.unit), Cell(one.text), Cell(one.words)]) for one in found]
    return PageTable([(heading, "") for heading in headings], rows) if rows else None


def _bytes_column(name: str, heading: str, explanation: str, sign: int) -> Column:
    def value(row: MethodRow) -> float:
        return float(row[name] / MEGABYTE)

    return Column(heading, lambda row: megabytes(row[name], ""), value, sign, explanation, exact=True)


def _seconds_column(name: str) -> Column:
    heading = f"{name.removeprefix('seconds.')} (s)"
    return Column(heading, lambda row: duration(row[name]), lambda row: row[name], 0, "seconds of the whole run")


def _percent_column(name: str, heading: str, explanation: str, sign: int = 0) -> Column:
    def value(row: MethodRow) -> float:
        return row.get(name, math.nan)

    return Column(heading, lambda row: plus_minus(100 * value(row), digits=1), value, sign, explanation)
