"""Reports: an HTML page, a summary figure (PNG), and tables for the terminal.

Plotly, matplotlib and jinja2 are imported when a report is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedblend.runs.directory import RunDirectory

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["compare", "write"]


def write(runs: Sequence[RunDirectory], html: Path, png: Path | None = None) -> None:
    """Write an HTML page that compares runs and works offline, and the summary figure ``png`` if given.

    Missing folders are created. Raises :class:`~fedblend.core.errors.FedblendError` if there is no run, a run is
    damaged, or a file cannot be written.
    """
    from fedblend.report.page import write as write_page

    write_page(runs, html, png)


def compare(runs: Sequence[RunDirectory], reasons: bool = True) -> RenderableType:
    """A table for each data set for the terminal, with a row for each method over its seeds.

    The best value of a column is bold. Without ``reasons`` the notes on failed runs have no reasons.
    """
    from fedblend.report.tables import comparison_tables

    return comparison_tables(runs, reasons)
