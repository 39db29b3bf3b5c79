"""Reports: an HTML page, a summary figure (PNG), and tables for the terminal.

Matplotlib and jinja2 are imported when a report is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedblend.runs.directory import RunDirectory, reading

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["compare", "write"]


def write(runs: Sequence[RunDirectory], html: Path, png: Path | None = None, trust: bool = False) -> None:
    """Write an HTML page that compares runs and works offline, and the summary figure ``png`` if given.

    Unless ``trust``, code that the runs name is not imported, and what needs it is left out. Missing folders are
    created. Raises :class:`~fedblend.core.errors.FedblendError` if there is no run, a run is damaged, or a file cannot
    be written.
    """
    from fedblend.report.page import write as write_page

    with reading(runs, trust):
        write_page(runs, html, png)


def compare(runs: Sequence[RunDirectory], reasons: bool = True) -> RenderableType:
    """A table for each data set for the terminal, with a row for each method over its seeds.

    The best value of a column is bold. Without ``reasons`` the notes on failed runs have no reasons.
    Code that the runs name is not imported.
    """
    from fedblend.report.terminal import comparison_tables

    with reading(runs):
        return comparison_tables(runs, reasons)
