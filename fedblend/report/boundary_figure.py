"""The figure of decision boundaries on data of two features, after AggEnhance's Figure 2."""

from __future__ import annotations

import math
from itertools import cycle
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedblend.analysis import plotting

if TYPE_CHECKING:
    from fedblend.analysis.points.boundaries import Boundary, Plane, SampleSet

PANEL_SIZE = (4.1, 3.5)  # Width and height of a panel in inches

CLASS_COLOURS = tuple(plotting.PHASES.values())
"""Colours of classes, paler than those of the methods, whose lines are drawn over them."""

CLASS_MARKERS = ("o", "s", "D", "P", "v", "X")  # Markers of classes, which distinguish them without colour

METHOD_DASHES: tuple[Any, ...] = ("--", ":", "-.", (0, (8, 3)))
"""Dashes of methods in matplotlib; only the best possible boundary is solid."""


def draw_boundaries(plane: Plane) -> bytes:
    """A PNG with a panel of each client's samples and one of all samples; each shows every model's boundary.

    The solid line of a panel is the boundary of a model trained on the panel's samples alone. The legend below has the
    accuracies.
    """
    panels = [*plane.clients, plane.whole]
    columns = math.ceil(math.sqrt(len(panels))) if len(panels) != 2 else 2
    rows = math.ceil(len(panels) / columns)
    legend_height = 0.25 * (len(plane.models) + len(plane.classes) + 2) / 2 + 0.4
    figure = plotting.blank_figure(max(PANEL_SIZE[0] * columns, 6.4), PANEL_SIZE[1] * rows + legend_height, (0.1, 0.1))
    plotting.head_figure(figure, f"{plane.title}: decision boundaries", 13)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, samples in zip(grid, panels, strict=False):
        _draw_panel(axes, samples, plane)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _draw_legend(figure, plane)
    return plotting.png_bytes(figure)


def accuracies(plane: Plane) -> list[tuple[str, float]]:
    """The name and test accuracy of each boundary: the best possible, the methods, each client's own model."""
    return [
        ("trained on all samples at once", plane.whole.best.accuracy),
        *((model.name, model.accuracy) for model in plane.models),
        *((f"trained on {samples.name} alone", samples.best.accuracy) for samples in plane.clients),
    ]


def _draw_panel(axes: Axes, samples: SampleSet, plane: Plane) -> None:
    size = 15 if len(samples.y) <= 500 else 8
    for c in range(len(plane.classes)):
        of_class = samples.y == c
        axes.scatter(
            samples.x[of_class, 0], samples.x[of_class, 1], s=size, **_class_style(c), linewidths=0, alpha=0.75,
        )  # fmt: skip
    counts = " + ".join(str(int((samples.y == c).sum())) for c in range(len(plane.classes)))
    title = f"{samples.name}, {counts} samples: {_percent(samples.best)}"
    axes.set_title(title, loc="left", fontsize=9.5, color=plotting.MUTED, parse_math=False)
    _draw_boundary(axes, plane, samples.best, plotting.INK, "-", 1.6)
    for model, colour, dash in _method_lines(plane):
        _draw_boundary(axes, plane, model, colour, dash, 2.2)
        for c in range(len(plane.classes)):
            of_class = model.labels == c
            axes.scatter(
                model.points[of_class, 0], model.points[of_class, 1], s=62, **_class_style(c) | {"marker": "^"},
                edgecolors=colour, linewidths=1.4, zorder=5, clip_on=False,
            )  # fmt: skip
    plotting.style_axes(axes, "first feature", "second feature")
    axes.label_outer()
    axes.set_xlim(plane.axes[0][0], plane.axes[0][-1])
    axes.set_ylim(plane.axes[1][0], plane.axes[1][-1])
    axes.set_aspect("equal")


def _class_style(c: int) -> dict[str, Any]:
    return {"color": CLASS_COLOURS[c % len(CLASS_COLOURS)], "marker": CLASS_MARKERS[c % len(CLASS_MARKERS)]}


def _method_lines(plane: Plane) -> list[tuple[Boundary, str, Any]]:
    """Each run's boundary with its colour and dash."""
    styles = plotting.line_styles([model.name for model in plane.models])
    return [(model, styles[model.name].colour, dash) for model, dash in zip(plane.models, cycle(METHOD_DASHES))]


def _draw_boundary(axes: Axes, plane: Plane, model: Boundary, colour: str, dash: Any, width: float) -> None:
    """Draw the line where each class's margin is zero. Two classes have opposite margins, hence one line."""
    margins = model.margin[:1] if len(model.margin) == 2 else model.margin
    for margin in margins:
        if margin.min() < 0 < margin.max():
            axes.contour(*plane.axes, margin, levels=[0.0], colors=[colour], linestyles=[dash], linewidths=[width])


def _draw_legend(figure: Figure, plane: Plane) -> None:
    handles = [Line2D([], [], color=plotting.INK, linewidth=1.6)]
    texts = ["trained on the panel's samples alone"]
    for model, colour, dash in _method_lines(plane):
        handles.append(Line2D([], [], color=colour, linestyle=dash, linewidth=2.2))
        texts.append(f"{model.name}: {_percent(model)}")
    for c, name in enumerate(plane.classes):
        handles.append(Line2D([], [], **_class_style(c), linestyle="", markersize=6))
        texts.append(f"class {name}")
    for model, edge, _ in _method_lines(plane):
        if len(model.labels):
            handles.append(Line2D([], [], linestyle="", marker="^", markersize=8, color="white", markeredgecolor=edge))
            texts.append(f"points made by {model.name}")
    title = {"title": "Per cent: accuracy on the test samples.", "title_fontsize": 8, "alignment": "left"}
    plotting.add_legend(figure, handles, texts, fontsize=9, ncols=2, **title)


def _percent(model: Boundary) -> str:
    return f"{100 * model.accuracy:.1f} %"
