"""The figure of leak report cards: privacy against accuracy."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedblend.analysis import plotting

if TYPE_CHECKING:
    from fedblend.analysis.privacy.leak_report import Leak

MARKERS = {"weights": "o", "means": "s", "seeds": "^"}
OTHER_MARKER = "D"  # Markers by the kind of payload
SIZE = (8.2, 5.0)  # Width and height of the figure in inches

TITLE = "Test accuracy by how well images can be rebuilt from what left a client"

NOTE = (
    "Weights: the strongest attack that was run, compared with the original. Means and seeds: compared with the "
    "nearest raw sample."
)
NOTE_WIDTH = 125  # Letters of a note that fit into a line below the figure
RAW_AT = 1.08  # Where raw samples, whose PSNR is infinite, are drawn: this times the largest finite PSNR


def draw_leaks(leaks: Sequence[Leak]) -> bytes:
    """A PNG of test accuracy against the PSNR of the rebuilt images: a mark for each run and kind of payload.

    Of several measures of one kind, the largest PSNR is drawn, which is the largest leak.
    """
    from matplotlib.lines import Line2D

    shown = strongest(leaks)
    figure = plotting.blank_figure(*SIZE)
    figure.suptitle(TITLE, fontsize=10, color=plotting.INK)
    axes = figure.add_subplot()
    styles = plotting.line_styles([leak.run for leak in leaks])
    finite = [leak.psnr for leak in shown if math.isfinite(leak.psnr)]
    edge = RAW_AT * max([*finite, 10.0])
    for run in styles:  # a line joins the kinds of one run
        points = [(min(leak.psnr, edge), 100 * leak.accuracy) for leak in shown if leak.run == run]
        if len(points) > 1:
            axes.plot(*zip(*sorted(points), strict=True), color=styles[run].colour, linewidth=1.0, alpha=0.5, zorder=1)
    for leak in shown:
        x = leak.psnr if math.isfinite(leak.psnr) else edge
        marker = MARKERS.get(leak.kind, OTHER_MARKER)
        axes.plot([x], [100 * leak.accuracy], marker, color=styles[leak.run].colour, markersize=8, alpha=0.9)
        if math.isinf(leak.psnr):
            axes.annotate(
                "raw: infinite", (x, 100 * leak.accuracy), xytext=(0, 7), textcoords="offset points", fontsize=8,
                ha="center",
            )  # fmt: skip
    plotting.style_axes(axes, "PSNR of the rebuilt images (dB)  (← more private)", "test accuracy (%)")
    axes.margins(0.06)
    runs = [Line2D([], [], color=style.colour, linewidth=4) for style in styles.values()]
    kinds = list(dict.fromkeys(leak.kind for leak in shown))
    marks = [
        Line2D([], [], color=plotting.MUTED, marker=MARKERS.get(kind, OTHER_MARKER), linestyle="") for kind in kinds
    ]
    texts = [*styles, *(f"from {kind}" for kind in kinds)]
    plotting.add_legend(figure, [*runs, *marks], texts, loc="outside right upper")
    measured = {(leak.run, leak.kind) for leak in shown}
    missing = [f"{k} of {r}" for r, k in dict.fromkeys((m.run, m.kind) for m in leaks) if (r, k) not in measured]
    notes = [NOTE] if shown else []
    notes += [f"Not measured: {', '.join(missing)}"] if missing else []
    wrapped = "\n".join(textwrap.fill(line, NOTE_WIDTH) for line in notes)
    figure.supxlabel(wrapped, fontsize=8, color=plotting.MUTED, x=0.01, ha="left").set_parse_math(False)
    return plotting.png_bytes(figure)


def strongest(leaks: Sequence[Leak]) -> list[Leak]:
    """The measure with the largest PSNR of each run and kind that was measured."""
    best: dict[tuple[str, str], Leak] = {}
    for leak in leaks:
        if leak.measured:
            kept = best.setdefault((leak.run, leak.kind), leak)
            best[leak.run, leak.kind] = leak if leak.psnr > kept.psnr else kept
    return list(best.values())
