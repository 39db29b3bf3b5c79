"""Committed results, tables in Markdown and figures, for all pages."""

from __future__ import annotations

import io
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.analysis.plotting import DPI
from fedblend.papers.items import Item, all_papers

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


def figure_of(width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Any, name: str) -> None:
    """Write a figure to docs/figures."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    (FIGURES / f"{name}.png").write_bytes(buffer.getvalue())
