"""AugMix's views as one operator, which supports ``torch.vmap``: a C++ kernel on CPUs, PyTorch elsewhere.

A batch of ten images needs about 120 operations on small images. In PyTorch they take longer than the training step
itself (`benchmarks/augmix.py`).
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

from fedblend._kernels import build
from fedblend._kernels.tracing import opaque

SOURCE = Path(__file__).with_name("augmix.cpp")


def blend_images(greys: torch.Tensor, operation: torch.Tensor, level: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Views float32 [..., V, B, C, H, W] in [0, 1] of images uint8 [..., B, C, H, W].

    ``operation`` int8 and ``level`` float32 are [..., B, V, chains, depth], ``mix`` float32 [..., B, V, 1 + chains].
    """
    if greys.device.type != "cpu" or build.library(SOURCE) is None:
        from fedblend.methods.augment.operations import blended, kept_constants

        return blended(greys.double(), operation, level, mix, kept_constants(*greys.shape[-2:], greys.device)).float()
    *leading, batch, channels, height, width = greys.shape
    views, chains, depth = operation.shape[-3:]
    out = torch.empty(*leading, views, batch, channels, height, width)
    stacks = greys.numel() // max(1, batch * channels * height * width)
    numbers = (stacks, batch, views, chains, depth, channels, height, width)
    tensors = [t.contiguous() for t in (greys, operation, level, mix)]
    build.function(SOURCE, "augmix", "iiiiiiiiPPPPPP")(*numbers, *tensors, rotations(), out)
    return out


@functools.cache
def rotations() -> torch.Tensor:
    """Cosines and sines of whole degrees, float64 [61, 2]."""
    from fedblend.methods.augment.operations import turns

    return torch.tensor(turns(), dtype=torch.float64)


def _stacked(info: Any, in_dims: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Move the stacked dimension of every tensor to the front, and blend with one more leading dimension."""
    stacked = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    return blend(*stacked), 0


blend = opaque("augmix", blend_images, _stacked)
