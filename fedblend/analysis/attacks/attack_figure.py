"""The figure of an attack: each original image next to its rebuilt image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedblend.analysis import plotting
from fedblend.analysis.attacks.attack_setup import AttackSetup
from fedblend.analysis.attacks.image_similarity import ImageSimilarity
from fedblend.analysis.attacks.inversion import Reconstruction

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAIRS = 4  # Pairs of images in a row
SHOWN = 32  # Largest number of original images in the figure; the table has all
SIDE = 1.25  # Side of an image in inches


def draw_attack(
    attack_setup: AttackSetup, rebuilt: Reconstruction, similarity: ImageSimilarity, classes: Sequence[str], title: str
) -> bytes:
    """Return a PNG of pairs: an original with its class, and its rebuilt image with PSNR (dB) and SSIM."""
    scale = attack_setup.snapshot.setup.scale
    originals = scale.to_unit(attack_setup.x.detach().cpu())[:SHOWN]
    rebuilt_images = scale.to_unit(rebuilt.x.detach().cpu())[torch.from_numpy(similarity.order)][:SHOWN]
    columns, rows = 2 * min(PAIRS, len(originals)), -(-len(originals) // PAIRS)
    figure = plotting.blank_figure(max(5.4, SIDE * columns + 0.3), (SIDE + 0.3) * rows + 0.5)
    plotting.head_figure(figure, title, 9)
    for k in range(len(originals)):
        label, guess = int(attack_setup.y[k]), int(rebuilt.y[similarity.order[k]])
        caption = f"{similarity.psnr[k]:.1f} dB, SSIM {similarity.ssim[k]:.2f}"
        caption = caption if guess == label else f"{caption}\nas {classes[guess]}"
        cell = 2 * k + 1
        _show(figure.add_subplot(rows, columns, cell), originals[k], f"original: {classes[label]}")
        _show(figure.add_subplot(rows, columns, cell + 1), rebuilt_images[k], caption)
    cut = f"the first {SHOWN} of {len(attack_setup.y)} images; " if len(attack_setup.y) > SHOWN else ""
    note = f"{cut}left: original, right: rebuilt; cost {rebuilt.cost:.3g}"
    figure.supxlabel(note, fontsize=8, color=plotting.MUTED, x=0.01, ha="left")
    return plotting.png_bytes(figure)


def _show(axes: Axes, image: torch.Tensor, text: str) -> None:
    """Draw one image [C, H, W] in [0, 1]. Unless it has one or three channels, their mean is drawn."""
    pixels = image.numpy() if len(image) in (1, 3) else image.mean(0, keepdim=True).numpy()
    shown = pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xlabel(text, fontsize=7, color=plotting.INK, parse_math=False)
    plotting.hide_frame(axes)
