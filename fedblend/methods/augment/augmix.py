"""AugMix: chains of operations on an image, mixed with each other and the image itself (Fed-AugMix, Algorithm 2).

:func:`draw_augmix` draws all random numbers; :func:`augmix` is a deterministic function of images and these numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from fedblend.methods.augment.kernels import blend
from fedblend.methods.augment.operations import NOTHING, OPERATIONS, blended

VIEWS = 2
"""Augmented views of each image; more views take time and improve little (section IV-C)."""

LEAST_LEVEL = 0.1
"""The least SampLevel (section IV-B)."""


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
