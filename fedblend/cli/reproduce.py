"""``fedblend reproduce``: run an item of a paper and print its table, or list all items."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedblend import report
from fedblend.cli.progress import RunProgress, Steps, steps_shown
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.experiment.config import Experiment
from fedblend.papers import pages
from fedblend.papers.data import absent, is_fetched
from fedblend.papers.estimate import Pace, words
from fedblend.papers.items import SCALES, Item, Scale, all_papers
from fedblend.papers.place import OutputPaths, runs_of
from fedblend.papers.plan import ItemPlan, plan
from fedblend.papers.result import RESULT, result_of
from fedblend.papers.running import run
from fedblend.runs.files import write_atomically
from fedblend.runs.parallel import in_one_message

PAGE = "table.md"
REPORT = "report.html"

LIST_WIDTH = 140
"""Terminal columns of a list that is written to a file or a pipe."""

MIN_TITLE = 24
"""Smallest width of the title column; below it the data sets move into that column."""

GAP = 2
"""Spaces between two columns of the list."""

SHORT_NAMES = {"leaf-shakespeare": "leaf-shakesp.", "fashion-mnist": "fashion"}
"""Short names of data sets whose names are too long for the list."""


def parse_scale(text: str) -> Scale:
    """The scale of a name. Raises :class:`FedblendError` for an unknown one."""
    for scale in SCALES:
        if scale == text:
            return scale
    raise FedblendError(f"--scale {text!r} is not valid{did_you_mean(text, SCALES)}; valid: {', '.join(SCALES)}")


def parse_only(texts: Sequence[str]) -> list[str]:
    """Names of rows and columns. Semicolons separate several in one text: names such as ``0,2`` contain commas."""
    return [word.strip() for text in texts for word in text.split(";") if word.strip()]


def show_item(
    name: str,
    scale: str,
    only: Sequence[str],
    seeds: Sequence[int] | None,
    out: Path,
    jobs: int | None,
    device: str | None,
) -> None:
    """Run the missing runs of an item, print its table, and write the table beside the runs.

    ``only`` are the rows and columns to run; ``device`` is where tensors are computed. Raises :class:`FedblendError` if
    a run failed.
    """
    item_plan = plan(name, parse_scale(scale), seeds, parse_only(only))
    paths = OutputPaths(out, item_plan)
    console = Console()
    with ExitStack() as stack:
        displays: list[Steps] = []

        def tick(what: str, done: int, total: int) -> None:
            # Opened at the first step: the progress of the runs comes before, and Rich allows one live display.
            if not displays:
                displays.append(stack.enter_context(steps_shown()))
            displays[0](what, done, total)

        result = run(item_plan, out, _run_progress, tick, jobs, device)
    write_atomically(paths.folder / PAGE, pages.markdown(result, level=1))
    _print(console, result)
    runs = runs_of(item_plan, out)
    if runs:
        page = paths.folder / REPORT
        report.write(runs, page, page.with_suffix(".png"))
        console.print(f"Curves: {page}", highlight=False, soft_wrap=True)
    console.print(f"Table: {paths.folder / PAGE}, {paths.folder / RESULT}", highlight=False, soft_wrap=True)
    if result["faults"]:
        raise FedblendError(f"{item_plan.id}: " + in_one_message(result["faults"], 0))


@contextmanager
def _run_progress(experiments: dict[str, Experiment], rounds_before: Mapping[str, int]) -> Iterator[RunProgress]:
    with RunProgress(experiments, rounds_before) as progress:
        yield progress


def _print(console: Console, result: Mapping[str, Any]) -> None:
    """Print the heading, a table a quantity, and the claims."""
    console.print(Text(f"{result['item']}: {result['title']}", style="bold"))
    for line in pages.heading(result):
        console.print(Text(line), style="dim")
    columns = any(result["columns"].values())
    for head, rows in pages.long_rows(result):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", title=head, title_justify="left")
        table.add_column("row")
        if columns:
            table.add_column("column")
        for heading in ("ours", "paper", "difference"):
            table.add_column(heading, justify="right")
        previous = None
        for row, column, *numbers in rows:
            shown = "" if row == previous and columns else row
            table.add_row(*map(Text, (shown, *([column] if columns else []), *numbers)))
            previous = row
        console.print(table)
    if result["claims"]:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        table.add_column("claim", ratio=1)
        table.add_column("verdict", ratio=1)
        for claim in result["claims"]:
            table.add_row(Text(claim["says"]), Text(pages.verdict_text(claim, result)))
        console.print(table)


def show_list(paper: str | None, out: Path) -> None:
    """Print every item: its title, data sets, estimated time at each scale, and existing results.

    ``paper`` restricts the list to one paper. Raises :class:`FedblendError` for an unknown one.
    """
    papers = all_papers()
    if paper is not None and paper not in papers:
        raise FedblendError(f"reproduce: no such paper '{paper}'{did_you_mean(paper, papers)}; valid: "
                            f"{', '.join(papers)}")  # fmt: skip
    console, pace = Console(), Pace()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = LIST_WIDTH
    chosen = [(one, name, item) for one in ([paper] if paper else papers) for name, item in papers[one].items.items()]
    rows = [_entry(one, name, item, pace, out) for one, name, item in chosen]
    pace.keep()
    _print_list(console, rows)
    console.print(
        Text("Times are rough: the time of a training step on this machine times the number of steps, one run a "
             "processor. Data: * missing (see $FEDBLEND_DATA), + downloaded when needed."),
        style="dim",
    )  # fmt: skip
    for one, name, item in chosen:
        if item.missing:
            console.print(Text(f"Missing: {one}/{name}: {item.missing}"), style="dim")


def _print_list(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """Print a row an item. Long titles wrap; in a narrow terminal the data sets stand below the title."""
    headings = ("item", "what", "data", *SCALES, "results")
    widths = [max(map(len, (name, *column))) for name, *column in zip(headings, *rows, strict=True) if name != "what"]
    if console.width - sum(widths) - GAP * len(widths) < MIN_TITLE:
        headings = ("item", "what, data", *SCALES, "results")
        rows = [(item, f"{what}\n{data}".strip(), *rest) for item, what, data, *rest in rows]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for name, *column in zip(headings, *rows, strict=True):
        # Only titles may wrap: readers copy or compare the other columns.
        least = None if name.startswith("what") else max(map(len, (name, *column)))
        table.add_column(name, justify="right" if name in SCALES else "left", min_width=least)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _entry(paper: str, name: str, item: Item, pace: Pace, out: Path) -> tuple[str, ...]:
    """The cells of an item's row."""
    id, title = f"{paper}/{name}", item.title + (f" (also {', '.join(item.also)})" if item.also else "")
    if item.missing:
        return id, title, "", "", "", "", "missing"
    plans = {scale: plan(id, scale) for scale in SCALES}
    times = [words(pace.of(one)) for one in plans.values()]
    results = [_progress(scale, result_of(out, paper, name, scale)) for scale in SCALES]
    return id, title, _data(plans["paper"]), *times, ", ".join(filter(None, results)) or "none"


def _progress(scale: Scale, result: Mapping[str, Any]) -> str:
    """The scale's name if it has a result, with the number of finished cells unless all are; else nothing."""
    cells = [bool(cell["ours"]) for quantity in result.get("quantities", {}).values() for cell in quantity["cells"]]
    if not any(cells):
        return ""
    return scale if all(cells) else f"{scale} {sum(cells)}/{len(cells)}"


def _data(item_plan: ItemPlan) -> str:
    """The data sets of an item, at most two by name, each with the mark of its availability."""
    marks = {}
    for cell in item_plan.cells:
        data = cell.experiment.data
        if data.name not in marks:
            marks[data.name] = "*" if absent(data) else "+" if is_fetched(data) else ""
    names = [f"{SHORT_NAMES.get(name, name)}{mark}" for name, mark in marks.items()]
    return ", ".join(names[:2]) + (" ..." if len(names) > 2 else "")
