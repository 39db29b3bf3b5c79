"""Colours, line styles, axes and PNG images that all figures share.

A method has one colour, one dash and one marker in every figure of every report. Dash and marker distinguish methods
without colour.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

DPI = 150  # Pixels an inch of every still figure

COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#2E93CF", "#B8860B",
    "#8A63D2", "#1E97A6", "#D0454C", "#7C8A1A", "#A0673A", "#7F8790",
)  # fmt: skip
"""Colours of methods, the first six after Okabe and Ito. Each has a contrast of 3 to 1 or more with white and with the
page's dark background."""

MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h", "*")
"""A marker for each colour: with the dash, it distinguishes methods without colour."""

DASHES: tuple[Any, ...] = ("-", "--", "-.", (0, (8, 3)), (0, (8, 2, 2, 2, 2, 2)))
"""Dashes of methods. Dots mark unfinished runs."""

METHOD_ROWS = (
    "fedavg fedmix naivemix localmix fedprox global-mixup xormixfl mixfl scaffold fed-augmix aggenhance vanilla-fl",
    "fedavgm mix2fld mixfld fld fd standalone moon feddyn fednova fedlc fedrs fedntd",
    "fedadam fedmix-hidden naivemix-hidden local-means fedyogi noise-mix "
    "fedadagrad aggenhance-secure ditto fedper fedrep pfedme",
    "fedproto fedbn prior-samples virtual-means server-means fedmix-checked "
    "ccvr server-matched feddm fedfa flea shared-set",
    "virtual-seeds virtual-xor vhl statmix",
)
"""Presets with a style of their own: a row for each dash, a column for each colour. Methods that papers compare have
different colours. A preset that is not listed has the style that its letters determine."""

PHASES = {
    "train": "#77AADD",
    "evaluate": "#EE8866",
    "aggregate": "#EEDD88",
    "share": "#FFAABB",
    "download": "#99DDFF",
    "server": "#44BB99",
}
"""Colours of the phases of a round, the same in all reports: Paul Tol's light colours, which are safe for the
colour-blind and differ from those of the methods."""

OTHER_PHASES = ("#BBCC33", "#AAAA00")
"""Colours of phases that a user's part adds."""

INK, MUTED, GRID = "#1d2730", "#5c6873", "#e3e7ea"
"""Colours of text, notes and grid on white; the page replaces them by its own (:mod:`fedblend.report.page`)."""

BAND = 0.16  # Opacity of the band over seeds


@dataclass(frozen=True)
class LineStyle:
    """The colour, dash and marker of a method's lines."""

    colour: str
    dash: Any
    """The dash in matplotlib: a string, or (offset, lengths)."""
    marker: str


METHOD_STYLES = {
    method: LineStyle(colour, dash, marker)
    for row, dash in zip(METHOD_ROWS, DASHES, strict=True)
    for method, colour, marker in zip(row.split(), COLOURS, MARKERS, strict=False)
}
"""The style of each listed preset, on every page and in every figure."""


def line_styles(methods: Sequence[str]) -> dict[str, LineStyle]:
    """A line style for each method, in order.

    A listed preset has its own style everywhere. Any other name starts at a place that its letters determine, and takes
    the next style that is free among ``methods``; styles repeat after 60.

    >>> line_styles(["mine", "fedmix"])["fedmix"] == line_styles(["fedavg", "fedmix"])["fedmix"]
    True
    """
    names = list(dict.fromkeys(methods))
    taken = [METHOD_STYLES[name] for name in names if name in METHOD_STYLES]
    n = len(COLOURS)
    all_styles = [LineStyle(c, dash, m) for dash in DASHES for c, m in zip(COLOURS, MARKERS, strict=True)]
    styles = {}
    for name in names:
        if (style := METHOD_STYLES.get(name)) is None:
            start = zlib.crc32(name.encode()) % n
            order = [all_styles[k // n * n + (k + start) % n] for k in range(len(all_styles))]
            style = next((one for one in order if one.colour not in {t.colour for t in taken}), None) or next(
                (one for one in order if one not in taken), order[0]
            )
            taken.append(style)
        styles[name] = style
    return styles


def phase_colours(names: Sequence[str]) -> dict[str, str]:
    """A colour for each phase, which does not depend on the other phases.

    >>> phase_colours(["evaluate", "train"])["train"] == phase_colours(["train", "encode"])["train"]
    True
    """
    others = sorted(set(names) - set(PHASES))
    return PHASES | {name: OTHER_PHASES[i % len(OTHER_PHASES)] for i, name in enumerate(others)}


def blank_figure(
    width: float, height: float, padding: tuple[float, float] | None = None, dpi: float | None = None
) -> Figure:
    """An empty white matplotlib figure, sizes in inches; ``padding`` is that between its panels (width, height)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    w_pad, h_pad = padding or (None, None)  # None: matplotlib's default
    spacing = ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad)
    figure = Figure(figsize=(width, height), dpi=dpi or DPI, layout=spacing, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def head_figure(figure: Figure | SubFigure, title: str, size: float) -> None:
    """Write a bold title of ``size`` points above a figure, at the left."""
    figure.suptitle(title, x=0.012, ha="left", fontsize=size, fontweight="bold", color=INK, parse_math=False)


def add_legend(figure: Figure | SubFigure, handles: Sequence[Any], texts: Sequence[str], **options: Any) -> None:
    """Draw a legend, by default below the axes; names are not read as formulas."""
    given = {"loc": "outside lower left", "fontsize": 8, "frameon": False, "labelcolor": INK, **options}
    legend = figure.legend(handles, texts, **given)
    legend.get_title().set_color(MUTED)
    for text in legend.get_texts():
        text.set_parse_math(False)


def png_bytes(figure: Figure, form: str = "png") -> bytes:
    """A matplotlib figure as a PNG, or as a file of another form of Matplotlib's."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=form)
    return buffer.getvalue()


def style_axes(axes: Axes, x: str, y: str, size: float = 9.5) -> None:
    """Label the axes of a matplotlib figure in letters of ``size`` points, and set their grid and colours."""
    axes.set_xlabel(x, fontsize=size, color=INK)
    axes.set_ylabel(y, fontsize=size, color=INK)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=size - 1, colors=INK, length=0)
    axes.margins(x=0.01)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GRID)


def even_ticks(axis: Axis, integer: bool = True) -> None:
    """Put ticks at multiples of 1, 2 or 5 times a power of ten, by default at whole numbers only."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=integer))


def hide_frame(axes: Any) -> None:
    """Take ticks and frame away from the axes of an image."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Make the x axis logarithmic; ticks at 1, 2 and 5 times powers of ten where ``values`` span less than a thousand.

    Numbers are not drawn below zero on such an axis: leave them out before.
    """
    from matplotlib.ticker import LogLocator

    narrow = not values or max(values) < 1000 * min(values)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=12))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axes.minorticks_off()


def evenly_spaced(rounds: Sequence[int], most: int) -> list[int]:
    """Up to ``most`` evenly spaced rounds, with the first and the last.

    >>> evenly_spaced([1, 2, 3, 4, 5], 3), evenly_spaced([4, 7], 8), evenly_spaced([1, 2, 3], 1)
    ([1, 3, 5], [4, 7], [3])
    """
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[i * (len(rounds) - 1) // (most - 1)] for i in range(most)] if most > 1 else [rounds[-1]]


MAX_NAMED_CLASSES = 3  # Largest number of classes named in a label; the other shares of a mixture are summed


@dataclass(frozen=True)
class ClientImage:
    """One image that left a client."""

    url: str
    """The PNG as a data URL."""
    client: int
    caption: str
    """Its labels, or a description of the image."""


def png_data_url(image: np.ndarray) -> str:
    """An image [C, H, W] in [0, 1], with one channel or three, as the data URL of a PNG. The page enlarges it."""
    pixels = np.rint(255 * image).astype(np.uint8)
    picture = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    buffer = io.BytesIO()
    picture.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def label_text(y: torch.Tensor, classes: Sequence[str]) -> str:
    """A label, or a mixture of labels with the largest share first, as text. Without classes: the numbers of ``y``.

    >>> label_text(torch.tensor([0.0, 0.25, 0.75]), ["cat", "dog", "hen"])
    'hen: 75 %, dog: 25 %'
    >>> label_text(torch.tensor(1), ["cat", "dog"]), label_text(torch.tensor([0.5]), [])
    ('dog', '0.5')
    """
    if not classes:
        return ", ".join(f"{value:.3g}" for value in y.flatten().tolist())
    if y.dim() == 0:
        return classes[int(y)]
    shares = sorted(enumerate(y.tolist()), key=lambda share: (-share[1], share[0]))
    present = [(classes[i], share) for i, share in shares if round(100 * share) > 0]
    words = [f"{name}: {100 * share:.0f} %" for name, share in present[:MAX_NAMED_CLASSES]]
    if len(present) > MAX_NAMED_CLASSES:
        rest = present[MAX_NAMED_CLASSES:]
        words.append(f"{len(rest)} more: {100 * sum(share for _, share in rest):.0f} %")
    return ", ".join(words)
