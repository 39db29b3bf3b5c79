"""Figures of shared samples beside raw ones: Mix2FLD's mixtures, and XorMixFL's seeds (Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.analysis import plotting
from fedblend.analysis.plotting import INK, MUTED
from fedblend.analysis.privacy.mixup_privacy import Mixtures, nearest_rows, smallest_distances
from fedblend.analysis.privacy.xor_privacy import SharedSeeds
from fedblend.core.files import write_atomically
from fedblend.methods.sharing.seeds import inverse_ratio

MIXTURE_ROWS, SEED_ROWS = 5, 6
"""Most inversely mixed samples, and most seeds, in a figure; seeds are evenly spread over all."""

MIXTURE_COLUMNS = ("raw i", "raw j", "mixed", "raw i'", "raw j'", "mixed'", "inversely mixed", "nearest raw")

SEED_SIDE = 1.55  # Height of a row of seeds in inches

Cell = tuple[torch.Tensor, str]
"""An image [C, H, W], and the text below it."""


def draw_mixtures(mixtures: Mixtures, classes: Sequence[str], lam: float, path: Path, title: str) -> None:
    """Draw the first inversely mixed samples of a draw of images into a PNG file.

    Each row shows two mixtures (of devices d and d') with their raw samples, the inversely mixed sample, and the raw
    sample nearest to it among all that the devices hold. The text below an image is its label, and for a shared sample
    the distance to the nearest raw sample. Pixels outside 0 to 255 are clipped in the figure, not in the distances.
    """
    rows = _mixture_rows(mixtures, classes, lam)
    figure = plotting.blank_figure(12.4, 1.2 + 1.85 * len(rows), dpi=110)
    plotting.head_figure(figure, title, 13)
    grid = figure.subplots(len(rows), len(MIXTURE_COLUMNS), squeeze=False)
    for number, cells in enumerate(rows):
        for axes, (image, text) in zip(grid[number], cells, strict=True):
            plotting.hide_frame(axes)
            _show_image(axes, image)
            axes.set_xlabel(text, fontsize=8, color=INK, parse_math=False)
        grid[number, 0].set_ylabel(f"sample {number + 1}", fontsize=9, color=MUTED)
    for axes, head in zip(grid[0], MIXTURE_COLUMNS, strict=True):
        axes.set_title(head, fontsize=9.5, color=INK)
    figure.supxlabel(
        "Below each: its label; d: Euclidean distance to the nearest raw sample that these devices hold, "
        f"pixels from 0 to 255 (others are clipped in this figure). Inverse ratio {inverse_ratio(lam):.3f}.",
        fontsize=9,
        color=MUTED,
        x=0.01,
        ha="left",
    )
    write_atomically(path, plotting.png_bytes(figure))


def _mixture_rows(mixtures: Mixtures, classes: Sequence[str], lam: float) -> list[list[Cell]]:
    unmixed, mixed = mixtures.mix2up(lam), mixtures.mixup(lam)
    rows = []
    for k, (s, t) in enumerate(mixtures.pairs.chosen[:MIXTURE_ROWS].tolist()):
        cells = []
        for mixture in (s, t):
            i, j = mixtures.mixed[mixture].tolist()
            a, b = classes[mixtures.y[i]], classes[mixtures.y[j]]
            distance = _nearest(mixtures, mixed[mixture])[1]
            text = f"{100 * lam:g}% {a}, {100 * (1 - lam):g}% {b}\nd = {distance:.0f}"
            cells += [(mixtures.raw[i], a), (mixtures.raw[j], b), (mixed[mixture], text)]
        row, distance = _nearest(mixtures, unmixed[k])
        own = " (its own)" if row in mixtures.contributors[k] else ""
        cells.append((unmixed[k], f"{classes[mixtures.labels[s, 0]]}\nd = {distance:.0f}"))
        cells.append((mixtures.raw[row], f"{classes[mixtures.y[row]]}{own}"))
        rows.append(cells)
    return rows


def _nearest(mixtures: Mixtures, sample: torch.Tensor) -> tuple[int, float]:
    """The raw sample nearest to one sample, and its distance."""
    row = nearest_rows(sample[None], mixtures.raw)
    return int(row[0]), float(smallest_distances(sample[None], mixtures.raw, row[:, None])[0])


def draw_seeds(seeds: SharedSeeds, path: Path, title: str) -> None:
    """Draw some seeds of a draw of images into a PNG file, one row each.

    From the left: the device's (first) target and dummy sample, the seed that is sent, the (first) sample that the
    server decodes with, the sample that the server trains on, and the device sample nearest to that.
    """
    chosen = np.unique(np.linspace(0, len(seeds.seeds) - 1, SEED_ROWS).astype(np.int64))
    _draw_seed_rows([_seed_row(seeds, int(seed)) for seed in chosen], [""] * len(chosen), path, title)


def draw_seed_comparison(by_name: Mapping[str, SharedSeeds], path: Path, title: str) -> None:
    """Draw one seed of each of several sharings, by name, into a PNG file (Figure 2).

    The seed is the one in the middle. With equal p the device's samples are the same where the dummies are drawn alike.
    """
    _draw_seed_rows([_seed_row(one, len(one.seeds) // 2) for one in by_name.values()], list(by_name), path, title)


def _seed_row(seeds: SharedSeeds, seed: int) -> dict[str, torch.Tensor]:
    trained_on = seeds.server_samples[seed]
    images = {
        "target": seeds.raw[seeds.targets[seed, 0]],
        "dummy": seeds.raw[seeds.dummies[seed, 0]],
        "sent": seeds.seeds[seed],
    }
    if seeds.server_dummies.size:
        images["the server's own"] = seeds.raw[seeds.server_dummies[seed, 0]]
    nearest = int(nearest_rows(trained_on[None], seeds.raw[: seeds.device_samples])[0])
    return images | {"trained on": trained_on, "nearest raw": seeds.raw[nearest]}


def _draw_seed_rows(rows: Sequence[Mapping[str, torch.Tensor]], names: Sequence[str], path: Path, title: str) -> None:
    heads = max((list(row) for row in rows), key=len)
    figure = plotting.blank_figure(1.6 * len(heads) + 0.6 * any(names), 0.9 + SEED_SIDE * len(rows), dpi=110)
    plotting.head_figure(figure, title, 12)
    grid = figure.subplots(len(rows), len(heads), squeeze=False)
    for number, (row, name) in enumerate(zip(rows, names, strict=True)):
        for axes in grid[number]:
            plotting.hide_frame(axes)
            # A cell without an image keeps the size of one with an image.
            axes.set_box_aspect(row["target"].shape[1] / row["target"].shape[2])
        for head, image in row.items():
            _show_image(grid[number, heads.index(head)], image)
        grid[number, 0].set_ylabel(name, fontsize=9, color=INK, parse_math=False)
    for axes, head in zip(grid[0], heads, strict=True):
        axes.set_title(head, fontsize=9, color=MUTED)
    write_atomically(path, plotting.png_bytes(figure))


def _show_image(axes: Any, image: torch.Tensor) -> None:
    """Show an image [C, H, W] of pixels from 0 to 255; others are clipped."""
    grey = image.shape[0] == 1
    pixels = image.float().clamp(0, 255).round().numpy().astype(np.uint8)
    axes.imshow(pixels[0] if grey else pixels.transpose(1, 2, 0), cmap="gray" if grey else None, vmin=0, vmax=255)
