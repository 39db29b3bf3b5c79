"""The comparison of runs as a table in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedblend.core.errors import FedblendError
from fedblend.report.guarantees import Guarantee, guarantees
from fedblend.report.privacy import NOTE, gives_raw_away
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, by_data
from fedblend.runs.summary import (
    MINUTE,
    NOTHING,
    averaged,
    duration,
    megabytes,
    places,
    rounds_to_target,
    score,
    status,
    table_of,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType
    from rich.table import Table


def compare(runs: Sequence[RunDirectory], reasons: bool = True) -> RenderableType:
    """One table a data set, one row a method over its seeds; the best value of a column is bold.

    Below a table stands which runs are not finished (marked with an asterisk) and, with ``reasons``, why; and which
    methods give raw samples away. Raises :class:`FedblendError` if there is no run to compare.
    """
    from rich.console import Group as Several

    if not runs:
        raise FedblendError("compare: no runs given; name run directories, or folders of studies")
    sets = by_data(runs)
    return Several(*(_table(groups, name if len(sets) > 1 else None, reasons) for name, groups in sets.items()))


def _table(groups: Sequence[Group], title: str | None, reasons: bool) -> Table:
    """The table of one data set."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    stated = {one.method: one for one in guarantees(groups)}  # the last of each: of all that left its clients together
    rows = [{**row, "guarantee": stated.get(row["method"])} for row in rows_of(table_of(groups))]
    columns = _columns(rows)
    notes = [f"* {g.name}: {status(g) if reasons else places(g)}" for g in groups if g.unfinished]
    notes += [f"! {g.name}: {NOTE}, it gives raw samples away" for g in groups if gives_raw_away(g.config)]
    if (only := groups[0].outcomes[0].only_class) is not None:
        notes.append(f"! all samples are of one class, '{only}': there is nothing to tell apart")
    notes += list(dict.fromkeys(map(_on_epsilon, stated.values())))
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0), header_style="bold")
    made.title, made.title_justify, made.title_style = title and Text(title), "left", "bold"
    made.caption_justify = "left"
    made.caption = Text("\n".join(notes)) if notes else None
    # Wide enough to be read in a terminal of 80 columns, where the other columns take the rest.
    made.add_column("method", overflow="fold", vertical="bottom", min_width=10)
    for heading, *_ in columns:
        made.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    best = [best_of(rows, text, value, sign) for _, text, value, sign in columns]
    for i, row in enumerate(rows):
        cells = [
            Text(text(row), style="bold" if i in winners else "")
            for (_, text, _, _), winners in zip(columns, best, strict=True)
        ]
        # Text and not str: a label may hold square brackets, which would be read as markup.
        made.add_row(Text(row["method"] + (" *" if row["unfinished"] else "")), *cells)
    return made


Row = dict[str, Any]
Column = tuple[str, Callable[[Row], str], Callable[[Row], float], int]
"""Heading, what a cell says, what it is compared by, and 1 where more is better, -1 where less is, 0 where neither."""


def _columns(rows: Sequence[Row]) -> list[Column]:
    measure = measure_of(rows)
    sign = 1 if measure == "accuracy" else -1
    last, mean_of_last = last_evaluations(rows)
    unit, time = times(rows)
    columns: list[Column] = [
        ("seeds", lambda row: str(row["seeds"]), lambda row: math.nan, 0),
        (
            "accuracy\n% ± std" if measure == "accuracy" else "loss\n± std",
            lambda row: final_score(row, measure),
            lambda row: row["final"],
            sign,
        ),
        (last.replace("of last", "of\nlast"), mean_of_last, lambda row: row["last"], sign),
    ]
    targets = {row["target"] for row in rows if not math.isnan(row["target"])}
    if targets:
        to = f"rounds\nto {100 * targets.pop():g} %" if len(targets) == 1 else "rounds\nto target"
        columns.append((to, lambda row: rounds_to_target(row).replace(" (", "\n("), _whole_target, -1))
    if any(row["guarantee"] for row in rows):
        columns.append(("epsilon", lambda row: row["guarantee"].short if row["guarantee"] else NOTHING, _epsilon, -1))
    return [
        *columns,
        ("MB\nup", lambda row: megabytes(row["bytes_up"], ""), lambda row: row["bytes_up"], -1),
        ("MB\ndown", lambda row: megabytes(row["bytes_down"], ""), lambda row: row["bytes_down"], -1),
        (f"time\n{unit}", time, lambda row: row["seconds"], -1),
    ]


def measure_of(rows: Sequence[Row]) -> str:
    """What the methods of one data set are judged by: ``accuracy``, or ``loss`` in regression."""
    return next((row["measure"] for row in rows if row["seeds"]), "accuracy")


def final_score(row: Row, measure: str) -> str:
    """The final accuracy or loss; that a method failed, where no run of it made a round."""
    return "failed" if row["failed"] else score(measure, row["final"], row["final_std"])


def last_evaluations(rows: Sequence[Row]) -> tuple[str, Callable[[Row], str]]:
    """Heading and cells of the mean of the last evaluations; how many they are stands where it is true of all."""
    told = [row for row in rows if row["seeds"]]
    counts = {averaged(row) for row in [row for row in told if not row["failed"]] or told}

    def text(row: Row) -> str:
        mean = score(row["measure"], row["last"], row["last_std"])
        return f"{mean} (n = {averaged(row)})" if len(counts) > 1 and not math.isnan(row["last"]) else mean

    return f"mean of last {next(iter(counts)) if len(counts) == 1 else 'n'}", text


def times(rows: Sequence[Row]) -> tuple[str, Callable[[Row], str]]:
    """The unit of the whole time, and the cells in it: minutes, or seconds where a run took less than a minute."""
    minutes = all(row["seconds"] >= MINUTE for row in rows if row["seeds"])
    return "min" if minutes else "s", lambda row: duration(row["seconds"] / (MINUTE if minutes else 1))


def _epsilon(row: Row) -> float:
    stated = row["guarantee"]
    return math.nan if stated is None or stated.epsilon is None else stated.epsilon


def _on_epsilon(one: Guarantee) -> str:
    """What an epsilon covers, or why a method has none."""
    if one.epsilon is None:
        return f"epsilon of {one.method}: {one.text}"
    return f"epsilon: of the {one.what} sent in the whole run, for {one.unit}, at delta = {one.delta:g}"


def _whole_target(row: Row) -> float:
    """Rounds to the target where every seed reached it: the mean of only some is no fair comparison."""
    return row["target_round"] if row["target_reached"] == row["seeds"] else math.nan


def rows_of(table: pd.DataFrame) -> list[Row]:
    """The rows of a table, each by its columns' names; without the scores of methods that never made a round."""
    rows = [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]
    untrained = dict.fromkeys(("final", "last", "best"), math.nan)
    return [row | untrained if row["failed"] else row for row in rows]


def best_of(rows: Sequence[Row], text: Callable[[Row], str], value: Callable[[Row], float], sign: int) -> set[int]:
    """The rows with the best value (largest by ``sign`` 1, smallest by -1), and those that read the same.

    Methods of which no run is finished take no part, nor do those with fewer finished seeds than another; none is best
    where there is nothing to compare.
    """
    seeds = max((row["finished"] for row in rows), default=0)
    fair = [i for i, row in enumerate(rows) if row["finished"] == seeds > 0]
    known = {i: value(rows[i]) for i in fair if not math.isnan(value(rows[i]))}
    if not sign or not known:
        return set()
    best = max(known, key=lambda i: sign * known[i])
    alike = {i for i in known if text(rows[i]) == text(rows[best])}
    return alike if len(alike) < len(known) else set()
