"""Charts of a report, drawn once (matplotlib) for the page and for export: accuracy by class, time by phase, splits."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure

from fedblend.analysis import plotting
from fedblend.core.errors import legible
from fedblend.runs.groups import Group

COLUMN_WIDTH = 3.5  # Width of a chart in inches: a column of a paper in two columns
LETTERS = 8.0  # Size of letters in points
NAME_WIDTH = 18  # Letters in a line of a wrapped name beside an axis

MAX_WRITTEN_CLASSES = 16
"""Largest number of classes with which the cells of the class chart show numbers; with more, colours only."""

MAX_SHOWN_CELLS = 600  # Largest number of cells of a split that the page shows as numbers; an export has all
MAX_NAME = 24  # Letters of a client's name that a figure shows
LETTERS_BELOW = 34  # Letters that have room side by side below the columns of a chart
MAX_TICKS = 16  # Largest number of labels on an axis of names; of more, evenly spaced ones are shown
PALE, FULL = 0.04, 0.92  # Opacity of the lowest and highest value in a grid of cells


@dataclass(frozen=True)
class Mark:
    """What a pointer over a line shows."""

    method: str
    title: str
    points: tuple[str, ...]


@dataclass(frozen=True)
class Numbers:
    """A table of plain text."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Chart:
    """A drawn figure of column width, with its numbers."""

    name: str
    """The id on the page, and the file's name in an export."""
    title: str
    figure: Figure
    data: Numbers
    """All numbers that are drawn."""
    shown: Numbers | None = None
    """Numbers below the picture; ``None``: another table or the picture itself has them."""
    marks: Mapping[str, Mark] = field(default_factory=dict)
    """Texts by the id of the drawn line."""
    methods: Mapping[str, plotting.LineStyle] = field(default_factory=dict)
    """The methods whose lines are drawn. The figure itself has no legend of them."""


def column_figure(height: float) -> Figure:
    """An empty figure of column width."""
    return plotting.blank_figure(COLUMN_WIDTH, height, (0.03, 0.03))


def wrapped(name: str, width: int = NAME_WIDTH) -> str:
    """A name in lines of at most ``width`` letters."""
    return "\n".join(textwrap.wrap(name, width)) or name


def plain_legend(figure: Figure, handles: Sequence[Any], texts: Sequence[str], columns: int) -> None:
    """Draw a chart's legend below the axes."""
    shape = {"borderpad": 0.2, "handlelength": 2.6, "columnspacing": 1.2}
    plotting.add_legend(figure, handles, texts, fontsize=LETTERS - 0.5, ncols=columns, **shape)


def class_chart(groups: Sequence[Group]) -> Chart | None:
    """Accuracy of the final model by class, for methods on one data set: a row a method, the mean over its seeds.

    ``None`` without classes.
    """
    rows: dict[str, list[float | None]] = {}
    for g in groups:
        finals = [scores for o in g.counted if o.evaluated and (scores := o.evaluated[-1].per_class) is not None]
        if finals:
            # Where the test samples lack a class there is no mean.
            present = [[v for v in values if v is not None] for values in zip(*finals, strict=True)]
            rows[g.name] = [100 * sum(values) / len(values) if values else None for values in present]
    if not rows:
        return None
    classes = [class_label(name) for name in groups[0].outcomes[0].facts.get("data", {}).get("classes", [])]
    names = [wrapped(name) for name in rows]
    lines = sum(1 + name.count("\n") for name in names)
    figure = column_figure(0.75 + 0.17 * lines + 0.05 * max(map(len, classes), default=0))
    axes = figure.add_subplot()
    written = len(classes) <= MAX_WRITTEN_CLASSES
    _draw_cells(axes, list(rows.values()), 100, "accuracy (%)", 0.5 if written else FULL)
    plotting.style_axes(axes, "class", "", LETTERS)
    _name_ticks(axes, classes, names)
    if written:
        for i, values in enumerate(rows.values()):
            for k, value in enumerate(values):
                text = "" if value is None else f"{value:.0f}"
                axes.text(k, i, text, ha="center", va="center", fontsize=LETTERS - 1.5, color=plotting.INK)
    cells = [[name, *("" if v is None else f"{v:.4g}" for v in values)] for name, values in rows.items()]
    data = Numbers(["method", *classes], cells)
    return Chart("classes", "Accuracy by class (%)", figure, data, None if written else data)


def class_label(name: str) -> str:
    """A class's name for an axis. Blanks and line ends, which are classes of a text, are quoted.

    >>> class_label("7"), class_label(" ")
    ('7', "' '")
    """
    return name if name.isprintable() and name.strip() else repr(name)


def time_chart(rows: Sequence[Mapping[str, Any]]) -> Chart | None:
    """Seconds of a run by phase, from the rows of methods: a bar for each, the mean over its seeds."""
    phases = phases_of(rows)
    if not phases:
        return None
    names = [wrapped(row["method"]) for row in rows]
    lines = sum(1 + name.count("\n") for name in names)
    figure = column_figure(0.85 + 0.17 * lines + 0.15 * -(-len(phases) // 3))
    axes = figure.add_subplot()
    colours, left = plotting.phase_colours(phases), [0.0] * len(rows)
    for phase in phases:
        widths = [row[f"seconds.{phase}"] for row in rows]
        axes.barh(range(len(rows)), widths, left=left, height=0.65, color=colours[phase], label=phase, clip_on=False)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    plotting.style_axes(axes, "seconds, mean over seeds", "", LETTERS)
    axes.grid(visible=False, axis="y")
    axes.set_yticks(range(len(rows)), names, parse_math=False)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain_legend(figure, axes.get_legend_handles_labels()[0], phases, 3)
    data = Numbers(
        ["method", *(f"{phase} (s)" for phase in phases)],
        [[row["method"], *(f"{row[f'seconds.{phase}']:.6g}" for phase in phases)] for row in rows],
    )
    return Chart("time", "Time by phase", figure, data)


def phases_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The phases that took time, the longest first: that part begins at zero in every bar."""
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name.startswith("seconds.")]
    total = {name: sum(row.get(name, 0.0) for row in rows) for name in names}
    return [name.removeprefix("seconds.") for name in sorted(names, key=lambda n: -total[n]) if total[name] > 0]


def split_chart(record: Mapping[str, Any], name: str, title: str) -> Chart | None:
    """Samples by client and class, in regression by client; ``None`` where the run's record has no sizes."""
    counts, sizes = record.get("counts") or [], record.get("sizes") or []
    if not counts and not sizes:
        return None
    names = [legible(one, MAX_NAME) for one in record.get("names") or []]
    below = _room_below(names) if len(names) <= MAX_TICKS else 0.0
    if not counts:
        figure = column_figure(1.9 + below)
        axes = figure.add_subplot()
        axes.bar(range(len(sizes)), sizes, color=plotting.COLOURS[0], width=0.7, clip_on=False)
        plotting.style_axes(axes, "client", "samples", LETTERS)
        axes.grid(visible=False, axis="x")
        _client_ticks(axes, names)
        data = Numbers(["client", "samples"], [[names[i] if names else str(i), str(n)] for i, n in enumerate(sizes)])
    else:
        classes = [class_label(one) for one in record["classes"]]
        figure = column_figure(min(0.9 + 0.14 * len(classes), 4.2) + below)
        axes = figure.add_subplot()
        by_class = [list(column) for column in zip(*counts, strict=True)]
        _draw_cells(axes, by_class, max(1, max(map(max, counts))), "samples", FULL)
        plotting.style_axes(axes, "client", "class", LETTERS)
        _client_ticks(axes, names)
        _name_ticks(axes, None, classes)
        rows = [[one, *map(str, values)] for one, values in zip(classes, by_class, strict=True)]
        data = Numbers(["class", *(names or [f"client {i}" for i in range(len(counts))])], rows)
    few = len(data.rows) * len(data.head) <= MAX_SHOWN_CELLS
    return Chart(name, title, figure, data, data if few else None)


def _draw_cells(axes: Axes, rows: Sequence[Sequence[float | None]], most: float, unit: str, full: float) -> None:
    """Draw a grid of cells in one colour, whose opacity is the value: so it suits light and dark backgrounds."""
    colour = to_rgb(plotting.COLOURS[0])
    ramp = LinearSegmentedColormap.from_list("opacity", [(*colour, PALE), (*colour, full)])
    values = np.array([[np.nan if v is None else v for v in row] for row in rows], float)
    image = axes.imshow(values, cmap=ramp, vmin=0, vmax=most, aspect="auto", interpolation="none", clip_on=False)
    assert axes.figure is not None
    bar = axes.figure.colorbar(image, ax=axes, fraction=0.05, pad=0.02, aspect=16)
    bar.set_label(unit, fontsize=LETTERS, color=plotting.INK)
    bar.ax.tick_params(labelsize=LETTERS - 1, colors=plotting.INK, length=0)
    bar.ax.yaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    bar.outline.set_visible(False)


def _name_ticks(axes: Axes, columns: Sequence[str] | None, rows: Sequence[str]) -> None:
    axes.grid(visible=False)
    shown = plotting.evenly_spaced(range(len(rows)), MAX_TICKS) if len(rows) > 2 * MAX_TICKS else range(len(rows))
    axes.set_yticks(list(shown), [rows[i] for i in shown], parse_math=False, fontsize=LETTERS - 1)
    if columns is not None:
        _name_columns(axes, columns)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _name_columns(axes: Axes, names: Sequence[str]) -> None:
    """Label the horizontal axis by names, upright where they are long."""
    shown = plotting.evenly_spaced(range(len(names)), MAX_TICKS)
    texts, turned = _side_by_side([names[i] for i in shown])
    axes.set_xticks(list(shown), texts, parse_math=False, rotation=90 if turned else 0)


def _side_by_side(names: Sequence[str]) -> tuple[list[str], bool]:
    """Names as they stand below the columns of a chart, in several lines, and whether they must stand upright.

    >>> _side_by_side(["Ulm", "North Sea"]), _side_by_side(["Bartholomew"] * 5)[1]
    ((['Ulm', 'North Sea'], False), True)
    """
    width = LETTERS_BELOW // max(1, len(names))
    lines = [textwrap.fill(name, max(1, width), break_long_words=False) for name in names]
    fits = all(len(line) <= width for text in lines for line in text.split("\n"))
    return (lines, False) if fits else (list(names), True)


def _room_below(names: Sequence[str]) -> float:
    """The inches that names below the columns of a chart need beyond those of one line."""
    texts, turned = _side_by_side(names)
    return 0.08 * max(map(len, texts), default=0) if turned else 0.13 * max((t.count("\n") for t in texts), default=0)


def _client_ticks(axes: Axes, names: Sequence[str]) -> None:
    """Label the axis of clients by their names, where there are few, or put its ticks at whole numbers only."""
    if 0 < len(names) <= MAX_TICKS:
        _name_columns(axes, names)
        return
    plotting.even_ticks(axes.xaxis)
    plotting.even_ticks(axes.yaxis)
