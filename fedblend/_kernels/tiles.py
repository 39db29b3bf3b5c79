"""Convolutions of many channels on a processor's matrix units (AMX), where it has them: tiles.cpp says how.

Intel's server processors have them since 2023 (Sapphire Rapids). They multiply bfloat16 numbers; three of those make
a float32 number, and six of their products a float32 product, with an error no larger than its own rounding.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("tiles.cpp")

SIDE = 16
"""Rows of a tile, and columns of a product of two."""

FILLED = 0.7
"""Share of its tiles that a convolution's channels must fill, on either side, for these to be the fastest.

A step's three forms together then take less time than oneDNN's in every layer of benchmarks/kernels.py."""


@functools.cache
def library() -> ctypes.CDLL | None:
    """The kernels, built if need be; ``None`` without a compiler, or where the processor or the system has no units."""
    made = build.library(SOURCE)
    return made if made is not None and made.tiles_usable() else None


def take(channels: int, outputs: int, kernel: Sequence[int], padding: int) -> bool:
    """Whether a convolution (stride 1) with so many channels in and out runs on the units."""
    filled = min(n / (SIDE * math.ceil(n / SIDE)) for n in (channels, outputs))
    return filled >= FILLED and padding < min(kernel) and library() is not None
