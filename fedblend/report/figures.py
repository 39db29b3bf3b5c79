"""The interactive figures of the page (plotly): curves over rounds and costs, accuracy by class, time, splits."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from fedblend.analysis.plotting import GRID, INK, LineStyle, phase_colours
from fedblend.runs.groups import Group
from fedblend.runs.summary import MEGABYTE

if TYPE_CHECKING:
    import pandas as pd

BAND_TEXT = "Line: mean over seeds. Band: from the lowest to the highest seed (no band: one seed)."

AXIS_TITLES = {"accuracy": "test accuracy (%)", "loss": "test loss", "train_loss": "training loss (mean of the cohort)"}
"""The title of a measure's axis, with its unit."""


MAX_WRITTEN_CLASSES = 16
"""Largest number of classes with which the cells of the class figure show numbers; with more, colours only."""

MAX_MARKED_ROUNDS = 20
"""Largest number of evaluated rounds that are marked by dots."""

MAX_UNIT_TICKS = 10
"""Largest end of an axis of whole numbers with a tick at each; plotly would put ticks between them."""

NAME_WIDTH = 36
"""Letters in a line of a wrapped name."""


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
    """The lowest value over the seeds."""
    high: list[float]
    """The highest value over the seeds."""
    megabytes: list[float]
    """Megabytes sent up and down by all clients, from the start to each round."""
    clock: list[float]
    """Seconds from the start to each round, with clients that compute in parallel and send over their channel."""

    @property
    def name(self) -> str:
        """The line's name in the legend."""
        return f"{self.method}, unfinished (seed {self.seeds[0]})" if self.unfinished else self.method


def lines(curves: pd.DataFrame, column: str) -> list[Line]:
    """The lines of one column of :func:`~fedblend.runs.summary.curves`, in order of method.

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
    points = points.assign(megabytes=(points["bytes_up"] + points["bytes_down"]) / MEGABYTE)
    by_round = points.groupby("round").agg(
        mean=(column, "mean"),
        low=(column, "min"),
        high=(column, "max"),
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


def plotly_text(text: str) -> str:
    """Text escaped for plotly, which reads ``<b>`` as markup; long text is wrapped."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(text, NAME_WIDTH) or [text])


def figure_by_round(
    frame: pd.DataFrame, column: str, styles: Mapping[str, LineStyle], targets: Sequence[float] = ()
) -> go.Figure:
    """A measure by round: a line for each method, a band over its seeds, and the target accuracies.

    ``column`` is the measure: "accuracy" (drawn in per cent), "loss" or "train_loss".
    """
    figure = go.Figure(layout=_layout("round", AXIS_TITLES[column], _height(styles)))
    drawn = lines(frame, column)
    for line in drawn:
        _add_line(figure, line, line.rounds, styles[line.method], _factor(column))
    figure.update_xaxes(**_whole_ticks(max((line.rounds[-1] for line in drawn if line.rounds), default=0)))
    for target in targets:
        figure.add_hline(
            100 * target,
            line={"color": "#8a939b", "width": 1, "dash": "dot"},
            annotation={"text": f"target {100 * target:g} %", "font": {"size": 11}},
            annotation_position="top left",
        )
    return figure


def figure_by_bytes(frame: pd.DataFrame, column: str, styles: Mapping[str, LineStyle]) -> go.Figure:
    """A measure against the megabytes that all clients sent and received until then."""
    figure = go.Figure(layout=_layout("sent so far, up and down (MB)", AXIS_TITLES[column], _height(styles)))
    for line in lines(frame, column):
        _add_line(figure, line, line.megabytes, styles[line.method], _factor(column), "%{x:,.1f} MB")
    return _style_amounts(figure)


def figure_by_time(frame: pd.DataFrame, column: str, styles: Mapping[str, LineStyle]) -> go.Figure:
    """A measure against the seconds of a federation whose clients compute in parallel and send over their channel."""
    figure = go.Figure(layout=_layout("time of sending and computing (s)", AXIS_TITLES[column], _height(styles)))
    for line in lines(frame, column):
        _add_line(figure, line, line.clock, styles[line.method], _factor(column), "%{x:,.4g} s")
    return _style_amounts(figure)


def _style_amounts(figure: go.Figure) -> go.Figure:
    """Style an x axis of large numbers. Methods share none, so the nearest point alone is described on hover."""
    figure.update_layout(hovermode="closest")
    return figure.update_xaxes(exponentformat="none", separatethousands=True)


def figure_by_epsilon(
    frame: pd.DataFrame, styles: Mapping[str, LineStyle], spent: Mapping[str, Mapping[int, float]]
) -> go.Figure | None:
    """Accuracy against the epsilon spent until then, a line for each method; ``None`` if no method has an epsilon.

    ``spent`` is epsilon by method and round.
    """
    figure = go.Figure(layout=_layout("epsilon spent so far (log scale)", AXIS_TITLES["accuracy"], _height(styles)))
    for line in lines(frame, "accuracy"):
        epsilons = spent.get(line.method, {})
        points = [(epsilons[r], 100 * y, r) for r, y in zip(line.rounds, line.mean, strict=True) if r in epsilons]
        if not points or line.unfinished:
            continue
        figure.add_scatter(
            x=[x for x, *_ in points],
            y=[y for _, y, _ in points],
            customdata=[r for *_, r in points],
            mode="lines+markers",
            marker={"size": [4] * (len(points) - 1) + [11]},
            line={"color": styles[line.method].colour, "width": 2.2, "dash": styles[line.method].dash},
            name=plotly_text(line.name),
            hovertemplate="%{y:.4g} at epsilon %{x:.3g} (round %{customdata})",
        )
    if not figure.data:
        return None
    figure.update_layout(hovermode="closest")
    return figure.update_xaxes(type="log")


def _height(styles: Mapping[str, LineStyle]) -> int:
    """The height in pixels, which grows with the number of methods: the legend takes its rows from the curves."""
    return 370 + 8 * len(styles)


def _factor(column: str) -> float:
    return 100 if column == "accuracy" else 1


def _add_line(
    figure: go.Figure, line: Line, x: Sequence[float], style: LineStyle, factor: float, where: str = "round %{x}"
) -> None:
    """Add a line with its band; one entry of the legend hides both."""
    if len(line.seeds) > 1:
        outline = [*line.high, *reversed(line.low)]
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[factor * value for value in outline],
            mode="none",
            fill="toself",
            fillcolor=style.band_colour,
            legendgroup=plotly_text(line.method),
            showlegend=False,
            hoverinfo="skip",
        )
    seeds = f"mean of {len(line.seeds)} seeds" if len(line.seeds) > 1 else f"seed {line.seeds[0]}"
    spans = [f"{factor * low:.4g} to {factor * high:.4g}" for low, high in zip(line.low, line.high, strict=True)]
    figure.add_scatter(
        x=list(x),
        y=[factor * value for value in line.mean],
        customdata=spans,
        mode="lines+markers" if len(x) <= MAX_MARKED_ROUNDS else "lines",
        marker={"size": 4},
        line={
            "color": style.colour,
            "width": 1.4 if line.unfinished else 2.2,
            "dash": "dot" if line.unfinished else style.dash,
        },
        name=plotly_text(line.name),
        legendgroup=plotly_text(line.method),
        hovertemplate=f"%{{y:.4g}} at {where} ({seeds}{', %{customdata}' if len(line.seeds) > 1 else ''})",
    )


def class_figure(groups: Sequence[Group]) -> go.Figure | None:
    """Accuracy of the final model by class, for methods on one data set: a row a method, the mean over its seeds.

    ``None`` without classes.
    """
    rows: dict[str, list[float | None]] = {}
    for g in groups:
        finals = [scores for o in g.counted if o.evaluated and (scores := o.evaluated[-1].per_class) is not None]
        if finals:
            rows[g.name] = [_mean_percent(values) for values in zip(*finals, strict=True)]
    if not rows:
        return None
    classes = groups[0].outcomes[0].facts.get("data", {}).get("classes", [])
    figure = go.Figure(layout=_layout("class", "", height=140 + 34 * len(rows)))
    figure.add_heatmap(
        z=list(rows.values()),
        x=[class_label(name) for name in classes],
        y=[plotly_text(name) for name in rows],
        zmin=0,
        zmax=100,
        xgap=2,
        ygap=2,
        texttemplate="%{z:.0f}" if len(classes) <= MAX_WRITTEN_CLASSES else None,
        colorbar=_colour_bar("accuracy (%)"),
        hovertemplate="%{y}, class %{x}: %{z:.1f} %<extra></extra>",
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def class_label(name: str) -> str:
    """A class's name for an axis. Blanks and line ends, which are classes of a text, are quoted.

    >>> class_label("7"), class_label(" "), class_label("<")
    ('7', "' '", '&lt;')
    """
    return plotly_text(name if name.isprintable() and name.strip() else repr(name))


def _mean_percent(values: Sequence[float | None]) -> float | None:
    """The mean in per cent; ``None`` where the test samples lack the class."""
    present = [value for value in values if value is not None]
    return 100 * sum(present) / len(present) if present else None


def time_figure(table: pd.DataFrame) -> go.Figure:
    """Seconds of a run by phase: a bar for each method, the mean over its seeds."""
    figure = go.Figure(layout=_layout("seconds, mean over seeds", "", height=150 + 38 * len(table)))
    phases = [name for name in table.columns if name.startswith("seconds.") and table[name].sum() > 0]
    colours = phase_colours([name.removeprefix("seconds.") for name in phases])
    # Longest first: that part begins at zero in every bar, so that methods can be compared.
    for name in sorted(phases, key=lambda name: -table[name].sum()):
        phase = name.removeprefix("seconds.")
        figure.add_bar(
            x=table[name].tolist(),
            y=[plotly_text(method) for method in table["method"]],
            orientation="h",
            name=plotly_text(phase),
            marker={"color": colours[phase]},
            hovertemplate=f"{plotly_text(phase)}: %{{x:.3g}} s",
        )
    figure.update_xaxes(exponentformat="none", separatethousands=True)
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="y unified", legend_traceorder="normal")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def split_figure(record: Mapping[str, Any]) -> go.Figure | None:
    """Samples by client and class, in regression by client; ``None`` where the run's record has no sizes."""
    counts, sizes = record.get("counts") or [], record.get("sizes") or []
    if not counts:
        if not sizes:
            return None
        figure = go.Figure(layout=_layout("client", "samples", height=320))
        figure.add_bar(x=list(range(len(sizes))), y=sizes, hovertemplate="client %{x}: %{y} samples<extra></extra>")
        return figure.update_xaxes(**_whole_ticks(len(sizes) - 1)).update_yaxes(**_whole_ticks(max(sizes)))
    names, most = record["classes"], max(map(max, counts))
    figure = go.Figure(layout=_layout("client", "class", height=min(190 + 20 * len(names), 620)))
    figure.add_heatmap(
        z=[list(column) for column in zip(*counts, strict=True)],
        x=list(range(len(counts))),
        y=[class_label(name) for name in names],
        zmin=0,
        zmax=max(most, 1),  # without zmax plotly ignores zmin, and colours would begin at the smallest number
        xgap=1 if len(counts) <= 60 else 0,
        ygap=1,
        colorbar=_colour_bar("samples") | _whole_ticks(most),
        hovertemplate="client %{x}, class %{y}: %{z} samples<extra></extra>",
    )
    figure.update_xaxes(showgrid=False, **_whole_ticks(len(counts) - 1))
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _whole_ticks(last: float) -> dict[str, Any]:
    """Ticks at every whole number of an axis up to ``last``, if they are few."""
    return {"dtick": 1} if last <= MAX_UNIT_TICKS else {}


def _colour_bar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "right", "font": {"size": 13}}, "thickness": 10, "outlinewidth": 0}


def _layout(x: str, y: str, height: int) -> dict[str, Any]:
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "ticks": ""}
    title = {"standoff": 10, "font": {"size": 13}}
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 12, "r": 12, "t": 34, "b": 12},
        "font": {"size": 12.5, "color": INK},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": axis | {"title": {"text": x, **title}},
        "yaxis": axis | {"title": {"text": y, **title}},
        "hovermode": "x unified",
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom", "tracegroupgap": 0},
    }
