"""A figure of a partition: samples of each class at each client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fedblend.analysis.plotting import GRID, INK, MUTED, blank_figure, even_ticks, head_figure, png_bytes
from fedblend.core.errors import legible
from fedblend.data.measures import noniid_measures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 200
"""Most columns of the figure; more clients are drawn in groups."""

MOST_LABELS = 32
"""Most classes on the axis; of more classes, every n-th has a label."""

MOST_NAMES, LETTERS = 40, 24
"""Most names of clients below the figure, and most letters of each."""

BAR = "#4c78a8"
"""Colour of the bars of sizes."""


def draw_split(
    counts: np.ndarray, class_names: Sequence[str], title: str, clients: Sequence[str] = (), form: str = "png"
) -> bytes:
    """A picture of a partition from its counts [clients, classes] (see :func:`class_counts`), as a file of this form.

    ``clients`` are the clients' names, if they have any; few are written below their columns.

    Top: samples of each client. Bottom: shares of the classes at each client. Right: the measures of
    :func:`noniid_measures`. More than 200 clients are sorted by their largest class and drawn in 200 groups, with the
    mean size and the mean shares of each group. Raises :class:`ValueError` for a form that Matplotlib does not know.
    """
    counts = np.asarray(counts)
    sizes, shares, grouped = _columns(counts)
    height = 2.6 + min(max(0.19 * len(class_names), 1.6), 6.0)
    figure = _figure(height, title)
    grid = figure.add_gridspec(2, 3, height_ratios=[1.1, height - 2.4], width_ratios=[1, 0.016, 0.26])
    top = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0])
    _draw_sizes(top, sizes, grouped)
    image = _draw_shares(below, shares, class_names, grouped, len(counts))
    _name_clients(below, clients)
    bar = figure.colorbar(image, cax=figure.add_subplot(grid[1, 1]))
    bar.set_label("share of the client's samples", fontsize=8.5, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    bar.outline.set_visible(False)
    _write_measures(figure.add_subplot(grid[:, 2]), counts)
    return png_bytes(figure, form)


def draw_sizes(sizes: np.ndarray, title: str, clients: Sequence[str] = (), form: str = "png") -> bytes:
    """A picture of the samples of each client, ``sizes`` int [clients], for data without classes."""
    bars, _, grouped = _columns(sizes[:, None])
    figure = _figure(3.2, title)
    axes = figure.add_subplot()
    _draw_sizes(axes, bars, grouped)
    axes.set_xlabel(f"{len(sizes):,} clients in {COLUMNS} groups" if grouped else "client", fontsize=9, color=INK)
    _name_clients(axes, clients)
    return png_bytes(figure, form)


def _figure(height: float, title: str) -> Figure:
    figure = blank_figure(11, height, dpi=130)
    head_figure(figure, title, 13)
    return figure


def _columns(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Sizes [columns], class shares [columns, classes], and whether columns are groups of clients."""
    sizes = counts.sum(1)
    shares = counts / np.maximum(sizes, 1)[:, None]
    if len(counts) <= COLUMNS:
        return sizes, shares, False
    order = np.lexsort((-shares.max(1), shares.argmax(1)))
    starts = np.arange(COLUMNS) * len(counts) // COLUMNS
    members = np.diff([*starts, len(counts)])
    mean_sizes = np.add.reduceat(sizes[order], starts) / members
    return mean_sizes, np.add.reduceat(shares[order], starts, axis=0) / members[:, None], True


def _draw_sizes(axes: Axes, sizes: np.ndarray, grouped: bool) -> None:
    axes.bar(np.arange(len(sizes)), sizes, width=0.86 if len(sizes) <= 100 else 1.0, color=BAR)
    axes.set_ylabel("mean samples\na client" if grouped else "samples\na client", fontsize=9, color=INK)
    axes.set_ylim(bottom=0)
    axes.set_xlim(-0.5, len(sizes) - 0.5)
    axes.tick_params(labelbottom=False, bottom=False, labelsize=8, colors=INK)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(GRID)
    even_ticks(axes.yaxis)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_shares(axes: Axes, shares: np.ndarray, names: Sequence[str], grouped: bool, clients: int) -> Any:
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    # Colours by the root of the share, so small shares are visible. The darkest colour is the largest share, or three
    # even shares if that is more, so an even split looks even.
    top = min(1.0, max(3 / len(names), float(shares.max(initial=0))))
    image = axes.imshow(shares.T, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, top), interpolation="nearest")
    step = -(-len(names) // MOST_LABELS)
    shown = range(0, len(names), step)
    labels = [names[i] if names[i].isprintable() and names[i].strip() else repr(names[i]) for i in shown]
    axes.set_yticks(list(shown), labels, fontsize=8 if len(labels) <= 16 else 6.5, color=INK, parse_math=False)
    axes.set_ylabel("class", fontsize=9, color=INK)
    label = f"{clients:,} clients by main class, in {COLUMNS} groups" if grouped else "client"
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.tick_params(axis="x", labelsize=8, colors=INK, labelbottom=not grouped, bottom=not grouped)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(shares) <= 100:
        axes.set_xticks(np.arange(len(shares) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(names) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", linewidth=0.7)
        axes.tick_params(which="minor", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def _name_clients(axes: Axes, names: Sequence[str]) -> None:
    """Write clients' names below their columns, where there are few."""
    if 0 < len(names) <= MOST_NAMES:
        shown = [legible(name, LETTERS) for name in names]
        turned = 90 if max(map(len, shown)) * len(shown) > 110 else 0
        axes.set_xticks(range(len(shown)), shown, parse_math=False, rotation=turned)
        axes.tick_params(axis="x", labelsize=8, colors=INK, labelbottom=True)


def _write_measures(axes: Axes, counts: np.ndarray) -> None:
    axes.axis("off")
    measures = noniid_measures(counts)
    empty = int((counts.sum(1) == 0).sum())
    lines = [("clients", f"{len(counts):,}"), ("samples", f"{counts.sum():,}")]
    if measures:
        lines += [
            ("samples a client", f"{measures['size_mean']:,.1f}"),
            ("    smallest", f"{measures['size_min']:,.0f}"),
            ("    largest", f"{measures['size_max']:,.0f}"),
            ("classes a client", f"{measures['classes_mean']:.2f} ± {measures['classes_deviation']:.2f}"),
            ("KL divergence (nats)", f"{measures['divergence']:.3f}"),
            ("distance to the whole", f"{measures['distance']:.3f}"),
        ]
    if empty:
        lines.append(("without samples", f"{empty:,}"))
    for i, (label, number) in enumerate(lines):
        y = 0.98 - i * 0.062 * 5 / axes.figure.get_figheight()  # type: ignore[union-attr]
        axes.text(0.0, y, label, fontsize=8.5, color=MUTED, transform=axes.transAxes, va="top")
        axes.text(1.0, y, number, fontsize=8.5, color=INK, transform=axes.transAxes, va="top", ha="right")
