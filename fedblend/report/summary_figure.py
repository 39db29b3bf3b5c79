"""The summary figure (PNG): curves, costs and final numbers in one picture, for a paper or a slide."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import SubFigure

from fedblend.analysis import plotting
from fedblend.core.errors import counted
from fedblend.report.columns import final_score
from fedblend.report.curve_figures import BAND_TEXT, Line, draw_target, lines, method_handles
from fedblend.report.guarantees import PRIVACY_NOTE
from fedblend.report.sections import DatasetSection
from fedblend.runs.groups import Group
from fedblend.runs.summary import averaged, megabytes, score

WIDTH, PANEL_HEIGHT, LEGEND_ROW = 8.5, 3.9, 0.25
"""Inches: the width of the figure, the height of a data set's panels, and the height of a row of its legend."""

LEGEND_LETTERS = 100  # Letters that fit into a row of the legend


def draw_summary(sections: Sequence[DatasetSection]) -> bytes:
    """A PNG with a row of two panels for each data set, and the final numbers below.

    The panels are the accuracy (or loss) by round with bands over seeds, and the same against megabytes sent.
    """
    legends = [[textwrap.fill(_legend_text(row), LEGEND_LETTERS) for row in section.rows] for section in sections]
    heights = [PANEL_HEIGHT + LEGEND_ROW * sum(1 + text.count("\n") for text in legend) for legend in legends]
    figure = plotting.blank_figure(WIDTH, sum(heights), (0.12, 0.08))
    rows = figure.subfigures(len(sections), 1, squeeze=False, height_ratios=heights)[:, 0]
    for row, section, legend in zip(rows, sections, legends, strict=True):
        _draw_section(row, section, legend)
    return plotting.png_bytes(figure)


def _draw_section(figure: SubFigure, section: DatasetSection, legend: Sequence[str]) -> None:
    column = "accuracy" if section.curves["accuracy"].notna().any() else "loss"
    by_round, by_bytes = figure.subplots(1, 2, sharey=True)
    drawn = lines(section.curves, column)
    for line in drawn:
        style = section.styles[line.method]
        _draw_line(by_round, line, line.rounds, style)
        sent = next((i for i, megabytes in enumerate(line.megabytes) if megabytes > 0), len(line.megabytes))
        _draw_line(by_bytes, line, line.megabytes, style, sent)
    title = f"Test {column} by round and by megabytes sent: {section.name}, {_seeds_text(section.groups)}"
    plotting.head_figure(figure, title, 11.5)
    by_round.set_title(section.description.short, loc="left", fontsize=9.5, color=plotting.MUTED, parse_math=False)
    plotting.style_axes(by_round, "round", "test accuracy (%)" if column == "accuracy" else "test loss")
    plotting.even_ticks(by_round.xaxis)
    plotting.style_axes(by_bytes, "MB sent so far, all clients, log scale  (← cheaper)", "")
    if amounts := [megabytes for line in drawn for megabytes in line.megabytes if megabytes > 0]:
        plotting.log_axis(by_bytes, amounts)
    for target in section.targets if column == "accuracy" else ():
        draw_target(by_round, target, 8)
        draw_target(by_bytes, target, 0)
    handles = method_handles([section.styles[g.name] for g in section.groups], linewidth=2, markersize=4.5)
    plotting.add_legend(figure, handles, legend, fontsize=9, title=BAND_TEXT, title_fontsize=8, alignment="left")


def _draw_line(axes: Axes, line: Line, x: Sequence[float], style: plotting.LineStyle, first: int = 0) -> None:
    if len(line.seeds) > 1:
        axes.fill_between(
            x[first:], line.low[first:], line.high[first:], color=style.colour, alpha=plotting.BAND, linewidth=0
        )
    axes.plot(
        x[first:], line.mean[first:], color=style.colour, linestyle=":" if line.unfinished else style.dash,
        linewidth=1.2 if line.unfinished else 1.8, marker=style.marker, markersize=4.5, markeredgewidth=0,
        markevery=max(1, (len(x) - first) // 8),
    )  # fmt: skip


def _seeds_text(groups: Sequence[Group]) -> str:
    numbers = [len({o.seed for o in g.outcomes}) for g in groups]
    fewest, most = min(numbers), max(numbers)
    return counted(most, "seed") if fewest == most else f"{fewest} to {counted(most, 'seed')}"


def _legend_text(row: Mapping[str, Any]) -> str:
    """``fedmix: final accuracy 71.2 ± 1.4 % (3 seeds), mean of last 10: ...``."""
    unit = " %" if row["measure"] == "accuracy" else ""
    name = f"{row['method']} ({PRIVACY_NOTE})" if row["unsafe"] else row["method"]
    if not row["seeds"]:
        return f"{name}: not evaluated yet"
    final = final_score(row) if row["diverged"] else score(row["measure"], row["final"], row["final_std"])
    last = score(row["measure"], row["last"], row["last_std"])
    text = (
        f"{name}: final {row['measure']} {final}{unit} ({counted(row['seeds'], 'seed')}), "
        f"mean of last {averaged(row)}: {last}{unit}, {megabytes(row['bytes_up'] + row['bytes_down'])} sent"
    )
    return text + (f"; {row['states']}" if row["unfinished"] else "")
