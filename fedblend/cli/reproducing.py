"""What ``fedblend reproduce`` does: it runs an item of a paper and prints its table, or lists all items."""

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
from fedblend.papers import formatting
from fedblend.papers.availability import absent, is_fetched
from fedblend.papers.estimate import Pace, words
from fedblend.papers.items import SCALES, Item, Scale, all_papers
from fedblend.papers.paths import OutputPaths, runs_of
from fedblend.papers.plan import ItemPlan, plan
from fedblend.papers.result import RESULT, result_of
from fedblend.papers.run_item import run
from fedblend.runs.files import write_atomically
from fedblend.runs.parallel import in_one_message

PAGE = "table.md"
REPORT = "report.html"

WIDE = 140
"""Columns of a list that goes into a file or a pipe."""

SHORTEST = 24
"""Letters of what an item is that a line of the list has at least."""

GAP = 2
"""Blanks between two columns of the list."""

SHORT_NAMES = {"leaf-shakespeare": "leaf-shakesp.", "fashion-mnist": "fashion"}
"""Data sets whose names are too long for the list."""


def parse_scale(text: str) -> Scale:
    """A scale by its name."""
    for scale in SCALES:
        if scale == text:
            return scale
    raise FedblendError(f"--scale {text!r} is not valid{did_you_mean(text, SCALES)}; valid: {', '.join(SCALES)}")


def parse_only(texts: Sequence[str]) -> list[str]:
    """Rows and columns; several in one text are divided by semicolons, since columns such as ``0,2`` have commas."""
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
    """Run what is missing of an item, print its table, and write it beside the runs."""
    made = plan(name, parse_scale(scale), seeds, parse_only(only))
    place = OutputPaths(out, made)
    console = Console()
    with ExitStack() as stack:
        shown: list[Steps] = []

        def tick(what: str, done: int, total: int) -> None:
            # Opened when there is something to show: the display of runs comes first, and only one can be live.
            if not shown:
                shown.append(stack.enter_context(steps_shown()))
            shown[0](what, done, total)

        result = run(made, out, _runs_shown, tick, jobs, device)
    write_atomically(place.folder / PAGE, formatting.markdown(result, level=1))
    _print(console, result)
    runs = runs_of(made, out)
    if runs:
        page = place.folder / REPORT
        report.write(runs, page, page.with_suffix(".png"))
        console.print(f"Curves: {page}", highlight=False, soft_wrap=True)
    console.print(f"Table: {place.folder / PAGE}, {place.folder / RESULT}", highlight=False, soft_wrap=True)
    if result["faults"]:
        raise FedblendError(f"{made.id}: " + in_one_message(result["faults"], 0))


@contextmanager
def _runs_shown(experiments: dict[str, Experiment], made: Mapping[str, int]) -> Iterator[RunProgress]:
    with RunProgress(experiments, made) as progress:
        yield progress


def _print(console: Console, result: Mapping[str, Any]) -> None:
    """The heading, a table a quantity, and the claims."""
    console.print(Text(f"{result['item']}: {result['title']}", style="bold"))
    for line in formatting.heading(result):
        console.print(Text(line), style="dim")
    columns = any(result["columns"].values())
    for head, rows in formatting.long_rows(result):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", title=head, title_justify="left")
        table.add_column("row")
        if columns:
            table.add_column("column")
        for heading in ("ours", "paper", "difference"):
            table.add_column(heading, justify="right")
        last = None
        for row, column, *numbers in rows:
            shown = "" if row == last and columns else row
            table.add_row(*map(Text, (shown, *([column] if columns else []), *numbers)))
            last = row
        console.print(table)
    if result["claims"]:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
        table.add_column("claim", ratio=1)
        table.add_column("verdict", ratio=1)
        for claim in result["claims"]:
            table.add_row(Text(claim["says"]), Text(formatting.verdict_text(claim, result)))
        console.print(table)


def show_list(paper: str | None, out: Path) -> None:
    """Every item: what it is, its data, about how long it takes at each scale, and the results there are."""
    papers = all_papers()
    if paper is not None and paper not in papers:
        raise FedblendError(f"reproduce: no such paper '{paper}'{did_you_mean(paper, papers)}; valid: "
                            f"{', '.join(papers)}")  # fmt: skip
    console, pace = Console(), Pace()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    chosen = [(one, name, item) for one in ([paper] if paper else papers) for name, item in papers[one].items.items()]
    rows = [_entry(one, name, item, pace, out) for one, name, item in chosen]
    pace.keep()
    _print_list(console, rows)
    console.print(
        Text("Times are rough: a training step, timed on this machine, times their number, one run a processor. Data: "
             "* not at hand (see $FEDBLEND_DATA), + fetched when needed."),
        style="dim",
    )  # fmt: skip
    for one, name, item in chosen:
        if item.missing:
            console.print(Text(f"Missing: {one}/{name}: {item.missing}"), style="dim")


def _print_list(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """A row an item. What it is takes several lines where it must; in a narrow terminal its data stand below that."""
    heads = ("item", "what", "data", *SCALES, "results")
    others = [max(map(len, (head, *column))) for head, *column in zip(heads, *rows, strict=True) if head != "what"]
    if console.width - sum(others) - GAP * len(others) < SHORTEST:
        heads = ("item", "what, data", *SCALES, "results")
        rows = [(item, f"{what}\n{data}".strip(), *rest) for item, what, data, *rest in rows]
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for head, *column in zip(heads, *rows, strict=True):
        # All but what it is are to be copied or compared: never break them.
        least = None if head.startswith("what") else max(map(len, (head, *column)))
        table.add_column(head, justify="right" if head in SCALES else "left", min_width=least)
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _entry(paper: str, name: str, item: Item, pace: Pace, out: Path) -> tuple[str, ...]:
    head, title = f"{paper}/{name}", item.title + (f" (also {', '.join(item.also)})" if item.also else "")
    if item.missing:
        return head, title, "", "", "", "", "missing"
    plans = {scale: plan(head, scale) for scale in SCALES}
    times = [words(pace.of(one)) for one in plans.values()]
    results = [_standing(scale, result_of(out, paper, name, scale)) for scale in SCALES]
    return head, title, _data(plans["paper"]), *times, ", ".join(filter(None, results)) or "none"


def _standing(scale: Scale, result: Mapping[str, Any]) -> str:
    """A scale of which there is a result; how many of its cells, where that is not all."""
    cells = [bool(cell["ours"]) for quantity in result.get("quantities", {}).values() for cell in quantity["cells"]]
    if not any(cells):
        return ""
    return scale if all(cells) else f"{scale} {sum(cells)}/{len(cells)}"


def _data(made: ItemPlan) -> str:
    """The paper's data sets of an item, and whether they are at hand."""
    found = {}
    for cell in made.cells:
        data = cell.experiment.data
        if data.name not in found:
            found[data.name] = "*" if absent(data) else "+" if is_fetched(data) else ""
    words = [f"{SHORT_NAMES.get(name, name)}{how}" for name, how in found.items()]
    return ", ".join(words[:2]) + (" ..." if len(words) > 2 else "")
