"""AugMix: chains of operations on an image, mixed with each other and the image itself (Fed-AugMix, Algorithm 2).

:func:`draw_augmix` draws all random numbers; :func:`augmix` is a deterministic function of images and these numbers.
On CPUs a C++ kernel blends the views: a batch of ten images needs about 120 operations on small images, which take
longer in PyTorch than the training step itself (`benchmarks/augmix.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend._kernels import build
from fedblend._kernels.tracing import opaque
from fedblend.methods.augment.operations import NOTHING, OPERATIONS, blended, kept_constants, turns

SOURCE = Path(__file__).with_name("augmix.cpp")

VIEWS = 2  # Augmented views of each image; more views take time and improve little (section IV-C)
LEAST_LEVEL = 0.1  # The least SampLevel (section IV-B)


def draw_augmix(
    rng: np.random.Generator, shape: tuple[int, ...], severity: float, chains: int, depth: int, alpha: float
) -> dict[str, np.ndarray]:
    """Draw the random numbers of AugMix for images [shape], two views of each.

    - ``operation`` int8 [*shape, 2, chains, depth]: uniform over the nine, with replacement; the length of a chain is
      uniform over 1 to ``depth``, and beyond it the operation is :data:`NOTHING`;
    - ``level`` float32, same shape: SampLevel ~ U(0.1, severity), negative for half of them (the sign of geometric
      operations);
    - ``mix`` float32 [*shape, 2, 1 + chains]: the weights of the image itself and of its chains, (m, (1 - m) b) with
      m ~ Beta(alpha, alpha) and b ~ Dirichlet(alpha, ..., alpha).
    """
    views = (*shape, VIEWS)
    operation = rng.integers(len(OPERATIONS), size=(*views, chains, depth), dtype=np.int8)
    length = rng.integers(1, depth + 1, size=(*views, chains, 1))
    operation[np.arange(depth) >= length] = NOTHING
    level = rng.uniform(min(LEAST_LEVEL, severity), severity, operation.shape).astype(np.float32)
    level *= np.where(rng.random(operation.shape) < 0.5, np.float32(-1), np.float32(1))
    own = rng.beta(alpha, alpha, (*views, 1))
    mix = np.concatenate([own, (1 - own) * rng.dirichlet([alpha] * chains, views)], -1)
    return {"operation": operation, "level": level, "mix": mix.astype(np.float32)}


def blend_images(greys: torch.Tensor, operation: torch.Tensor, level: torch.Tensor, mix: torch.Tensor) -> torch.Tensor:
    """Views float32 [..., V, B, C, H, W] in [0, 1] of images uint8 [..., B, C, H, W].

    ``operation`` int8 and ``level`` float32 are [..., B, V, chains, depth], ``mix`` float32 [..., B, V, 1 + chains].
    """
    if greys.device.type != "cpu" or build.library(SOURCE) is None:
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
    return torch.tensor(turns(), dtype=torch.float64)


def _stacked(info: Any, in_dims: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Move the stacked dimension of every tensor to the front, and blend with one more leading dimension."""
    stacked = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    return blend(*stacked), 0


blend = opaque("augmix", blend_images, _stacked)


def augmix(unit: torch.Tensor, drawn: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Views x_augmix = m x + (1 - m) sum_i b_i ch_i(x) (equations 3 and 4): [..., B, C, H, W] to [..., 2, B, C, H, W].

    ``unit`` are images on the unit scale, [0, 1]; they are rounded to the 256 grey levels of the operations. ``drawn``
    is of :func:`draw_augmix` for the shape [..., B]. Views are float32, on the unit scale. Where ``unit`` requires
    gradients, the operations are differentiable, as defined in :func:`.operations.apply`.
    """
    if unit.requires_grad:
        greys = unit.double() * 255
        greys = greys + (greys.round() - greys).detach()
        return blended(greys, drawn["operation"], drawn["level"], drawn["mix"]).to(unit.dtype)
    return blend((unit * 255).round().to(torch.uint8), drawn["operation"], drawn["level"], drawn["mix"])
