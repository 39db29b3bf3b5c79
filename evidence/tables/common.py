"""Committed results, tables in Markdown and figures, for all pages."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.analysis.plotting import head_figure
from fedblend.papers.items import Item, all_papers
from fedblend.report.page import inline_svg

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = ROOT / "evidence" / "results"
FIGURES = ROOT / "docs" / "figures"

Row = dict[str, Any]


def study_result(name: str) -> Row:
    """A study's committed result."""
    found: Row = json.loads((RESULTS / "studies" / f"{name}.json").read_text())
    return found


def paper_numbers(item: str, quantity: str, spread: bool = False) -> dict[str, tuple[float, ...]]:
    """A paper's numbers of an item such as ``xormixfl/table-2`` by row, or their standard deviations."""
    paper, _, name = item.partition("/")
    found = all_papers()[paper].items[name].quantities[quantity]
    return found.spread if spread else found.paper


def all_items() -> dict[str, Item]:
    """Every table and figure of every paper."""
    return {f"{paper}/{name}": item for paper, file in all_papers().items() for name, item in file.items.items()}


def table(head: Sequence[str], rows: Iterable[Iterable[str]], above: str = "") -> str:
    """A table in Markdown, below a line of text if one is given."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join([above, "", *lines] if above else lines)


def command_of(result: Mapping[str, Any]) -> str:
    """The command that made a result, as code."""
    return f"`{result['command']}`"


def by_method(runs: Iterable[Row]) -> dict[str, list[Row]]:
    """Runs by their method, in the order in which methods occur."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for run in runs:
        groups[run["method"]].append(run)
    return groups


def mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation over seeds; empty for no values."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def final_accuracy(run: Row) -> float:
    """Test accuracy in per cent after the last round."""
    return float(100 * run["accuracy"][-1])


def last_accuracy(run: Row, rounds: int = 10) -> float:
    """Mean test accuracy in per cent of the last evaluated rounds."""
    return 100 * statistics.mean(run["accuracy"][-rounds:])


SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="{0:.0f}" height="{1:.0f}"\
{2}><style>
:root {{ color-scheme: light dark; --ink: #1d2730; --muted: #5c6873; --grid: #e3e7ea; --paper: #ffffff }}
@media (prefers-color-scheme: dark) {{
:root {{ --ink: #e6ebef; --muted: #9aa7b2; --grid: #3a444d; --paper: #1e2129 }}
}}
text {{ fill: var(--ink); font-family: "DejaVu Sans", Verdana, sans-serif }}
</style>{3}
"""


def save_svg(figure: Any, name: str, title: str = "") -> None:
    """Write a figure to docs/figures, below a title if one is given, in dark colours where the page is dark."""
    width, height = figure.get_size_inches()
    if title:
        head_figure(figure, textwrap.fill(title, int(11 * width)), 10.5)
    head, _, body = inline_svg(figure, "f", title or name).partition(">")
    for colour, variable in {"#ffffff": "paper", "#000000": "ink"}.items():
        body = body.replace(colour, f"var(--{variable})")
    text = SVG.format(96 * width, 96 * height, head.removeprefix("<svg"), body)
    (FIGURES / f"{name}.svg").write_text(text, encoding="utf-8")
