"""The figure of leak report cards: privacy against accuracy."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedblend.analysis.plotting import DPI, INK, MUTED, dress, looks

if TYPE_CHECKING:
    from fedblend.analysis.privacy.leak_report import Leak

MARKERS = {"weights": "o", "means": "s", "seeds": "^"}
OTHER = "D"
"""Markers of what left the clients."""

SIZE = (8.2, 5.0)
"""Inches of the figure."""

NOTE = (
    "Of weights the best attack that was made, beside the original; of means and seeds, beside the nearest raw sample."
)
LETTERS = 150
"""Letters of a note that fit below the figure."""

RAW_AT = 1.08
"""Where raw samples, whose PSNR is infinite, are drawn: beyond the largest by this factor."""


def draw(leaks: Sequence[Leak]) -> bytes:
    """A PNG: of each run its accuracy against the PSNR of what was rebuilt, one mark for each kind that left.

    Of several measures of one kind the largest PSNR is drawn: the most that anyone got out of it.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    shown = strongest(leaks)
    figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    look = looks([leak.run for leak in leaks])
    finite = [leak.psnr for leak in shown if math.isfinite(leak.psnr)]
    edge = RAW_AT * max([*finite, 10.0])
    for run in look:  # a line joins what leaks of one run
        joined = [(min(leak.psnr, edge), 100 * leak.accuracy) for leak in shown if leak.run == run]
        if len(joined) > 1:
            axes.plot(*zip(*sorted(joined), strict=True), color=look[run].colour, linewidth=1.0, alpha=0.5, zorder=1)
    for leak in shown:
        x = leak.psnr if math.isfinite(leak.psnr) else edge
        marker = MARKERS.get(leak.kind, OTHER)
        axes.plot([x], [100 * leak.accuracy], marker, color=look[leak.run].colour, markersize=8, alpha=0.9)
        if math.isinf(leak.psnr):
            axes.annotate(
                "raw: infinite",
                (x, 100 * leak.accuracy),
                xytext=(0, 7),
                textcoords="offset points",
                fontsize=8,
                ha="center",
            )
    dress(axes, "PSNR of what is rebuilt, dB (further right: more leaks)", "test accuracy (%)")
    axes.margins(0.06)
    runs = [Line2D([], [], color=one.colour, linewidth=4) for one in look.values()]
    kinds = list(dict.fromkeys(leak.kind for leak in shown))
    marks = [Line2D([], [], color=MUTED, marker=MARKERS.get(kind, OTHER), linestyle="") for kind in kinds]
    legend = figure.legend(
        [*runs, *marks], [*look, *(f"from {kind}" for kind in kinds)], loc="outside right upper", fontsize=8,
        frameon=False, labelcolor=INK,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_parse_math(False)
    drawn = {(leak.run, leak.kind) for leak in shown}
    missing = [f"{k} of {r}" for r, k in dict.fromkeys((m.run, m.kind) for m in leaks) if (r, k) not in drawn]
    told = [NOTE] if shown else []
    told += [f"Not measured: {', '.join(missing)}"] if missing else []
    note = figure.supxlabel(fill("\n".join(told)), fontsize=8, color=MUTED, x=0.01, ha="left")
    note.set_parse_math(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def fill(text: str) -> str:
    """Lines broken so that they fit below the figure."""
    return "\n".join(textwrap.fill(line, LETTERS) for line in text.splitlines())


def strongest(leaks: Sequence[Leak]) -> list[Leak]:
    """Of each run and kind that was measured, the measure with the largest PSNR."""
    best: dict[tuple[str, str], Leak] = {}
    for leak in leaks:
        if leak.measured:
            kept = best.setdefault((leak.run, leak.kind), leak)
            best[leak.run, leak.kind] = leak if leak.psnr > kept.psnr else kept
    return list(best.values())
