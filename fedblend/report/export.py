"""Figures and tables of a report as files for a paper: SVG, PDF and CSV of each figure, CSV and LaTeX of each table."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from fedblend.core.errors import FedblendError
from fedblend.core.files import csv_text, write_atomically
from fedblend.experiment.study import slugify
from fedblend.report.columns import BOLD_RULE
from fedblend.report.curve_figures import add_method_legend
from fedblend.report.guarantees import PRIVACY_NOTE
from fedblend.report.sections import DatasetSection, section_charts, splits
from fedblend.report.tables import Cell, PageTable, section_tables

LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "%": r"\%", "#": r"\#", "_": r"\_",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "<": r"\textless{}", ">": r"\textgreater{}",
    "|": r"\textbar{}", '"': r"\textquotedbl{}", "±": r"$\pm$", "—": "--", "ε": r"$\varepsilon$",
    "δ": r"$\delta$", "≤": r"$\leq$", "≥": r"$\geq$", "[": "{[}", "]": "{]}",
}  # fmt: skip
"""LaTeX of the characters that are not text in it. A bracket after a line's end would be read as an option of it."""


def export(sections: Sequence[DatasetSection], folder: Path) -> None:
    """Write the files of all sections into ``folder``, which is created; files of the same names are replaced.

    Raises :class:`FedblendError` if the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be created as a folder: {error.strerror}; give another path") from None
    names: set[str] = set()
    for section in sections:
        prefix = f"{_free(slugify(section.name), names)}-" if len(sections) > 1 else ""
        for chart in [*section_charts(section), *(split.chart for split in splits(section.groups))]:
            if chart.methods:
                add_method_legend(chart.figure, chart.methods)
            for form in ("svg", "pdf"):
                write_atomically(folder / f"{prefix}{chart.name}.{form}", figure_bytes(chart.figure, form))
            write_atomically(folder / f"{prefix}{chart.name}.csv", csv_text([chart.data.head, *chart.data.rows]))
        for name, table in section_tables(section).items():
            head = ["method", *(heading for heading, _ in table.headings)]
            rows = [[method, *(cell.text for cell in cells)] for method, cells in table.rows]
            write_atomically(folder / f"{prefix}table-{name}.csv", csv_text([head, *rows]))
            write_atomically(folder / f"{prefix}table-{name}.tex", latex(table, section.unsafe))


def figure_bytes(figure: Figure, form: str) -> bytes:
    """A figure as ``svg`` or ``pdf``, which need no font: letters are outlines in SVG, and PDF has the font inside."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": "fedblend", "pdf.fonttype": 42}):
        figure.savefig(buffer, format=form, metadata={"Date" if form == "svg" else "CreationDate": None})
    return buffer.getvalue()


def latex(table: PageTable, unsafe: Sequence[str] = ()) -> str:
    """A table as LaTeX (package booktabs); methods that share raw samples say so."""
    columns = zip(*(cells for _, cells in table.rows), strict=True)
    aligned = "".join("r" if any(cell.value is not None for cell in column) else "l" for column in columns)
    lines = [
        f"% Mean and sample standard deviation over seeds. {BOLD_RULE}",
        "% Needs \\usepackage{booktabs}, and \\usepackage[T1]{fontenc} with pdfLaTeX.",
        f"\\begin{{tabular}}{{l{aligned}}}",
        "\\toprule",
        _line(["method", *(escape(heading) for heading, _ in table.headings)]),
        "\\midrule",
    ]
    for method, cells in table.rows:
        name = escape(f"{method} ({PRIVACY_NOTE})" if method in unsafe else method)
        lines.append(_line([name, *map(_cell, cells)]))
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}", ""])


def _line(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: Cell) -> str:
    text = re.sub(r"(?<![\w.])-(?=\d)", "$-$", escape(cell.text))
    return f"\\textbf{{{text}}}" if cell.best else text


def escape(text: str) -> str:
    r"""Plain text as LaTeX.

    >>> escape("50% & {x_1}"), escape("71.2 ± 1.4"), escape("a\nb")
    ('50\\% \\& \\{x\\_1\\}', '71.2 $\\pm$ 1.4', 'a b')
    """
    return "".join(LATEX.get(letter, letter) for letter in " ".join(text.split()))


def _free(name: str, taken: set[str]) -> str:
    """A name that is not taken yet, which takes it."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name}-{number}", number + 1
    taken.add(free)
    return free
