"""Pictures of target and dummy samples, of the seeds made of them, and of what the server trains on (Figure 2)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from fedblend.privacy.pictures import INK, MUTED
from fedblend.privacy.samples import nearest_of_all
from fedblend.privacy.xor import Shared

ROWS = 6
"""Seeds in a picture, evenly spread over all."""


def draw_seeds(one: Shared, path: Path, title: str) -> None:
    """Draw some seeds of a draw of images into a PNG, a row each.

    From the left: the (first) target and dummy sample of the device, what travels, the (first) sample that the server
    decodes with, what it trains on, and the raw sample of the devices nearest to that.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    chosen = np.unique(np.linspace(0, len(one.seeds) - 1, ROWS).astype(np.int64))
    columns = _columns(one, chosen)
    figure = Figure(figsize=(1.6 * len(columns), 0.9 + 1.55 * len(chosen)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color=INK, parse_math=False)
    for place in range(len(chosen)):
        for column, (head, images) in enumerate(columns.items()):
            axes = figure.add_subplot(len(chosen), len(columns), place * len(columns) + column + 1)
            pixels = images[place].numpy()
            grey = pixels.shape[0] == 1
            axes.imshow(
                pixels[0] if grey else pixels.transpose(1, 2, 0), cmap="gray" if grey else None, vmin=0, vmax=255
            )
            axes.set_axis_off()
            if place == 0:
                axes.set_title(head, fontsize=9, color=MUTED)
    figure.savefig(path)


def _columns(one: Shared, chosen: np.ndarray) -> dict[str, torch.Tensor]:
    """What is shown of the chosen seeds, by head: uint8 [chosen, C, H, W]."""
    rows = torch.from_numpy(chosen)
    shown = {"target": one.raw[one.targets[chosen, 0]], "dummy": one.raw[one.dummies[chosen, 0]]}
    if one.own.size:
        shown |= {"sent": one.seeds[rows], "the server's own": one.raw[one.own[chosen, 0]], "decoded": one.made[rows]}
    else:
        shown |= {"sent, trained on": one.made[rows]}
    return shown | {"nearest raw": one.raw[nearest_of_all(one.made[rows], one.raw[: one.private])]}
