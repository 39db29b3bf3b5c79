"""Tables of runs: those of the page, the comparison in the terminal, and accuracies at each site."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as Renderables
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedblend.core.errors import FedblendError
from fedblend.report.privacy import PRIVACY_NOTE, Guarantee, guarantees, shares_raw_samples
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, by_data
from fedblend.runs.summary import (
    MEGABYTE,
    MINUTE,
    NOTHING,
    averaged,
    duration,
    megabytes,
    plus_minus,
    progress,
    rounds_to_target,
    rows_of,
    score,
    status,
    target_text,
)

if TYPE_CHECKING:
    import pandas as pd

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


def method_rows(table: pd.DataFrame) -> list[MethodRow]:
    """The rows of a table; a method that failed before its first round has NaN as scores."""
    return [_without_scores_if_failed({str(name): v for name, v in row.items()}) for row in table.to_dict("records")]


def _without_scores_if_failed(row: MethodRow) -> MethodRow:
    return row | dict.fromkeys(("final", "last", "best", "chosen"), math.nan) if row["failed"] else row


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


def _measure_of(rows: Sequence[MethodRow]) -> str:
    """The measure of the methods of one data set: ``accuracy``, or ``loss`` in regression."""
    return next((row["measure"] for row in rows if row["seeds"]), "accuracy")


def _final_score(row: MethodRow) -> str:
    """The final accuracy or loss, or "failed" where no run of the method made a round."""
    return "failed" if row["failed"] else score(row["measure"], row["final"], row["final_std"])


def _last_evaluations(rows: Sequence[MethodRow]) -> tuple[str, CellText]:
    """Heading and cells of the mean of the last evaluations. Their number is in the heading if all methods share it."""
    evaluated = [row for row in rows if row["seeds"]]
    counts = {averaged(row) for row in [row for row in evaluated if not row["failed"]] or evaluated}

    def text(row: MethodRow) -> str:
        mean = score(row["measure"], row["last"], row["last_std"])
        return f"{mean} (n = {averaged(row)})" if len(counts) > 1 and not math.isnan(row["last"]) else mean

    return f"mean of last {next(iter(counts)) if len(counts) == 1 else 'n'}", text


def _chosen_columns(rows: Sequence[MethodRow]) -> list[Column]:
    """The test score in the round that was best on validation; empty where no run has samples for validation."""
    if all(math.isnan(row["chosen"]) for row in rows):
        return []

    def text(row: MethodRow) -> str:
        if math.isnan(row["chosen"]):
            return NOTHING
        rounds = plus_minus(row["chosen_round"], digits=0 if len(row["chosen_by_seed"]) == 1 else 1)
        return f"{score(row['measure'], row['chosen'], row['chosen_std'])} (round {rounds})"

    why = "on the test samples, in the round that was best on the validation samples (the mean round over seeds)"
    sign = 1 if _measure_of(rows) == "accuracy" else -1
    return [Column("best on validation", text, lambda row: row["chosen"], sign, why)]


def _metric_columns(rows: Sequence[MethodRow]) -> list[Column]:
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


def _times(rows: Sequence[MethodRow]) -> tuple[str, CellText]:
    """Unit and cells of the whole time: minutes, or seconds where a run took less than a minute."""
    minutes = all(row["seconds"] >= MINUTE for row in rows if row["seeds"])
    return "min" if minutes else "s", lambda row: duration(row["seconds"] / (MINUTE if minutes else 1))


# In the terminal -------------------------------------------------------------------------------------------------


def comparison_tables(runs: Sequence[RunDirectory], reasons: bool = True) -> RenderableType:
    """A table for each data set with a row for each method over its seeds; the best value of a column is bold.

    Notes below a table name unfinished runs (marked with an asterisk), with ``reasons`` why they are unfinished, and
    methods that share raw samples. Raises :class:`FedblendError` if there is no run to compare.
    """
    if not runs:
        raise FedblendError("compare: no runs given; name run directories, or folders of studies")
    sets = by_data(runs)
    titles = {name: name if len(sets) > 1 else None for name in sets}
    return Renderables(*(_comparison_table(groups, titles[name], reasons) for name, groups in sets.items()))


NamedCells = tuple[str, list[Text]]
"""The heading and the cells of a column."""

UNLIMITED = 10_000
"""A width in columns in which every table fits."""


@dataclass(frozen=True)
class WrappedTable:
    """A table in the terminal whose columns continue below, beside the rows' names, where they do not fit its width."""

    heading: str
    """The heading of the rows' names."""
    names: list[str]
    columns: list[NamedCells]
    title: str | None = None
    notes: str = ""
    """Text below the table."""
    footer: int = 0
    """Number of last rows below a line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        begin, title = 0, self.title
        while begin < len(self.columns):
            end = begin + 1
            while end < len(self.columns) and self._fits(self.columns[begin : end + 1], console, options):
                end += 1
            table = self._table(self.columns[begin:end])
            table.title = Text(title) if title else None
            yield table
            begin, title = end, None
        if self.notes:
            yield Text(self.notes, style="table.caption")

    def _fits(self, columns: Sequence[NamedCells], console: Console, options: ConsoleOptions) -> bool:
        needed = Measurement.get(console, options.update(width=UNLIMITED), self._table(columns)).minimum
        return needed <= options.max_width

    def _table(self, columns: Sequence[NamedCells]) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0), header_style="bold")
        table.title_justify, table.title_style = "left", "bold"
        # The least width keeps names readable where the other columns take the rest.
        table.add_column(self.heading, overflow="fold", vertical="bottom", min_width=10)
        for heading, cells in columns:
            # Text and not str, here and below: Rich would read square brackets in a label as markup.
            texts = [Text(heading), *cells]
            width = max(cell_len(line) for text in texts for line in text.plain.splitlines())
            table.add_column(texts[0], justify="right", no_wrap=True, vertical="bottom", min_width=width)
        for i, name in enumerate(self.names):
            if i == len(self.names) - self.footer:
                table.add_section()
            table.add_row(Text(name), *(cells[i] for _, cells in columns))
        return table


def _comparison_table(groups: Sequence[Group], title: str | None, reasons: bool) -> WrappedTable:
    """The table of one data set."""
    stated = {one.method: one for one in guarantees(groups)}  # the last one of a method covers all its payloads
    rows = [_without_scores_if_failed(row) | {"guarantee": stated.get(row["method"])} for row in rows_of(groups)]
    notes = [f"* {g.name}: {status(g) if reasons else progress(g)}" for g in groups if g.unfinished]
    notes += [f"! {g.name}: {PRIVACY_NOTE}, it shares raw samples" for g in groups if shares_raw_samples(g.outcomes[0])]
    if (only := groups[0].outcomes[0].only_class) is not None:
        notes.append(f"! all samples are of one class, '{only}': there is nothing to classify")
    notes += list(dict.fromkeys(map(_epsilon_note, stated.values())))
    columns = []
    for column in _comparison_columns(rows):
        best = best_rows(rows, column.text, column.value, column.sign)
        cells = [Text(column.text(row), style="bold" if i in best else "") for i, row in enumerate(rows)]
        columns.append((column.heading, cells))
    names = [row["method"] + (" *" if row["unfinished"] else "") for row in rows]
    return WrappedTable("method", names, columns, title, "\n".join(notes))


def _comparison_columns(rows: Sequence[MethodRow]) -> list[Column]:
    accuracy = _measure_of(rows) == "accuracy"
    sign = 1 if accuracy else -1
    last, mean_of_last = _last_evaluations(rows)
    unit, time = _times(rows)
    columns = [
        Column("seeds", lambda row: str(row["seeds"]), lambda row: math.nan, 0),
        Column("accuracy\n% ± std" if accuracy else "loss\n± std", _final_score, lambda row: row["final"], sign),
        Column(last.replace("of last", "of\nlast"), mean_of_last, lambda row: row["last"], sign),
    ]
    columns += [replace(one, heading=one.heading.replace(" on ", "\non ")) for one in _chosen_columns(rows)]
    columns += _metric_columns(rows)
    targets = {target_text(row) for row in rows if not math.isnan(row["target"])}
    if targets:
        to = f"rounds\nto {targets.pop()}" if len(targets) == 1 else "rounds\nto target"
        columns.append(Column(to, lambda row: rounds_to_target(row).replace(" (", "\n("), _rounds_of_all_seeds, -1))
    if any(row["guarantee"] for row in rows):
        columns.append(
            Column("epsilon", lambda row: row["guarantee"].short if row["guarantee"] else NOTHING, _epsilon, -1)
        )
    return [
        *columns,
        Column("MB\nup", lambda row: megabytes(row["bytes_up"], ""), lambda row: row["bytes_up"], -1),
        Column("MB\ndown", lambda row: megabytes(row["bytes_down"], ""), lambda row: row["bytes_down"], -1),
        Column(f"time\n{unit}", time, lambda row: row["seconds"], -1),
    ]


def _epsilon(row: MethodRow) -> float:
    guarantee = row["guarantee"]
    return math.nan if guarantee is None or guarantee.epsilon is None else guarantee.epsilon


def _epsilon_note(guarantee: Guarantee) -> str:
    """The scope of an epsilon, or the reason why a method has none."""
    if guarantee.epsilon is None:
        return f"epsilon of {guarantee.method}: {guarantee.text}"
    return (
        f"epsilon: of the {guarantee.what} sent in one whole run, for {guarantee.unit}, "
        f"at delta = {guarantee.delta:g}; runs on the same data (seeds, grids, repetitions) add up"
    )


def _rounds_of_all_seeds(row: MethodRow) -> float:
    """Rounds to the target, or NaN unless every seed reached it: a mean over the best seeds alone is no comparison."""
    return row["target_round"] if row["target_reached"] == row["seeds"] else math.nan


# Accuracy by site ------------------------------------------------------------------------------------------------


def sites_table(runs: Sequence[RunDirectory]) -> RenderableType:
    """A table for each data set: a row a site, a column a method, and below them the mean and the worst site.

    Raises :class:`FedblendError` if no run has accuracies by site.
    """
    tables = []
    for name, groups in by_data(runs).items():
        columns = {group.name: sites for group in groups if (sites := _site_accuracies(group))}
        if columns:
            tables.append(_table_by_site(name, columns))
    if not tables:
        raise FedblendError(
            "sites: none of these runs has accuracies by site; valid: runs on data with 1 to 50 clients of their "
            "own, such as heart and har"
        )
    return Renderables(*tables)


def _site_accuracies(group: Group) -> dict[str, float]:
    """A method's final accuracy at each site, the mean over its seeds; empty where its runs have none."""
    finals = [o.evaluated[-1].sites or {} for o in group.counted if o.evaluated]
    names = dict.fromkeys(name for final in finals for name in final)
    return {name: fmean(final[name] for final in finals if name in final) for name in names}


def _table_by_site(data: str, columns: dict[str, dict[str, float]]) -> WrappedTable:
    sites = list(dict.fromkeys(site for found in columns.values() for site in found))
    rows = [_site_cells([found.get(site) for found in columns.values()]) for site in sites]
    rows.append(_site_cells([fmean(found.values()) for found in columns.values()]))
    rows.append(_site_cells([min(found.values()) for found in columns.values()]))
    by_method = [(method, [row[k] for row in rows]) for k, method in enumerate(columns)]
    names = [*sites, "mean over sites", "worst site"]
    return WrappedTable("site", names, by_method, f"{data}: accuracy in % at each site", footer=2)


def _site_cells(values: Sequence[float | None]) -> list[Text]:
    """Accuracies in per cent, the best in bold."""
    texts = [NOTHING if value is None else f"{100 * value:.1f}" for value in values]
    best = f"{100 * max(value for value in values if value is not None):.1f}"
    return [Text(text, style="bold" if text == best and len(set(texts)) > 1 else "") for text in texts]


# On the page -----------------------------------------------------------------------------------------------------


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
    best = [best_rows(rows, column.text, column.value, column.sign) for column in columns]
    lines = []
    for i, row in enumerate(rows):
        cells = []
        for column, winners in zip(columns, best, strict=True):
            number = column.value(row)
            cells.append(Cell(column.text(row), None if math.isnan(number) else number, i in winners))
        lines.append((str(row["method"]), cells))
    return PageTable([(column.heading, column.explanation) for column in columns], lines)


def results_table(table: pd.DataFrame) -> PageTable:
    """The main table of one data set: a row for each method over its seeds."""
    rows = method_rows(table)
    accuracy = _measure_of(rows) == "accuracy"
    sign = 1 if accuracy else -1
    last, mean_of_last = _last_evaluations(rows)
    unit, time = _times(rows)

    def best_score(row: MethodRow) -> str:
        return score(row["measure"], row["best"], row["best_std"])

    def memory(row: MethodRow) -> str:
        return NOTHING if math.isnan(row["peak_memory"]) else f"{row['peak_memory'] / MEGABYTE:,.0f}"

    columns = [
        Column("seeds", lambda row: str(row["seeds"]), lambda row: row["seeds"], 0,
               "finished runs averaged, or all where none is finished"),
        Column(f"final {'accuracy (%)' if accuracy else 'loss'}", _final_score, lambda row: row["final"], sign,
               "after the last round; mean ± sample deviation over seeds"),
        Column(last, mean_of_last, lambda row: row["last"], sign, "the mean of the last evaluations, ten at most"),
        *(_chosen_columns(rows) or [
            Column("best", best_score, lambda row: row["best"], sign,
                   "the best of all evaluations; it was selected on the test samples"),
        ]),
        *_metric_columns(rows),
    ]  # fmt: skip
    targets = {target_text(row) for row in rows if not math.isnan(row["target"])}
    if targets:
        to = f"rounds to {targets.pop()}" if len(targets) == 1 else "rounds to target"
        why = "the first evaluated round that reached it, over the seeds that did"
        columns.append(Column(to, rounds_to_target, lambda row: row["target_round"], 0, why))
    columns += [
        _bytes_column("bytes_up", "up (MB)", "sent by all clients together, in the whole run", -1),
        _bytes_column("bytes_down", "down (MB)", "sent to all clients together, in the whole run", -1),
        Column(f"time ({unit})", time, lambda row: row["seconds"], -1, "wall clock of a whole run, with evaluation"),
        Column("peak memory (MB)", memory, lambda row: row["peak_memory"], 0, "the largest of the run's process"),
        Column("status", lambda row: str(row["states"]), lambda row: row["unfinished"], 0, "whether all runs finished"),
    ]
    return _page_table(rows, columns)


def time_table(table: pd.DataFrame) -> PageTable | None:
    """Seconds of a run by phase, the longest phase first; ``None`` where no time was recorded."""
    phases = [name for name in table.columns if str(name).startswith("seconds.") and table[name].sum() > 0]
    phases.sort(key=lambda name: -table[name].sum())
    return _page_table(method_rows(table), [_seconds_column(name) for name in phases]) if phases else None


def bytes_table(table: pd.DataFrame) -> PageTable | None:
    """Megabytes up and down by kind; ``None`` where nothing was sent."""
    columns = []
    for name in map(str, table.columns):
        direction, _, kind = name.partition(".")
        if kind and direction in ("bytes_up", "bytes_down") and table[name].sum() > 0:
            way = direction.removeprefix("bytes_")
            columns.append(_bytes_column(name, f"{kind} {way} (MB)", f"{kind} sent {way}, whole run", 0))
    return _page_table(method_rows(table), columns) if columns else None


def client_table(groups: Sequence[Group]) -> PageTable | None:
    """Accuracies of the final model over clients with test samples of their own; ``None`` where none has."""
    rows: list[MethodRow] = []
    sizes: dict[str, None] = {}
    for g in groups:
        finals = [clients for o in g.counted if o.evaluated and (clients := o.evaluated[-1].clients) is not None]
        if not finals:
            continue
        row: MethodRow = {"method": g.name, "finished": sum(o.finished for o in g.outcomes)}
        for name in ("tested", "mean", "std", "p10"):
            row[name] = fmean(final[name] for final in finals)
        for size in dict.fromkeys(size for final in finals for size in final.get("by_size", {})):
            sizes[size] = None
            row[size] = fmean(final["by_size"][size]["mean"] for final in finals if size in final["by_size"])
        rows.append(row)
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


def _bytes_column(name: str, heading: str, explanation: str, sign: int) -> Column:
    return Column(heading, lambda row: megabytes(row[name], ""), lambda row: row[name] / MEGABYTE, sign, explanation)


def _seconds_column(name: str) -> Column:
    heading = f"{name.removeprefix('seconds.')} (s)"
    return Column(heading, lambda row: duration(row[name]), lambda row: row[name], 0, "seconds of the whole run")


def _percent_column(name: str, heading: str, explanation: str, sign: int = 0) -> Column:
    def value(row: MethodRow) -> float:
        return row.get(name, math.nan)

    return Column(heading, lambda row: plus_minus(100 * value(row), digits=1), value, sign, explanation)
