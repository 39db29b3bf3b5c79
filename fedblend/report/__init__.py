"""Reports: one HTML page, a still picture, and a table for the terminal.

What they need (plotly, matplotlib, jinja2) is imported when a report is made, not before.
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
    """Write one page that compares runs and works offline, and a still picture beside it.

    Folders on the way are made. Raises :class:`~fedblend.core.errors.FedblendError` if there is no run, a
    run is damaged, or a file cannot be written.
    """
    from fedblend.report.page import write as write_page

    write_page(runs, html, png)


def compare(runs: Sequence[RunDirectory], reasons: bool = True) -> RenderableType:
    """A table a data set for the terminal, one row a method over its seeds; the best value of a column is bold.

    Without ``reasons`` it does not say why runs failed.
    """
    from fedblend.report.terminal import compare as tables

    return tables(runs, reasons)
