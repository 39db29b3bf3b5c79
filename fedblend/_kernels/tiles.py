"""Convolutions with many channels on a processor's matrix units (AMX); tiles.cpp describes the algorithm.

Intel's server processors have these units since 2023 (Sapphire Rapids). They multiply bfloat16 numbers. Three bfloat16
numbers make a float32 number. Six of their products make a float32 product, with an error no larger than float32's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("tiles.cpp")

SIDE = 16
"""Rows of a tile, and columns of a product of two."""

FILLED = 0.7
"""Share of its tiles that a convolution's channels must fill, both in and out, for the units to be the fastest.

The three forms of a step together then take less time than oneDNN's in every layer of benchmarks/kernels.py."""


@functools.cache
def is_usable() -> bool:
    """Whether there is a compiler, and the processor and the system have matrix units."""
    return build.library(SOURCE) is not None and bool(build.function(SOURCE, "tiles_usable", "")())


def take(channels: int, outputs: int, kernel: Sequence[int], padding: int) -> bool:
    """Whether a convolution (stride 1) with these numbers of channels in and out runs on the matrix units."""
    filled = min(n / (SIDE * math.ceil(n / SIDE)) for n in (channels, outputs))
    return filled >= FILLED and padding < min(kernel) and is_usable()
