"""Figures of point measurements and loss scaling: curves by round, with reference levels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedblend.analysis import plotting
from fedblend.analysis.points.point_metrics import PointMeasurements
from fedblend.analysis.points.replay import Row

SIZE = (6.4, 4.2)  # Width and height of a figure in inches

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
    percent = 100 * trained["accuracy"]
    until = "kept points made until round" if measurements.kept else "points made until round"
    made, rounds = "round the points were made in", frame["round"].tolist()
    drawn: dict[str, tuple[dict[str, Curve], dict[str, float], tuple[str, str]]] = {
        "accuracy": (
            {"new model, trained on the points alone": (trained["round"].tolist(), percent.tolist())},
            {LEVELS["accuracy"]: 100 * levels["accuracy"]},
            (until, "test accuracy (%)"),
        ),
        "alignment": (
            {"points of the round, at the last model": (rounds, frame["alignment"].tolist())},
            {"": 0.0},
            (made, "cosine with the gradient on clients' data"),
        ),
    }
    if frame["distance"].notna().any():
        drawn["distance"] = (
            {"points of the round": (rounds, frame["distance"].tolist())},
            {LEVELS[name]: levels[name] for name in ("noise", "test", "train")},
            (made, "mean cosine distance to training samples"),
        )
    return {f"{name}.png": draw_curves(*given, title) for name, given in drawn.items()}


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
    figure = plotting.blank_figure(*SIZE, (0.1, 0.08))
    axes = figure.add_subplot()
    plotting.head_figure(figure, title, 11)
    for (name, (x, y)), colour in zip(lines.items(), plotting.COLOURS, strict=False):
        shown = [math.nan if value is None else value for value in y]
        axes.plot(x, shown, color=colour, linewidth=1.8, marker="o" if len(x) <= 20 else None, markersize=4, label=name)
    named = [name for name in levels if name]
    for name, value in levels.items():
        at = named.index(name) if name else 0
        axes.axhline(
            value,
            color=plotting.COLOURS[(len(lines) + at) % len(plotting.COLOURS)] if name else plotting.MUTED,
            linestyle=plotting.DASHES[1 + at % 3] if name else "-",
            linewidth=1.4 if name else 0.8,
            label=name or None,
            zorder=1,
        )
    plotting.style_axes(axes, *labels)
    plotting.even_ticks(axes.xaxis)
    axes.margins(x=0.03, y=0.08)
    plotting.add_legend(figure, *axes.get_legend_handles_labels(), fontsize=8.5, ncols=2)
    return plotting.png_bytes(figure)
