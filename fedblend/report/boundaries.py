"""The still picture of decision boundaries over data of two features, after AggEnhance's Figure 2."""

from __future__ import annotations

import io
import math
from typing import TYPE_CHECKING, Any

from fedblend.analysis.plotting import DPI, INK, MUTED, PHASES, dress, looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from fedblend.analysis.points.boundaries import Boundary, Holding, Plane

PANEL = (4.1, 3.5)
"""Inches of a panel."""

CLASSES = tuple(PHASES.values())
"""Colours of classes: paler than those of the methods, whose lines lie over them."""

MARKS = ("o", "s", "D", "P", "v", "X")
"""Marks of classes, so that they are told apart without colour too."""

STROKES: tuple[Any, ...] = ("--", ":", "-.", (0, (8, 3)))
"""Strokes of methods; the best possible line alone is whole."""


def draw(plane: Plane) -> bytes:
    """A PNG: a panel of all samples and one of each client's, with every model's boundary in each.

    The whole line of a panel is the model trained on just the samples in it. Below stand all accuracies.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels = [*plane.clients, plane.whole]
    columns = math.ceil(math.sqrt(len(panels))) if len(panels) != 2 else 2
    rows = math.ceil(len(panels) / columns)
    legend = 0.25 * (len(plane.models) + len(plane.classes) + 2) / 2 + 0.4
    size = (max(PANEL[0] * columns, 6.4), PANEL[1] * rows + legend)
    spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=size, dpi=DPI, layout=spacing, facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(
        f"{plane.title}: decision boundaries", x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK,
        parse_math=False,
    )  # fmt: skip
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flatten()
    for axes, holding in zip(grid, panels, strict=False):
        _panel(axes, holding, plane)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    _legend(figure, plane)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def words(plane: Plane) -> list[tuple[str, float]]:
    """Whose boundary it is, and its accuracy on the test samples: the best possible, the methods, each client alone."""
    return [
        ("trained on all samples at once", plane.whole.best.accuracy),
        *((model.name, model.accuracy) for model in plane.models),
        *((f"trained on {holding.name} alone", holding.best.accuracy) for holding in plane.clients),
    ]


def _panel(axes: Axes, holding: Holding, plane: Plane) -> None:
    size = 15 if len(holding.y) <= 500 else 8
    for c in range(len(plane.classes)):
        own = holding.y == c
        axes.scatter(
            holding.x[own, 0], holding.x[own, 1], s=size, color=_colour(c), marker=MARKS[c % len(MARKS)],
            linewidths=0, alpha=0.75,
        )  # fmt: skip
    counts = " + ".join(str(int((holding.y == c).sum())) for c in range(len(plane.classes)))
    title = f"{holding.name}, {counts} samples: {_percent(holding.best)}"
    axes.set_title(title, loc="left", fontsize=9.5, color=MUTED, parse_math=False)
    _line(axes, plane, holding.best, INK, "-", 1.6)
    by_method = looks([model.name for model in plane.models])
    for i, model in enumerate(plane.models):
        _line(axes, plane, model, by_method[model.name].colour, STROKES[i % len(STROKES)], 2.2)
        for c in range(len(plane.classes)):
            own = model.labels == c
            axes.scatter(
                model.points[own, 0], model.points[own, 1], s=62, marker="^", color=_colour(c),
                edgecolors=by_method[model.name].colour, linewidths=1.4, zorder=5, clip_on=False,
            )  # fmt: skip
    dress(axes, "first feature", "second feature")
    axes.label_outer()
    axes.set_xlim(plane.axes[0][0], plane.axes[0][-1])
    axes.set_ylim(plane.axes[1][0], plane.axes[1][-1])
    axes.set_aspect("equal")


def _colour(c: int) -> str:
    return CLASSES[c % len(CLASSES)]


def _line(axes: Axes, plane: Plane, model: Boundary, colour: str, stroke: Any, width: float) -> None:
    """A model's boundary; of two classes one line, since where one stops leading the other begins."""
    leads = model.lead[:1] if len(model.lead) == 2 else model.lead
    for lead in leads:
        if lead.min() < 0 < lead.max():
            axes.contour(*plane.axes, lead, levels=[0.0], colors=[colour], linestyles=[stroke], linewidths=[width])


def _legend(figure: Any, plane: Plane) -> None:
    from matplotlib.lines import Line2D

    def mark(c: int) -> Line2D:
        return Line2D([], [], color=_colour(c), marker=MARKS[c % len(MARKS)], linestyle="", markersize=6)

    by_method = looks([model.name for model in plane.models])
    handles: list[Line2D] = [Line2D([], [], color=INK, linewidth=1.6)]
    texts = ["trained on the panel's samples alone"]
    for i, model in enumerate(plane.models):
        stroke = STROKES[i % len(STROKES)]
        handles.append(Line2D([], [], color=by_method[model.name].colour, linestyle=stroke, linewidth=2.2))
        texts.append(f"{model.name}: {_percent(model)}")
    handles += [mark(c) for c in range(len(plane.classes))]
    texts += [f"class {name}" for name in plane.classes]
    for model in plane.models:
        if len(model.labels):
            edge = by_method[model.name].colour
            handles.append(Line2D([], [], linestyle="", marker="^", markersize=8, color="white", markeredgecolor=edge))
            texts.append(f"points made by {model.name}")
    made = figure.legend(
        handles, texts, loc="outside lower left", fontsize=9, frameon=False, labelcolor=INK, ncols=2,
        title="Per cent: accuracy on the test samples.", title_fontsize=8, alignment="left",
    )  # fmt: skip
    made.get_title().set_color(MUTED)
    for text in made.get_texts():
        text.set_parse_math(False)


def _percent(model: Boundary) -> str:
    return f"{100 * model.accuracy:.1f} %"
