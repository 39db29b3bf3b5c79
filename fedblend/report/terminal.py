"""Tables in the terminal: the comparison of methods, and accuracies at each site."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.console import Group as Renderables
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from fedblend.core.errors import FedblendError, encodable
from fedblend.report.columns import (
    BOLD_RULE,
    CellValue,
    Column,
    MethodRow,
    best_row,
    evaluations_note,
    method_rows,
    metric_columns,
    result_columns,
    rounds_note,
)
from fedblend.report.guarantees import NO_STRENGTH, PRIVACY_NOTE, Guarantee, guarantees, shares_raw_samples
from fedblend.report.verdict import verdict
from fedblend.runs.differences import baselines
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, Outcome, by_data
from fedblend.runs.summary import NOTHING, plus_minus, progress, rounds_to_target, status


def comparison_tables(
    runs: Sequence[RunDirectory], reasons: bool = True, baseline: str | None = None
) -> RenderableType:
    """A table for each data set with a row for each method over its seeds, and the difference to ``baseline``.

    Notes below a table have the rule for bold values, unfinished runs (marked with an asterisk), with ``reasons`` why
    they are unfinished, and methods that share raw samples. Raises :class:`FedblendError` if there is no run.
    """
    if not runs:
        raise FedblendError("compare: no runs given; name run directories, or folders of studies")
    sets = by_data(runs)
    titles = {name: name if len(sets) > 1 else None for name in sets}
    chosen = baselines(sets, baseline)
    return Renderables(*(_comparison_table(g, titles[name], reasons, chosen[name]) for name, g in sets.items()))


NamedCells = tuple[str, list[Text]]  # The heading and the cells of a column

UNLIMITED = 10_000  # A width in columns in which every table fits


@dataclass(frozen=True)
class WrappedTable:
    """A table in the terminal whose columns continue below, beside the rows' names, where they do not fit its width."""

    heading: str
    """The heading of the rows' names."""
    names: list[str]
    columns: list[NamedCells]
    title: str | None = None
    lead: str = ""
    notes: str = ""
    footer: int = 0
    """Number of last rows below a line."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        shown = self._encodable(console.encoding)
        begin, title = 0, shown.title
        if shown.lead:
            if title:
                yield Text(title, style="bold")
            yield Text(shown.lead)
            title = None
        while begin < len(shown.columns):
            end = begin + 1
            while end < len(shown.columns) and shown._fits(begin, end + 1, console, options):
                end += 1
            table = shown._table(begin, end)
            table.title = Text(title) if title else None
            yield table
            begin, title = end, None
        if shown.notes:
            yield Text(shown.notes, style="table.caption")

    def _encodable(self, encoding: str) -> WrappedTable:
        columns = [
            (encodable(heading, encoding), [Text(encodable(cell.plain, encoding), cell.style) for cell in cells])
            for heading, cells in self.columns
        ]
        heading, lead, notes = (encodable(text, encoding) for text in (self.heading, self.lead, self.notes))
        title = None if self.title is None else encodable(self.title, encoding)
        names = [encodable(name, encoding) for name in self.names]
        return replace(self, heading=heading, names=names, columns=columns, title=title, lead=lead, notes=notes)

    def _fits(self, begin: int, end: int, console: Console, options: ConsoleOptions) -> bool:
        needed = Measurement.get(console, options.update(width=UNLIMITED), self._table(begin, end)).minimum
        return needed <= options.max_width

    def _table(self, begin: int, end: int) -> Table:
        columns = self.columns[begin:end]
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


def _comparison_table(groups: Sequence[Group], title: str | None, reasons: bool, baseline: str | None) -> WrappedTable:
    stated = {one.method: one for one in guarantees(groups)}  # the last one of a method covers all its payloads
    rows = [row | {"guarantee": stated.get(row["method"])} for row in method_rows(groups)]
    notes = [f"* {g.name}: {status(g) if reasons else progress(g)}" for g in groups if g.unfinished]
    notes += [f"! {g.name}: {PRIVACY_NOTE}, it shares raw samples" for g in groups if shares_raw_samples(g.outcomes[0])]
    notes += [f"! uploads are missing, {text}" for g in groups for text in g.missing_uploads]
    if (only := groups[0].outcomes[0].only_class) is not None:
        notes.append(f"! all samples are of one class, '{only}': there is nothing to classify")
    notes += filter(None, [rounds_note(groups), evaluations_note(rows)])
    notes += list(dict.fromkeys(map(_epsilon_note, stated.values())))
    weak = [one for one in stated.values() if one.words.startswith(NO_STRENGTH)]
    notes += [f"! epsilon {one.short} of {one.method} {one.words}" for one in weak]
    if any(len(row["by_seed"]) > 1 for row in rows) and len(rows) > 1:
        notes.append(BOLD_RULE)
    columns = []
    for column in _comparison_columns(rows, baseline):
        best = best_row(rows, column)
        cells = [Text(column.text(row), style="bold" if i == best else "") for i, row in enumerate(rows)]
        columns.append((column.short, cells))
    names = [row["method"] + (" *" if row["unfinished"] else "") for row in rows]
    return WrappedTable("method", names, columns, title, "\n".join(verdict(rows, baseline)), "\n".join(notes))


def _comparison_columns(rows: Sequence[MethodRow], baseline: str | None) -> list[Column]:
    scores, targets, costs = result_columns(rows, baseline)
    # What is in brackets is in a line of its own.
    targets = [replace(one, text=lambda row: rounds_to_target(row).replace(" (", "\n(")) for one in targets]
    epsilon = Column("", lambda row: row["guarantee"].short if row["guarantee"] else NOTHING, lambda row: math.nan, 0)
    stated = [replace(epsilon, short="epsilon")] if any(row["guarantee"] for row in rows) else []
    return [one for one in (*scores, *metric_columns(rows), *targets, *stated, *costs) if one.short]


def _epsilon_note(guarantee: Guarantee) -> str:
    if guarantee.epsilon is None:
        return f"epsilon of {guarantee.method}: {guarantee.text}"
    return (
        f"epsilon: of the {guarantee.what} sent in one whole run, for {guarantee.unit}, "
        f"at delta = {guarantee.delta:g}; runs on the same data (seeds, grids, repetitions) add up"
    )


# Accuracy by site ------------------------------------------------------------------------------------------------


def sites_table(runs: Sequence[RunDirectory]) -> RenderableType:
    """A table for each data set: a row a site, a column a method, and below them the mean and the worst site.

    Raises :class:`FedblendError` if no run has accuracies by site.
    """
    tables = []
    for name, groups in by_data(runs).items():
        if rows := [row for g in groups if (row := _site_row(g))["sites"]]:
            tables.append(_table_by_site(name, rows))
    if not tables:
        raise FedblendError(
            "sites: none of these runs has accuracies by site; valid: runs on data with 1 to 50 clients of their "
            "own, such as heart and har"
        )
    return Renderables(*tables)


def _site_row(group: Group) -> MethodRow:
    """A method's final accuracy at each site, the mean over its seeds, and that of each finished seed."""
    by_seed = {o.seed: {"sites": _site_accuracies([o])} for o in group.outcomes if o.finished and o.evaluated}
    return {
        "method": group.name,
        "sites": _site_accuracies([o for o in group.counted if o.evaluated]),
        "by_seed": by_seed,
        "unsafe": shares_raw_samples(group.outcomes[0]),
    }


def _site_accuracies(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The final accuracy in per cent at each site, the mean over runs; empty where runs have none."""
    finals = [o.evaluated[-1].sites or {} for o in outcomes]
    names = dict.fromkeys(name for final in finals for name in final)
    return {name: 100 * fmean(final[name] for final in finals if name in final) for name in names}


def _table_by_site(data: str, rows: Sequence[MethodRow]) -> WrappedTable:
    sites = list(dict.fromkeys(site for row in rows for site in row["sites"]))

    def at(site: str) -> CellValue:
        return lambda row: row["sites"].get(site, math.nan)

    lines = [
        *(_site_cells(rows, at(site)) for site in sites),
        _site_cells(rows, lambda row: fmean(row["sites"].values()) if row["sites"] else math.nan),
        # Never bold: each seed may have another worst site, so that the seeds' minima are another number.
        _site_cells(rows, lambda row: min(row["sites"].values(), default=math.nan), sign=0),
    ]
    by_method = [(row["method"], [line[k] for line in lines]) for k, row in enumerate(rows)]
    names = [*sites, "mean over sites", "worst site"]
    return WrappedTable("site", names, by_method, f"{data}: accuracy in % at each site", notes=BOLD_RULE, footer=2)


def _site_cells(rows: Sequence[MethodRow], value: CellValue, sign: int = 1) -> list[Text]:

    def text(row: MethodRow) -> str:
        return plus_minus(value(row))

    best = best_row(rows, Column("", text, value, sign))
    return [Text(text(row), style="bold" if i == best else "") for i, row in enumerate(rows)]
