"""Tables of the page: a row for each method, a column for each result or cost."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from fedblend.report.columns import Column, MethodRow, best_row, bytes_column, metric_columns, result_columns
from fedblend.report.figures import phases_of
from fedblend.report.guarantees import Guarantee, shares_raw_samples
from fedblend.report.sections import DatasetSection
from fedblend.runs.groups import Group, Outcome
from fedblend.runs.summary import NOTHING, duration, plus_minus

MOST_LATE = 5  # Clients that are named as most often late


@dataclass(frozen=True)
class Cell:
    """A cell of the page: its text, the number it is sorted by (missing ones last), and whether it is the best."""

    text: str
    value: float | str | None = None
    best: bool = False


@dataclass(frozen=True)
class PageTable:
    """A table of the page: headings with their explanations, and the name and the cells of each method."""

    headings: list[tuple[str, str]]
    rows: list[tuple[str, list[Cell]]]


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


def section_tables(section: DatasetSection) -> dict[str, PageTable]:
    """The tables of a section by name; those without data are left out."""
    found = {
        "results": results_table(section.rows, section.baseline),
        "metrics": _page_table(section.rows, metric_columns(section.rows)),
        "bytes": bytes_table(section.rows),
        "clients": client_table(section.groups),
        "late": late_table(section.groups),
        "time": _page_table(section.rows, [_seconds_column(phase) for phase in phases_of(section.rows)]),
        "privacy": privacy_table(section.guarantees),
    }
    return {name: table for name, table in found.items() if table.headings and table.rows}


def results_table(rows: Sequence[MethodRow], baseline: str | None = None) -> PageTable:
    """The main table of one data set: a row for each method over its seeds, with differences to ``baseline``."""
    return _page_table(rows, [column for group in result_columns(rows, baseline) for column in group])


def bytes_table(rows: Sequence[MethodRow]) -> PageTable:
    """Megabytes up and down by kind."""
    columns = []
    for name in dict.fromkeys(name for row in rows for name in row):
        direction, _, kind = name.partition(".")
        if kind and direction in ("bytes_up", "bytes_down") and sum(row[name] for row in rows) > 0:
            way = direction.removeprefix("bytes_")
            columns.append(bytes_column(name, f"{kind} {way} (MB)", f"{kind} sent {way}, whole run"))
    return _page_table(rows, columns)


def client_table(groups: Sequence[Group]) -> PageTable:
    """Accuracies of the final model over clients with test samples of their own."""
    rows: list[MethodRow] = []
    for g in groups:
        tested = [o for o in g.counted if o.evaluated and o.evaluated[-1].clients is not None]
        if tested:
            by_seed = {o.seed: _over_clients([o]) for o in tested if o.finished}
            more = {"method": g.name, "by_seed": by_seed, "unsafe": shares_raw_samples(g.outcomes[0])}
            rows.append(_over_clients(tested) | more)
    sizes = dict.fromkeys(size for row in rows for size in row["sizes"])
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
    finals = [clients for o in outcomes if (clients := o.evaluated[-1].clients) is not None]
    row: MethodRow = {name: fmean(final[name] for final in finals) for name in ("tested", "mean", "std", "p10")}
    row["sizes"] = list(dict.fromkeys(size for final in finals for size in final.get("by_size", {})))
    for size in row["sizes"]:
        row[size] = fmean(final["by_size"][size]["mean"] for final in finals if size in final.get("by_size", {}))
    return row


def late_table(groups: Sequence[Group]) -> PageTable:
    """Clients that missed the deadlines of rounds, as means over rounds and runs; empty where none did."""
    rows: list[MethodRow] = []
    for g in groups:
        records = [record for o in g.counted for record in o.records if record.cohort]
        late = Counter(client for record in records for client in record.late or ())
        totals = {
            "late": late.total(),
            "uploads": sum(record.uploads or 0 for record in records),
            "stale": sum(len(record.stale or ()) for record in records),
        }
        row = {name: total / max(1, len(records)) for name, total in totals.items()}
        often = ", ".join(f"{client} ({times}x)" for client, times in late.most_common(MOST_LATE)) or NOTHING
        rows.append(row | {"method": g.name, "often": often, "by_seed": {}, "unsafe": False})

    def number(name: str, heading: str, explanation: str) -> Column:
        return Column(heading, lambda row: plus_minus(row[name], digits=1), lambda row: row[name], 0, explanation)

    columns = [
        number("late", "late a round", "clients that missed the deadline with some of their training"),
        number("uploads", "uploads a round", "uploads that counted"),
        number("stale", "of earlier rounds", "uploads among these that were made in earlier rounds"),
        Column("most often late", lambda row: str(row["often"]), lambda row: math.nan, 0, "clients, with their times"),
    ]
    return _page_table(rows if any(row["late"] for row in rows) else [], columns)


def privacy_table(found: Sequence[Guarantee]) -> PageTable:
    """What is guaranteed about the payloads of each method with any protection."""
    headings = ["what left the clients", "protects", "(ε, δ)", "in words"]
    rows = [(one.method, [Cell(one.what), Cell(one.unit), Cell(one.text), Cell(one.words)]) for one in found]
    return PageTable([(heading, "") for heading in headings], rows)


def _seconds_column(phase: str) -> Column:
    def value(row: MethodRow) -> float:
        return float(row[f"seconds.{phase}"])

    return Column(f"{phase} (s)", lambda row: duration(value(row)), value, 0, "seconds of the whole run")


def _percent_column(name: str, heading: str, explanation: str, sign: int = 0) -> Column:
    def value(row: MethodRow) -> float:
        return row.get(name, math.nan)

    return Column(heading, lambda row: plus_minus(100 * value(row), digits=1), value, sign, explanation)
