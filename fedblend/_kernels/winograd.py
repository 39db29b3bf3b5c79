"""Convolutions of 3x3 by Winograd's F(2x2, 3x3) and F(4x4, 3x3) (winograd.cpp)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("winograd.cpp")

WAYS = {"winograd": 2, "winograd-4x4": 4}
"""The side of a tile of outputs, by the name of the way.

The larger tile takes fewer products, and has the larger transforms and rounding errors."""

MIN_CHANNELS = 16
"""Fewest channels, both in and out, for which this can be faster: the transforms are shared by as many products."""


def supports(channels: int, outputs: int, kernel: Sequence[int], padding: int) -> bool:
    """Whether a convolution (stride 1) can be computed in this way, and be faster."""
    suited = tuple(kernel) == (3, 3) and padding <= 2 and min(channels, outputs) >= MIN_CHANNELS
    return suited and build.library(SOURCE) is not None
