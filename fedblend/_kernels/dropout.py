"""Masks of dropout, the same numbers that PyTorch's generators give; dropout.cpp says how."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("dropout.cpp")

BITS = 53
"""Random bits of a number in [0, 1), as PyTorch makes it on CPUs."""


class Streams:
    """What :class:`torch.Generator` s with these seeds would draw, on the CPU; seeds have 32 bits."""

    def __init__(self, seeds: Sequence[int]) -> None:
        library = build.library(SOURCE)
        assert library is not None
        self._draw = library.draw
        self.size = library.stream_bytes()
        self.states = ctypes.create_string_buffer(max(1, self.size * len(seeds)))
        for k, seed in enumerate(seeds):
            library.begin(ctypes.c_uint32(seed), self._state(k))

    def draw(self, k: int, mask: torch.Tensor, p: float) -> None:
        """Fill a contiguous float32 mask from stream k: 0 with probability p < 1, and 1 / (1 - p) else."""
        limit = ctypes.c_uint64(math.ceil((1 - p) * 2**BITS))
        place = ctypes.c_void_p(mask.data_ptr())
        self._draw(ctypes.c_int64(mask.numel()), limit, ctypes.c_float(_kept(p)), self._state(k), place)

    def _state(self, k: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(ctypes.addressof(self.states) + k * self.size)


def are_there() -> bool:
    """Whether :class:`Streams` can be used, and give what this PyTorch's generators give."""
    return build.library(SOURCE) is not None and _agree()


@functools.cache
def _agree() -> bool:
    seed, p = 20_210_503, 0.3
    streams, generator = Streams([seed]), torch.Generator().manual_seed(seed)
    ours, theirs = torch.empty(2, 500), torch.empty(2, 500)
    for mine, other in zip(ours, theirs, strict=True):
        streams.draw(0, mine, p)
        other.bernoulli_(1 - p, generator=generator).div_(1 - p)
    return torch.equal(ours, theirs)


@functools.cache
def _kept(p: float) -> float:
    return float(torch.ones(1).div_(1 - p))
