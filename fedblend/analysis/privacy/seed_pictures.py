"""Pictures of target and dummy samples, of the seeds made of them, and of what the server trains on (Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from fedblend.analysis.privacy.pictures import INK, MUTED
from fedblend.analysis.privacy.samples import nearest_of_all
from fedblend.analysis.privacy.xor import Shared

ROWS = 6
"""Seeds in a picture, evenly spread over all."""

SIDE = 1.55
"""Inches of a sample."""

Row = Mapping[str, torch.Tensor]
"""Samples uint8 [C, H, W] by what is written above them."""


def draw_seeds(one: Shared, path: Path, title: str) -> None:
    """Draw some seeds of a draw of images into a PNG, a row each.

    From the left: the (first) target and dummy sample of the device, what travels, the (first) sample that the server
    decodes with, what it trains on, and the raw sample of the devices nearest to that.
    """
    chosen = np.unique(np.linspace(0, len(one.seeds) - 1, ROWS).astype(np.int64))
    _draw([_row(one, int(seed)) for seed in chosen], [""] * len(chosen), path, title)


def draw_side_by_side(drawn: Mapping[str, Shared], path: Path, title: str) -> None:
    """Draw one seed of each of several ways to share, by name, into a PNG (Figure 2).

    The seed in the middle of each: with equal p the same samples of the device, as far as its dummies are drawn alike.
    """
    _draw([_row(one, len(one.seeds) // 2) for one in drawn.values()], list(drawn), path, title)


def _row(one: Shared, seed: int) -> Row:
    """What is shown of a seed."""
    made = one.made[seed]
    shown = {"target": one.raw[one.targets[seed, 0]], "dummy": one.raw[one.dummies[seed, 0]]}
    if one.own.size:
        own = one.raw[one.own[seed, 0]]
        shown |= {"sent": one.seeds[seed], "the server's own": own}
    else:
        shown |= {"sent": one.seeds[seed]}
    shown["trained on"] = made
    return shown | {"nearest raw": one.raw[int(nearest_of_all(made[None], one.raw[: one.private])[0])]}


def _draw(rows: Sequence[Row], names: Sequence[str], path: Path, title: str) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heads = max((list(row) for row in rows), key=len)
    size = (1.6 * len(heads) + 0.6 * any(names), 0.9 + SIDE * len(rows))
    figure = Figure(figsize=size, dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK, parse_math=False)
    grid = figure.subplots(len(rows), len(heads), squeeze=False)
    for place, (row, name) in enumerate(zip(rows, names, strict=True)):
        for axes in grid[place]:
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(False)
            # Also where there is no sample.
            axes.set_box_aspect(row["target"].shape[1] / row["target"].shape[2])
        for head, image in row.items():
            axes = grid[place, heads.index(head)]
            grey = image.shape[0] == 1
            pixels = image[0] if grey else image.permute(1, 2, 0)
            axes.imshow(pixels.numpy(), cmap="gray" if grey else None, vmin=0, vmax=255)
        grid[place, 0].set_ylabel(name, fontsize=9, color=INK, parse_math=False)
    for axes, head in zip(grid[0], heads, strict=True):
        axes.set_title(head, fontsize=9, color=MUTED)
    figure.savefig(path)
