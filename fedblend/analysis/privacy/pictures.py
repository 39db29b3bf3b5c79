"""Pictures of raw, mixed and inversely mixed samples, and of the raw sample that each one is nearest to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedblend.analysis.privacy.samples import Mixtures, nearest, nearest_of_all
from fedblend.methods.sharing.inverse import inverse_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 5
"""Inversely mixed-up samples in a picture."""

INK, MUTED = "#22303c", "#5c6873"

HEADS = ("raw i", "raw j", "mixed", "raw i'", "raw j'", "mixed'", "inversely mixed", "nearest raw")


@dataclass(frozen=True)
class Tile:
    """One picture in the grid, and what stands below it."""

    image: torch.Tensor
    text: str


def draw_samples(one: Mixtures, classes: Sequence[str], lam: float, path: Path, title: str) -> None:
    """Draw the first inversely mixed-up samples of a draw of images into a PNG.

    A row each: the two mixtures (of devices d and d') with their raw samples, the inversely mixed-up sample, and the
    raw sample nearest to it among all that the devices hold. Below each stand its label, and how far shared samples lie
    from the nearest raw one. Mixed images are shown with pixels outside 0 to 255 cut off; distances are not.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = _rows(one, classes, lam)
    figure = Figure(figsize=(12.4, 1.2 + 1.85 * len(rows)), dpi=110, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold", color=INK, parse_math=False)
    for place, tiles in enumerate(rows):
        _draw_row(figure, place, len(rows), tiles)
    figure.supxlabel(
        "Below each: its label; d: Euclidean distance to the nearest raw sample that these devices hold, "
        f"pixels from 0 to 255 (others are shown cut off). Inverse ratio {inverse_ratio(lam):.3f}.",
        fontsize=9,
        color=MUTED,
        x=0.01,
        ha="left",
    )
    figure.savefig(path)


def _rows(one: Mixtures, classes: Sequence[str], lam: float) -> list[list[Tile]]:
    made, mixed = one.mix2up(lam), one.mixup(lam)
    rows = []
    for k, (s, t) in enumerate(one.pairs.chosen[:ROWS].tolist()):
        tiles = []
        for mixture in (s, t):
            i, j = one.mixed[mixture].tolist()
            a, b = classes[one.y[i]], classes[one.y[j]]
            tiles += [Tile(one.raw[i], a), Tile(one.raw[j], b)]
            tiles.append(
                Tile(
                    mixed[mixture],
                    f"{100 * lam:g}% {a}, {100 * (1 - lam):g}% {b}\nd = {_nearest(one, mixed[mixture])[1]:.0f}",
                )
            )
        row, distance = _nearest(one, made[k])
        own = " (its own)" if row in one.contributors[k] else ""
        tiles.append(Tile(made[k], f"{classes[one.labels[s, 0]]}\nd = {distance:.0f}"))
        tiles.append(Tile(one.raw[row], f"{classes[one.y[row]]}{own}"))
        rows.append(tiles)
    return rows


def _nearest(one: Mixtures, sample: torch.Tensor) -> tuple[int, float]:
    """The raw sample nearest to one, and its distance."""
    row = nearest_of_all(sample[None], one.raw)
    return int(row[0]), float(nearest(sample[None], one.raw, row[:, None])[0])


def _draw_row(figure: Figure, place: int, rows: int, tiles: Sequence[Tile]) -> None:
    for column, (head, tile) in enumerate(zip(HEADS, tiles, strict=True)):
        axes = figure.add_subplot(rows, len(HEADS), place * len(HEADS) + column + 1)
        grey = tile.image.shape[0] == 1
        pixels = tile.image.float().clamp(0, 255).round().numpy().astype(np.uint8)
        axes.imshow(pixels[0] if grey else pixels.transpose(1, 2, 0), cmap="gray" if grey else None, vmin=0, vmax=255)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_xlabel(tile.text, fontsize=8, color=INK, parse_math=False)
        if place == 0:
            axes.set_title(head, fontsize=9.5, color=INK)
        if column == 0:
            axes.set_ylabel(f"sample {place + 1}", fontsize=9, color=MUTED)
        for spine in axes.spines.values():
            spine.set_visible(False)
