"""Figures of point measurements and loss scaling: curves by round, with reference levels."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedblend.analysis.plotting import COLOURS, DASHES, DPI, INK, MUTED, style_axes
from fedblend.analysis.points.point_metrics import PointMeasurements
from fedblend.analysis.points.replay import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (6.4, 4.2)
"""Width and height of a figure in inches."""

LEVELS = {
    "noise": "uniform noise",
    "test": "test samples",
    "train": "training samples among themselves",
    "accuracy": "the run's own last model",
}
"""Names of the reference levels in figures and tables."""

Curve = tuple[Sequence[float], Sequence[float]]


def draw_points(measurements: PointMeasurements, title: str) -> dict[str, bytes]:
    """Draw a PNG for each available measure; return them by file name."""
    frame, levels = measurements.rounds, measurements.levels
    trained = frame.dropna(subset="accuracy")
    percent = [100 * value for value in trained["accuracy"].tolist()]
    pngs = {
        "accuracy.png": draw_curves(
            {"new model, trained on the points alone": (trained["round"].tolist(), percent)},
            {LEVELS["accuracy"]: 100 * levels["accuracy"]},
            ("kept points made until round" if measurements.kept else "points made until round", "test accuracy (%)"),
            title,
        ),
        "alignment.png": draw_curves(
            {"points of the round, at the last model": (frame["round"].tolist(), frame["alignment"].tolist())},
            {"": 0.0},
            ("round the points were made in", "cosine with the gradient on clients' data"),
            title,
        ),
    }
    if frame["distance"].notna().any():
        pngs["distance.png"] = draw_curves(
            {"points of the round": (frame["round"].tolist(), frame["distance"].tolist())},
            {LEVELS[name]: levels[name] for name in ("noise", "test", "train")},
            ("round the points were made in", "mean cosine distance to training samples"),
            title,
        )
    return pngs


def draw_replay(rows: Sequence[Row], title: str, kept: bool = False) -> bytes:
    """Draw a PNG of the alignment in each round of the run."""
    rounds = [row["round"] for row in rows]
    return draw_curves(
        {
            "all kept points" if kept else "all points so far": (rounds, [row["alignment"] for row in rows]),
            "the round's points alone": (rounds, [row["alignment_new"] for row in rows]),
        },
        {"": 0.0},
        ("round", "cosine with the gradient on clients' data"),
        title,
    )


def draw_curves(lines: Mapping[str, Curve], levels: Mapping[str, float], labels: tuple[str, str], title: str) -> bytes:
    """Draw a PNG of curves by round with horizontal levels; a level without a name has no legend entry."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import MaxNLocator

    spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
    figure = Figure(figsize=SIZE, dpi=DPI, layout=spacing, facecolor="white")
    FigureCanvasAgg(figure)
    axes: Axes = figure.add_subplot()
    figure.suptitle(title, x=0.012, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    for (name, (x, y)), colour in zip(lines.items(), COLOURS, strict=False):
        shown = [math.nan if value is None else value for value in y]
        axes.plot(x, shown, color=colour, linewidth=1.8, marker="o" if len(x) <= 20 else None, markersize=4, label=name)
    named = [name for name in levels if name]
    for name, value in levels.items():
        at = named.index(name) if name else 0
        axes.axhline(
            value,
            color=COLOURS[(len(lines) + at) % len(COLOURS)] if name else MUTED,
            linestyle=DASHES[1 + at % 3] if name else "-",
            linewidth=1.4 if name else 0.8,
            label=name or None,
            zorder=1,
        )
    style_axes(axes, *labels)
    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.margins(x=0.03, y=0.08)
    legend = figure.legend(loc="outside lower left", fontsize=8.5, frameon=False, labelcolor=INK, ncols=2)
    for text in legend.get_texts():
        text.set_parse_math(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
