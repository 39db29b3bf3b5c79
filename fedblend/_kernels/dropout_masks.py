"""Dropout masks equal to those of PyTorch's generators on the CPU (dropout.cpp describes the algorithm)."""

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
"""Random bits of a number in [0, 1), as PyTorch draws it on CPUs."""


class Streams:
    """Several CPU :class:`torch.Generator` objects with these seeds of 32 bits; each draws the same numbers as one."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self.size = build.function(SOURCE, "stream_bytes", "")()
        self.states = ctypes.create_string_buffer(max(1, self.size * len(seeds)))
        self._draw = build.function(SOURCE, "draw", "qQfPP")
        for k, seed in enumerate(seeds):
            build.function(SOURCE, "begin", "IP")(seed, self._state(k))

    def draw(self, k: int, mask: torch.Tensor, p: float) -> None:
        """Fill a contiguous float32 mask from stream k: 0 with probability p < 1, otherwise 1 / (1 - p)."""
        limit = math.ceil((1 - p) * 2**BITS)
        self._draw(mask.numel(), limit, _inverse_of_kept(p), self._state(k), mask)

    def _state(self, k: int) -> int:
        return ctypes.addressof(self.states) + k * self.size


def is_usable() -> bool:
    """Whether :class:`Streams` can be used, and draws the same numbers as this PyTorch's generators."""
    return build.library(SOURCE) is not None and _agrees_with_pytorch()


@functools.cache
def _agrees_with_pytorch() -> bool:
    seed, p = 20_210_503, 0.3
    streams, generator = Streams([seed]), torch.Generator().manual_seed(seed)
    ours, expected = torch.empty(2, 500), torch.empty(2, 500)
    for our_mask, expected_mask in zip(ours, expected, strict=True):
        streams.draw(0, our_mask, p)
        expected_mask.bernoulli_(1 - p, generator=generator).div_(1 - p)
    return torch.equal(ours, expected)


@functools.cache
def _inverse_of_kept(p: float) -> float:
    """1 / (1 - p), rounded as float32's division rounds it."""
    return float(torch.ones(1).div_(1 - p))
