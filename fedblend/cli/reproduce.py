"""``fedblend reproduce``: run an item of a paper and print its table, or list all items."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from fedblend import report
from fedblend.cli.console import Console, table
from fedblend.cli.progress import RunProgress, Steps, steps_shown
from fedblend.core.errors import FedblendError, or_valid
from fedblend.core.files import write_atomically
from fedblend.papers import formatting
from fedblend.papers.items import SCALES, Item, Scale, all_papers
from fedblend.papers.plan import ItemPlan, plan_item
from fedblend.papers.result import COMMITTED, RESULT, OutputPaths, read_committed_result, read_result, runs_of
from fedblend.papers.run_item import is_fetched, missing_reason, run_item
from fedblend.runs.parallel import join_failures

PAGE = "table.md"
REPORT = "report.html"

WIDE = 140  # Width of a list that is written to a file or a pipe
SHORTEST = 24  # Minimal width of the column with an item's title
GAP = 2  # Blanks between two columns of the list
SHORT_NAMES = {"leaf-shakespeare": "leaf-shakesp.", "fashion-mnist": "fashion"}  # Short names of data sets in the list


def reproduce(item: str | None = None, list_: bool = False, *, out: Path, **options: Any) -> None:
    """Show an item, or the list of all (of a paper)."""
    if list_:
        show_list(item, out)
    elif item is None:
        raise FedblendError("reproduce: name an item, such as fedmix/table-1; all of them: fedblend reproduce --list")
    else:
        show_item(item, out=out, **options)


def show_item(
    name: str,
    scale: str,
    out: Path,
    only: Sequence[str] = (),
    seeds: Sequence[int] | None = None,
    jobs: int | None = None,
    device: str | None = None,
) -> None:
    """Make the missing runs of an item, print its table, and write the table next to the runs."""
    if scale not in SCALES:
        raise FedblendError(f"--scale {scale!r} is not valid{or_valid(scale, SCALES)}")
    # Semicolons separate several in one text, since columns such as ``0,2`` contain commas.
    chosen = [word.strip() for text in only for word in text.split(";") if word.strip()]
    planned = plan_item(name, cast(Scale, scale), seeds, chosen)
    output = OutputPaths(out, planned)
    console = Console()
    with ExitStack() as stack:
        shown: list[Steps] = []

        def on_step(what: str, done: int, total: int) -> None:
            # Opened at the first step: the display of runs comes first, and only one display can be live.
            if not shown:
                shown.append(stack.enter_context(steps_shown()))
            shown[0](what, done, total)

        result = run_item(planned, out, RunProgress, on_step, jobs, device)
    absences = formatting.absences(result)
    write_atomically(output.folder / PAGE, "\n".join([formatting.markdown(result, level=1), *absences]).rstrip() + "\n")
    _print_result(console, result)
    for line in absences:
        console.tell(line)
    runs = runs_of(planned, out)
    if runs:
        page = output.folder / REPORT
        report.write(runs, page, page.with_suffix(".png"), trust=True)
        console.tell(f"Curves: {page}")
    console.tell(f"Table: {output.folder / PAGE}, {output.folder / RESULT}")
    if result["faults"]:
        raise FedblendError(f"{planned.id}: " + join_failures(result["faults"], 0))


def _print_result(console: Console, result: Mapping[str, Any]) -> None:
    console.print(Text(f"{result['item']}: {result['title']}", style="bold"))
    for line in formatting.heading(result):
        console.print(Text(line), style="dim")
    columns = any(result["columns"].values())
    for head, rows in formatting.terminal_tables(result):
        texts = ["row", "column"] if columns else ["row"]
        made = table(texts, ["ours", "paper", "difference"], ruled=True, title=head, title_justify="left")
        last = None
        for row, column, *numbers in rows:
            shown = "" if row == last and columns else row
            made.add_row(shown, *([column] if columns else []), *numbers)
            last = row
        console.print(made)
    if result["claims"]:
        made = table([], [], ruled=True)
        made.add_column("claim", ratio=1)
        made.add_column("verdict", ratio=1)
        for claim in result["claims"]:
            made.add_row(formatting.claim_text(claim), formatting.verdict_text(claim, result))
        console.print(made)


def show_list(paper: str | None, out: Path) -> None:
    """Print every item: its title, its data, its results with the minutes that they took, and committed results."""
    papers = all_papers()
    if paper is not None and paper not in papers:
        raise FedblendError(f"reproduce: no such paper '{paper}'{or_valid(paper, papers)}")
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = WIDE
    chosen = [(one, name, item) for one in ([paper] if paper else papers) for name, item in papers[one].items.items()]
    rows = [_list_row(one, name, item, out) for one, name, item in chosen]
    _print_list(console, rows)
    console.print(Text("Data: * not at hand (see $FEDBLEND_DATA), + fetched when needed."), style="dim")
    committed = "^ committed in evidence/results" if COMMITTED.is_dir() else "fedblend's checkout holds others"
    console.print(Text(f"Results: yours, of --out; {committed}."), style="dim")
    for one, name, item in chosen:
        if item.missing:
            console.print(Text(f"Missing: {one}/{name}: {item.missing}"), style="dim")


def _print_list(console: Console, rows: Sequence[tuple[str, ...]]) -> None:
    """Print a row for each item. Titles wrap; in a narrow terminal the data stand below the title."""
    heads: tuple[str, ...] = ("item", "what", "data", "results")
    widths = [max(map(len, (head, *column))) for head, *column in zip(heads, *rows, strict=True) if head != "what"]
    if console.width - sum(widths) - GAP * len(widths) < SHORTEST:
        heads = ("item", "what, data", "results")
        rows = [(item, f"{what}\n{data}".strip(), results.replace(", ", ",\n")) for item, what, data, results in rows]
    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
    for head, *column in zip(heads, *rows, strict=True):
        # Only titles may wrap: the other columns are copied or compared.
        least = None if head.startswith("what") else max(map(len, (head, *column)))
        made.add_column(head, min_width=least)
    for row in rows:
        made.add_row(*map(Text, row))
    console.print(made)


def _list_row(paper: str, name: str, item: Item, out: Path) -> tuple[str, ...]:
    head, title = f"{paper}/{name}", item.title + (f" (also {', '.join(item.also)})" if item.also else "")
    if item.missing:
        return head, title, "", "missing"
    results = [
        _result_text(scale, read_result(out, paper, name, scale))
        or _result_text(scale, read_committed_result(paper, name, scale), "^")
        for scale in SCALES
    ]
    return head, title, _data_text(plan_item(head)), ", ".join(filter(None, results)) or "none"


def _result_text(scale: Scale, result: Mapping[str, Any], mark: str = "") -> str:
    """The scale of a result, how many of its cells have values if not all have, and a mark or the minutes it took."""
    cells = [bool(cell["ours"]) for quantity in result.get("quantities", {}).values() for cell in quantity["cells"]]
    if not any(cells):
        return ""
    share = "" if all(cells) else f" {sum(cells)}/{len(cells)}"
    minutes = f" ({max(1, round(result['minutes']))} min)" if "minutes" in result else ""
    return f"{scale}{share}{mark or minutes}"


def _data_text(planned: ItemPlan) -> str:
    marks = {}
    for cell in planned.cells:
        data = cell.experiment.data
        if data.name not in marks:
            marks[data.name] = "*" if missing_reason(data) else "+" if is_fetched(data) else ""
    words = [f"{SHORT_NAMES.get(name, name)}{mark}" for name, mark in marks.items()]
    return ", ".join(words[:2]) + (" ..." if len(words) > 2 else "")
