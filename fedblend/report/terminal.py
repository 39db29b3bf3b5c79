"""The comparison of runs as a table in the terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fedblend.errors import FedblendError
from fedblend.report.privacy import NOTE, gives_raw_away
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import group
from fedblend.runs.summary import LAST, NOTHING, megabytes, rounds_to_target, score, table_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table


def compare(runs: Sequence[RunDirectory]) -> Table:
    """One row a method over its seeds; the best value of a column is bold.

    Below the table stands which runs are not finished (marked with an asterisk), and which methods give
    raw samples away. Raises :class:`FedblendError` if there is no run to compare.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    if not runs:
        raise FedblendError("compare: no runs given; name run directories, or folders of studies")
    groups = group(runs)
    rows = rows_of(table_of(groups))
    columns = _columns(rows)
    notes = [f"* {row['method']}: {row['status']}" for row in rows if row["unfinished"]]
    notes += [f"! {g.name}: {NOTE}, it gives raw samples away" for g in groups if gives_raw_away(g.config)]
    made = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True, padding=(0, 1, 0, 0), header_style="bold")
    made.caption_justify = "left"
    made.caption = Text("\n".join(notes)) if notes else None
    # Wide enough to be read in a terminal of 80 columns, where the other columns take the rest.
    made.add_column("method", overflow="fold", vertical="bottom", min_width=10)
    for heading, *_ in columns:
        made.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    best = [best_of(rows, value, sign) for _, _, value, sign in columns]
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
    measures = {row["measure"] for row in rows if row["seeds"]}
    sign = 1 if measures == {"accuracy"} else -1 if measures == {"loss"} else 0
    word = "accuracy\n% ± std" if sign == 1 else "loss\n± std" if sign == -1 else "accuracy %\nor loss, ± std"
    last = max((row["last_n"] for row in rows), default=0) or LAST

    def scored(name: str) -> Callable[[Row], str]:
        return lambda row: score(row["measure"], row[name], row[f"{name}_std"])

    columns: list[Column] = [
        ("seeds", lambda row: str(row["seeds"]), lambda row: math.nan, 0),
        (word, scored("final"), lambda row: row["final"], sign),
        (f"mean of\nlast {last}", scored("last"), lambda row: row["last"], sign),
    ]
    targets = {row["target"] for row in rows if not math.isnan(row["target"])}
    if targets:
        to = f"rounds\nto {100 * targets.pop():g} %" if len(targets) == 1 else "rounds\nto target"
        columns.append((to, lambda row: rounds_to_target(row).replace(" (", "\n("), _whole_target, -1))
    return [
        *columns,
        ("MB\nup", lambda row: megabytes(row["bytes_up"], ""), lambda row: row["bytes_up"], -1),
        ("MB\ndown", lambda row: megabytes(row["bytes_down"], ""), lambda row: row["bytes_down"], -1),
        ("min", lambda row: _minutes(row["seconds"]), lambda row: row["seconds"], -1),
    ]


def _minutes(seconds: float) -> str:
    return NOTHING if math.isnan(seconds) else f"{seconds / 60:.1f}" if seconds >= 60 else f"{seconds / 60:.2f}"


def _whole_target(row: Row) -> float:
    """Rounds to the target where every seed reached it: the mean of only some is no fair comparison."""
    return row["target_round"] if row["target_reached"] == row["seeds"] else math.nan


def rows_of(table: pd.DataFrame) -> list[Row]:
    """The rows of a table, each by its columns' names."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def best_of(rows: Sequence[Row], value: Callable[[Row], float], sign: int) -> set[int]:
    """The rows with the best value (largest by ``sign`` 1, smallest by -1).

    Methods of which no run is finished take no part; none is best where there is nothing to compare.
    """
    known = {i: value(row) for i, row in enumerate(rows) if row["finished"] and not math.isnan(value(row))}
    if not sign or len(set(known.values())) < 2:
        return set()
    wanted = max(known.values(), key=lambda one: sign * one)
    return {i for i, one in known.items() if one == wanted}
