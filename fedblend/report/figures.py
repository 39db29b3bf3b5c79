"""The figures of the page, for plotly: curves, costs, classes."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go

from fedblend.analysis.plotting import GRID, INK, Look, phase_colours
from fedblend.report.lines import Line, lines
from fedblend.runs.groups import Group

if TYPE_CHECKING:
    import pandas as pd

WRITTEN_CLASSES = 16
"""Up to so many classes, each cell of the table by class is written out; of more, the colour tells."""

MARKED_ROUNDS = 20
"""Up to so many evaluated rounds, each is marked by a dot."""

FEW = 10
"""Up to so many whole things, each has a tick; plotly's own choice would put ticks between them."""


WIDE = 36
"""Letters in a line of a name."""


def plain(text: str) -> str:
    """Text that plotly shows as it is, long text in several lines: it would read ``<b>`` and the like as markup."""
    return "<br>".join(html.escape(line, quote=False) for line in textwrap.wrap(text, WIDE) or [text])


def curve(frame: pd.DataFrame, column: str, looks: Mapping[str, Look], targets: Sequence[float] = ()) -> go.Figure:
    """A measure by round: a line a method, a band over its seeds, and the targets.

    ``column`` of the curves: "accuracy" (drawn in per cent), "loss" or "train_loss".
    """
    figure = go.Figure(layout=_layout("round", AXES[column], _height(looks)))
    drawn = lines(frame, column)
    for line in drawn:
        _add(figure, line, line.rounds, looks[line.method], _factor(column))
    figure.update_xaxes(**_whole(max((line.rounds[-1] for line in drawn if line.rounds), default=0)))
    for target in targets:
        figure.add_hline(
            100 * target,
            line={"color": "#8a939b", "width": 1, "dash": "dot"},
            annotation={"text": f"target {100 * target:g} %", "font": {"size": 11}},
            annotation_position="top left",
        )
    return figure


def cost(frame: pd.DataFrame, column: str, looks: Mapping[str, Look]) -> go.Figure:
    """A measure against what all clients had been sent and had sent until then, in megabytes."""
    figure = go.Figure(layout=_layout("sent so far, up and down (MB)", AXES[column], _height(looks)))
    for line in lines(frame, column):
        _add(figure, line, line.megabytes, looks[line.method], _factor(column), "%{x:,.1f} MB")
    return _along_amounts(figure)


def clock(frame: pd.DataFrame, column: str, looks: Mapping[str, Look]) -> go.Figure:
    """A measure against the seconds of a federation whose clients compute side by side over their channel."""
    figure = go.Figure(layout=_layout("time on the air and in computing (s)", AXES[column], _height(looks)))
    for line in lines(frame, column):
        _add(figure, line, line.clock, looks[line.method], _factor(column), "%{x:,.4g} s")
    return _along_amounts(figure)


def _along_amounts(figure: go.Figure) -> go.Figure:
    """An axis of large numbers, at which methods do not meet."""
    figure.update_layout(hovermode="closest")
    return figure.update_xaxes(exponentformat="none", separatethousands=True)


def against_epsilon(
    frame: pd.DataFrame, looks: Mapping[str, Look], spent: Mapping[str, Mapping[int, float]]
) -> go.Figure | None:
    """Accuracy against the epsilon spent until then, a line a method; ``None`` where no method has any."""
    figure = go.Figure(layout=_layout("epsilon spent so far (log scale)", AXES["accuracy"], _height(looks)))
    for line in lines(frame, "accuracy"):
        known = spent.get(line.method, {})
        points = [(known[r], 100 * y, r) for r, y in zip(line.rounds, line.mean, strict=True) if r in known]
        if not points or line.unfinished:
            continue
        figure.add_scatter(
            x=[x for x, *_ in points],
            y=[y for _, y, _ in points],
            customdata=[r for *_, r in points],
            mode="lines+markers",
            marker={"size": [4] * (len(points) - 1) + [11]},
            line={"color": looks[line.method].colour, "width": 2.2, "dash": looks[line.method].dash},
            name=plain(line.name),
            hovertemplate="%{y:.4g} at epsilon %{x:.3g} (round %{customdata})",
        )
    if not figure.data:
        return None
    figure.update_layout(hovermode="closest")
    return figure.update_xaxes(type="log")


AXES = {"accuracy": "test accuracy (%)", "loss": "test loss", "train_loss": "training loss (mean of the cohort)"}
"""What the axis of a measure is called, with its unit."""


def _height(looks: Mapping[str, Look]) -> int:
    """Taller the more methods there are, since the legend takes its rows from the curves."""
    return 370 + 8 * len(looks)


def _factor(column: str) -> float:
    return 100 if column == "accuracy" else 1


def _add(
    figure: go.Figure, line: Line, x: Sequence[float], look: Look, factor: float, where: str = "round %{x}"
) -> None:
    """Add a line with its band; both answer to one entry of the legend."""
    if len(line.seeds) > 1:
        outline = [*line.high, *reversed(line.low)]
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[factor * value for value in outline],
            mode="none",
            fill="toself",
            fillcolor=look.pale,
            legendgroup=plain(line.method),
            showlegend=False,
            hoverinfo="skip",
        )
    seeds = f"mean of {len(line.seeds)} seeds" if len(line.seeds) > 1 else f"seed {line.seeds[0]}"
    spans = [f"{factor * low:.4g} to {factor * high:.4g}" for low, high in zip(line.low, line.high, strict=True)]
    figure.add_scatter(
        x=list(x),
        y=[factor * value for value in line.mean],
        customdata=spans,
        mode="lines+markers" if len(x) <= MARKED_ROUNDS else "lines",
        marker={"size": 4},
        line={"color": look.colour, "width": 1.4 if line.unfinished else 2.2, "dash": _dash(line, look)},
        name=plain(line.name),
        legendgroup=plain(line.method),
        hovertemplate=f"%{{y:.4g}} at {where} ({seeds}{', %{customdata}' if len(line.seeds) > 1 else ''})",
    )


def _dash(line: Line, look: Look) -> str:
    return "dot" if line.unfinished else look.dash


def by_class(groups: Sequence[Group]) -> go.Figure | None:
    """Accuracy of the final model by class, of methods on one data set: a row a method, the mean over its seeds.

    ``None`` without classes.
    """
    rows: dict[str, list[float | None]] = {}
    for g in groups:
        finals = [o.evaluated[-1]["per_class"] for o in g.counted if o.evaluated and "per_class" in o.evaluated[-1]]
        if finals:
            rows[g.name] = [_mean_of(values) for values in zip(*finals, strict=True)]
    if not rows:
        return None
    classes = groups[0].outcomes[0].facts.get("data", {}).get("classes", [])
    figure = go.Figure(layout=_layout("class", "", height=140 + 34 * len(rows)))
    figure.add_heatmap(
        z=list(rows.values()),
        x=[visible(name) for name in classes],
        y=[plain(name) for name in rows],
        zmin=0,
        zmax=100,
        xgap=2,
        ygap=2,
        texttemplate="%{z:.0f}" if len(classes) <= WRITTEN_CLASSES else None,
        colorbar=_colour_bar("accuracy (%)"),
        hovertemplate="%{y}, class %{x}: %{z:.1f} %<extra></extra>",
    )
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def visible(name: str) -> str:
    """A class's name as it can be read on an axis; blanks and line ends (classes of a text) are spelled out.

    >>> visible("7"), visible(" "), visible("<")
    ('7', "' '", '&lt;')
    """
    return plain(name if name.isprintable() and name.strip() else repr(name))


def _mean_of(values: Sequence[float | None]) -> float | None:
    """The mean in per cent; ``None`` where the test half lacks the class."""
    known = [value for value in values if value is not None]
    return 100 * sum(known) / len(known) if known else None


def time(table: pd.DataFrame) -> go.Figure:
    """Seconds of a run by phase, a bar a method: the mean over its seeds."""
    figure = go.Figure(layout=_layout("seconds, mean over seeds", "", height=150 + 38 * len(table)))
    phases = [name for name in table.columns if name.startswith("seconds.") and table[name].sum() > 0]
    colours = phase_colours([name.removeprefix("seconds.") for name in phases])
    # Longest first, so that it begins at zero and can be compared between methods.
    for name in sorted(phases, key=lambda name: -table[name].sum()):
        phase = name.removeprefix("seconds.")
        figure.add_bar(
            x=table[name].tolist(),
            y=[plain(method) for method in table["method"]],
            orientation="h",
            name=plain(phase),
            marker={"color": colours[phase]},
            hovertemplate=f"{plain(phase)}: %{{x:.3g}} s",
        )
    figure.update_xaxes(exponentformat="none", separatethousands=True)
    figure.update_layout(barmode="stack", bargap=0.35, hovermode="y unified", legend_traceorder="normal")
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def split(record: Mapping[str, Any]) -> go.Figure | None:
    """Which client holds how many samples of which class; in regression how many samples; ``None`` if untold."""
    counts, sizes = record.get("counts") or [], record.get("sizes") or []
    if not counts:
        if not sizes:
            return None
        figure = go.Figure(layout=_layout("client", "samples", height=320))
        figure.add_bar(x=list(range(len(sizes))), y=sizes, hovertemplate="client %{x}: %{y} samples<extra></extra>")
        return figure.update_xaxes(**_whole(len(sizes) - 1)).update_yaxes(**_whole(max(sizes)))
    names, most = record["classes"], max(map(max, counts))
    figure = go.Figure(layout=_layout("client", "class", height=min(190 + 20 * len(names), 620)))
    figure.add_heatmap(
        z=[list(column) for column in zip(*counts, strict=True)],
        x=list(range(len(counts))),
        y=[visible(name) for name in names],
        zmin=0,
        zmax=max(most, 1),  # without it zmin would not count, and the colours begin at the smallest number
        xgap=1 if len(counts) <= 60 else 0,
        ygap=1,
        colorbar=_colour_bar("samples") | _whole(most),
        hovertemplate="client %{x}, class %{y}: %{z} samples<extra></extra>",
    )
    figure.update_xaxes(showgrid=False, **_whole(len(counts) - 1))
    figure.update_yaxes(type="category", autorange="reversed", showgrid=False)
    return figure


def _whole(last: float) -> dict[str, Any]:
    """Ticks of an axis of whole numbers up to ``last``."""
    return {"dtick": 1} if last <= FEW else {}


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
