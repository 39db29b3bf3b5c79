"""The still picture: curves and costs in one figure, for a paper or a slide."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedblend.analysis.plotting import BAND, DPI, INK, MUTED, Look, dress
from fedblend.report.chapters import Chapter
from fedblend.report.lines import BAND_TEXT, Line, lines
from fedblend.report.privacy import NOTE
from fedblend.report.terminal import rows_of
from fedblend.runs.summary import averaged, megabytes, score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

WIDTH, HEIGHT, ROW = 11.0, 4.3, 0.25
"""Inches: of the picture, of a data set's panels, and of a row of its legend."""

LETTERS = 130
"""Letters that fit into a row of the legend."""


def draw(told: Sequence[Chapter], title: str) -> bytes:
    """A PNG, a row of panels for each data set.

    The measure by round with bands over seeds, and against megabytes sent; final numbers below.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    legends = [_legend_of(chapter) for chapter in told]
    heights = [HEIGHT + ROW * sum(1 + text.count("\n") for text in legend) for legend in legends]
    spacing = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08)
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout=spacing, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    rows = figure.subfigures(len(told), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, chapter, legend in zip(rows, told, legends, strict=True):
        _draw_chapter(row, chapter, legend)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _legend_of(chapter: Chapter) -> list[str]:
    """What the legend says of each method."""
    notes = dict.fromkeys(chapter.unsafe, NOTE)
    return [textwrap.fill(_words(row, notes.get(row["method"], "")), LETTERS) for row in rows_of(chapter.table)]


def _draw_chapter(figure: SubFigure, chapter: Chapter, legend: Sequence[str]) -> None:
    """The two panels of one data set, and its legend."""
    from matplotlib.ticker import MaxNLocator

    column = "accuracy" if chapter.curves["accuracy"].notna().any() else "loss"
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    factor = 100 if column == "accuracy" else 1
    for line in lines(chapter.curves, column):
        _draw(by_round, line, line.rounds, chapter.looks[line.method], factor)
        _draw(by_bytes, line, line.megabytes, chapter.looks[line.method], factor)
    by_round.set_title(chapter.about.short, loc="left", fontsize=9.5, color=MUTED, parse_math=False)
    dress(by_round, "round", "test accuracy (%)" if column == "accuracy" else "test loss")
    by_round.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    dress(by_bytes, "sent up and down since the beginning, all clients (MB)", "")
    for target in chapter.targets if column == "accuracy" else ():
        for axes in (by_round, by_bytes):
            axes.axhline(100 * target, color=MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
        by_round.annotate(
            f"target {100 * target:g} %", (0.01, 100 * target), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", fontsize=8, color=MUTED,
        )  # fmt: skip
    _legend(figure, legend, [chapter.looks[name] for name in chapter.table["method"]])


def _draw(axes: Axes, line: Line, x: Sequence[float], look: Look, factor: float) -> None:
    if len(line.seeds) > 1:
        low, high = ([factor * value for value in values] for values in (line.low, line.high))
        axes.fill_between(x, low, high, color=look.colour, alpha=BAND, linewidth=0)
    stroke: Any = ":" if line.unfinished else look.stroke
    values = [factor * value for value in line.mean]
    axes.plot(x, values, color=look.colour, linestyle=stroke, linewidth=1.2 if line.unfinished else 1.8)


def _legend(figure: SubFigure, words: Sequence[str], looks: Sequence[Look]) -> None:
    """A row a method below the panels: its line, its final numbers and what it sent."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=look.colour, linestyle=look.stroke, linewidth=2) for look in looks]
    legend = figure.legend(
        handles, words, loc="outside lower left", fontsize=9, frameon=False,
        title=BAND_TEXT, title_fontsize=8, alignment="left", labelcolor=INK,
    )  # fmt: skip
    legend.get_title().set_color(MUTED)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _words(row: Mapping[str, Any], note: str) -> str:
    """``fedmix: final accuracy 71.2 ± 1.4 % (3 seeds), mean of last 10: ...``."""
    unit = " %" if row["measure"] == "accuracy" else ""
    seeds = f"{row['seeds']} seed{'' if row['seeds'] == 1 else 's'}"
    name = f"{row['method']} ({note})" if note else row["method"]
    if not row["seeds"]:
        return f"{name}: not evaluated yet"
    final, last = (score(row["measure"], row[name], row[f"{name}_std"]) for name in ("final", "last"))
    text = (
        f"{name}: final {row['measure']} {final}{unit} ({seeds}), mean of last {averaged(row)}: {last}{unit}, "
        f"{megabytes(row['bytes_up'] + row['bytes_down'])} sent"
    )
    return text + (f"; {row['states']}" if row["unfinished"] else "")
