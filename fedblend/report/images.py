"""Single images of a report, and the words below them."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image

NAMED = 3
"""Classes named in a caption; the rest of a mixture is summed up."""

SIDE = 96
"""Smallest width in pixels at which an image is stored: small ones are enlarged by whole factors."""


@dataclass(frozen=True)
class Picture:
    """One image that left a client: a data URL, whose it is, and its label mixture in words."""

    url: str
    client: int
    mixture: str


def as_png(image: np.ndarray) -> str:
    """An image [C, H, W] in [0, 1], of one channel or three, as a data URL with a PNG in it."""
    pixels = np.rint(255 * image).astype(np.uint8)
    made = Image.fromarray(pixels[0] if len(pixels) == 1 else np.ascontiguousarray(pixels.transpose(1, 2, 0)))
    times = max(1, -(-SIDE // made.width))
    made = made.resize((made.width * times, made.height * times), Image.Resampling.NEAREST)
    buffer = io.BytesIO()
    made.save(buffer, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def mixture(y: torch.Tensor, classes: Sequence[str]) -> str:
    """A label, or a mixture of labels, in words, the largest share first.

    >>> mixture(torch.tensor([0.0, 0.25, 0.75]), ["cat", "dog", "hen"])
    'hen: 75 %, dog: 25 %'
    >>> mixture(torch.tensor(1), ["cat", "dog"]), mixture(torch.tensor([0.5]), [])
    ('dog', '0.5')
    """
    if not classes:
        return ", ".join(f"{value:.3g}" for value in y.flatten().tolist())
    if y.dim() == 0:
        return classes[int(y)]
    shares = sorted(enumerate(y.tolist()), key=lambda one: (-one[1], one[0]))
    present = [(classes[i], share) for i, share in shares if round(100 * share) > 0]
    words = [f"{name}: {100 * share:.0f} %" for name, share in present[:NAMED]]
    if len(present) > NAMED:
        words.append(f"{len(present) - NAMED} more: {100 * sum(share for _, share in present[NAMED:]):.0f} %")
    return ", ".join(words)
