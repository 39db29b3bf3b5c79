"""Curves of a report: a measure by round, against bytes, time or epsilon, with a band over seeds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedblend.analysis import plotting
from fedblend.report.figures import LETTERS, Chart, Mark, Numbers, column_figure, plain_legend
from fedblend.runs.summary import MEGABYTE, NOTHING

BAND_TEXT = "Line: mean over seeds. Band: from the lowest to the highest seed (no band: one seed). Dotted: unfinished."

AXIS_TITLES = {"accuracy": "test accuracy (%)", "loss": "test loss", "train_loss": "training loss"}
"""The title of a measure's axis, with its unit."""

MAX_POINTS = 150  # Largest number of points drawn of a line; of more, evenly spaced ones with the first and the last
MAX_MARKS = 9  # Largest number of marked points of a line
SHOWN_ROUNDS = 6  # Rounds in the table below a chart, the last one first
DIVERGED = 1000  # From this ratio of the largest to the smallest value on, a chart's y axis is logarithmic
HEIGHT = 2.45  # Height of a chart in inches


@dataclass(frozen=True)
class Line:
    """One line of a figure, with a point for each round: mean and range over the seeds of a method.

    An unfinished run has a line of its own, with one seed.
    """

    method: str
    seeds: tuple[int, ...]
    unfinished: bool
    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    megabytes: list[float]
    """Megabytes sent up and down by all clients, from the start to each round."""
    clock: list[float]
    """Seconds from the start to each round, with clients that compute in parallel and send over their channel."""

    @property
    def name(self) -> str:
        return f"{self.method}, unfinished (seed {self.seeds[0]})" if self.unfinished else self.method


def lines(curves: pd.DataFrame, column: str) -> list[Line]:
    """The lines of one column of :func:`~fedblend.runs.summary.curves_of`, in order of method.

    Only rounds that all finished runs of a method have are kept, so that no mean jumps where one seed ends. Methods
    without any value have no line.
    """
    drawn = []
    for method, of_method in curves.dropna(subset=[column]).groupby("method", sort=False):
        finished = of_method[of_method["finished"]]
        if len(finished):
            drawn.append(_line(str(method), finished, column, False))
        for _, run in of_method[~of_method["finished"]].groupby(["study", "run"], sort=False):
            drawn.append(_line(str(method), run, column, True))
    return drawn


def _line(method: str, points: pd.DataFrame, column: str, unfinished: bool) -> Line:
    seeds = points["seed"].nunique()
    factor = 100 if column == "accuracy" or column.startswith("measured.") else 1
    points = points.assign(
        megabytes=(points["bytes_up"] + points["bytes_down"]) / MEGABYTE, value=factor * points[column]
    )
    by_round = points.groupby("round").agg(
        mean=("value", "mean"),
        low=("value", "min"),
        high=("value", "max"),
        megabytes=("megabytes", "mean"),
        clock=("clock", "mean"),
        seeds=("seed", "nunique"),
    )
    by_round = by_round[by_round["seeds"] == seeds]
    return Line(
        method,
        tuple(sorted(points["seed"].unique().tolist())),
        unfinished,
        by_round.index.tolist(),
        *(by_round[name].tolist() for name in ("mean", "low", "high", "megabytes", "clock")),
    )


@dataclass(frozen=True)
class Abscissa:
    """What a chart has on its x axis."""

    label: str
    values: Callable[[Line], Sequence[float | None]]
    """A number for each round of a line; ``None``: the round is left out."""
    text: str
    """A point's place in words, such as ``at {:,.4g} MB``."""
    better: str = ""
    """What numbers further left are, such as "cheaper"."""
    log: bool = False
    """A logarithmic axis, which leaves out numbers that are not above zero."""

    @property
    def title(self) -> str:
        """What the axis says."""
        better = f"  (← {self.better})" if self.better else ""
        return f"{self.label}{', log scale' if self.log else ''}{better}"


BY_ROUND = Abscissa("round", lambda line: line.rounds, "in round {:g}")
BY_BYTES = Abscissa("MB sent so far, up and down", lambda line: line.megabytes, "at {:,.4g} MB", "cheaper", log=True)
BY_TIME = Abscissa("seconds of sending and computing", lambda line: line.clock, "at {:,.4g} s", "faster")


def by_epsilon(spent: Mapping[str, Mapping[int, float]]) -> Abscissa:
    """The axis of epsilon until each round, from epsilons by method and round."""

    def values(line: Line) -> list[float | None]:
        return [None if line.unfinished else spent.get(line.method, {}).get(round) for round in line.rounds]

    return Abscissa("epsilon spent so far", values, "at epsilon {:.3g}", "more private", log=True)


def curve_chart(
    name: str,
    title: str,
    drawn: Sequence[Line],
    abscissa: Abscissa,
    column: str,
    styles: Mapping[str, plotting.LineStyle],
    targets: Sequence[float] = (),
) -> Chart | None:
    """A measure against ``abscissa``: a line for each method, a band over its seeds, and the target accuracies.

    ``column`` is the measure: "accuracy" or a share (in per cent), "loss" or "train_loss". Values that are not finite
    are left out. ``None`` if no line has a point.
    """
    figure = column_figure(HEIGHT)
    axes = figure.add_subplot()
    plotting.style_axes(axes, abscissa.title, AXIS_TITLES.get(column, "share (%)"), LETTERS)
    marks: dict[str, Mark] = {}
    data: list[list[str]] = []
    shown: dict[str, dict[int, str]] = {}
    all_x: list[float] = []
    opacity = plotting.BAND * min(1, 3 / max(1, len(drawn)))  # of many bands, each is paler
    for line in drawn:
        points = _points_of(line, abscissa)
        if not points:
            continue
        all_x += [x for x, _ in points]
        gid = f"line{len(marks)}"
        marks[gid] = _draw_line(axes, line, points, abscissa, styles[line.method], gid, opacity)
        seeds = " ".join(map(str, line.seeds))
        for x, i in points:
            place = [line.rounds[i]] if abscissa is BY_ROUND else [line.rounds[i], x]
            numbers = (*place, line.mean[i], line.low[i], line.high[i])
            data.append([line.name, seeds, *(f"{v:.6g}" for v in numbers)])
        where = "" if abscissa is BY_ROUND else f" {abscissa.text}"
        shown[line.name] = {line.rounds[i]: _value(line, i) + where.format(x) for x, i in points}
    if not marks:
        return None
    if abscissa.log:
        plotting.log_axis(axes, all_x)
    else:
        plotting.even_ticks(axes.xaxis, integer=abscissa is BY_ROUND)
    values = [v for line in drawn for v in (*line.low, *line.high) if math.isfinite(v)]
    # So far apart, as when a run diverges, that only a logarithmic axis shows them.
    if min(values) > 0 and max(values) > DIVERGED * min(values):
        axes.set_yscale("log")
        axes.set_ylabel(f"{AXIS_TITLES.get(column, 'share (%)')}, log scale")
        axes.minorticks_off()
    for target in targets:
        draw_target(axes, target, LETTERS - 1)
    by = ["round"] if abscissa is BY_ROUND else ["round", abscissa.label]
    head = ["method", "seeds", *by, f"{AXIS_TITLES.get(column, 'share (%)')}: mean", "lowest seed", "highest seed"]
    rounds = plotting.evenly_spaced(sorted({r for cells in shown.values() for r in cells}), SHOWN_ROUNDS)[::-1]
    table = Numbers(
        ["method", *(f"round {r}" for r in rounds)],
        [[method, *(cells.get(r, NOTHING) for r in rounds)] for method, cells in shown.items()],
    )
    methods = {mark.method: styles[mark.method] for mark in marks.values()}
    return Chart(name, title, figure, Numbers(head, data), table, marks, methods)


def _points_of(line: Line, abscissa: Abscissa) -> list[tuple[float, int]]:
    return [
        (x, i)
        for i, x in enumerate(abscissa.values(line))
        if x is not None and not (abscissa.log and x <= 0) and math.isfinite(line.low[i] + line.high[i])
    ]


def draw_target(axes: Axes, target: float, size: float) -> None:
    """Draw a line at a target accuracy, and its number in letters of ``size`` points unless this is 0."""
    axes.axhline(100 * target, color=plotting.MUTED, linewidth=0.8, linestyle=(0, (1, 2)), zorder=1)
    if size:
        axes.annotate(
            f"target {100 * target:g} %", (0.01, 100 * target), xycoords=("axes fraction", "data"), xytext=(0, 2),
            textcoords="offset points", fontsize=size, color=plotting.MUTED,
        )  # fmt: skip


def _value(line: Line, i: int) -> str:
    span = f" ({line.low[i]:.4g} to {line.high[i]:.4g})" if len(line.seeds) > 1 else ""
    return f"{line.mean[i]:.4g}{span}"


def _draw_line(
    axes: Axes,
    line: Line,
    points: Sequence[tuple[float, int]],
    abscissa: Abscissa,
    style: plotting.LineStyle,
    gid: str,
    opacity: float,
) -> Mark:
    """Draw a line with its band, and return what a pointer over it shows."""
    kept = [points[k] for k in plotting.evenly_spaced(range(len(points)), MAX_POINTS)]
    x = [x for x, _ in kept]
    if len(line.seeds) > 1:
        band = axes.fill_between(
            x, [line.low[i] for _, i in kept], [line.high[i] for _, i in kept], color=style.colour, alpha=opacity,
            linewidth=0, clip_on=False,
        )  # fmt: skip
        band.set_gid(f"{gid}-band")
    marked = plotting.evenly_spaced(range(len(kept)), MAX_MARKS)
    axes.plot(
        x, [line.mean[i] for _, i in kept], color=style.colour, gid=gid, clip_on=False, marker=style.marker,
        linestyle=":" if line.unfinished else style.dash, linewidth=0.9 if line.unfinished else 1.3, markersize=3.4,
        markeredgewidth=0, markevery=marked,
    )  # fmt: skip
    seeds = f"mean of {len(line.seeds)} seeds" if len(line.seeds) > 1 else f"seed {line.seeds[0]}"
    texts = tuple(f"{line.name}: {_value(line, kept[k][1])} {abscissa.text.format(kept[k][0])}" for k in marked)
    return Mark(line.method, f"{texts[-1]} ({seeds})", texts)


def add_method_legend(figure: Figure, methods: Mapping[str, plotting.LineStyle]) -> None:
    """Add a legend of methods below a chart, which grows by as much."""
    texts = [textwrap.fill(name, 24) for name in methods]
    columns = 2 if len(texts) > 1 else 1
    rows = sum(1 + text.count("\n") for text in texts) / columns
    figure.set_figheight(figure.get_figheight() + 0.16 * (rows + 1))
    plain_legend(figure, method_handles(methods.values(), linewidth=1.3, markersize=3.4), texts, columns)


def method_handles(styles: Iterable[plotting.LineStyle], **sizes: Any) -> list[Line2D]:
    """Pieces of the lines of methods, for a legend."""
    return [Line2D([], [], color=s.colour, linestyle=s.dash, marker=s.marker, **sizes) for s in styles]


def legend_sample(style: plotting.LineStyle) -> Figure:
    """A short piece of a method's line, for a legend outside of figures."""
    figure = Figure(figsize=(0.42, 0.13))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    axes.plot(
        [0, 1, 2], [0, 0, 0], color=style.colour, linestyle=style.dash, marker=style.marker, markevery=[1],
        markersize=4.6, markeredgewidth=0, linewidth=1.5, clip_on=False,
    )  # fmt: skip
    axes.set_xlim(0, 2)
    return figure
