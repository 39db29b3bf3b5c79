"""AugMix: chains of operations on an image, mixed with each other and the image itself (Fed-AugMix, Algorithm 2).

:func:`draw_augmix` draws all random numbers; :func:`augmix` is a deterministic function of images and these numbers.
On CPUs a C++ kernel blends the views: a batch of ten images needs about 120 operations on small images, which take
longer in PyTorch than the training step itself (`benchmarks/augmix.py`).

Each image has its own operation and level. A step of a chain is a look-up in a table of 256 grey levels, followed by an
affine map with resampling. Each operation is one of the two, and the other is the identity. So images with different
operations are processed together, and every grey level equals Pillow's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedblend._kernels import build
from fedblend._kernels.tracing import opaque

SOURCE = Path(__file__).with_name("augmix.cpp")

VIEWS = 2  # Augmented views of each image; more views take time and improve little (section IV-C)
LEAST_LEVEL = 0.1  # The least SampLevel (section IV-B)

OPERATIONS = (
    "autocontrast",
    "equalize",
    "posterize",
    "rotate",
    "solarize",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)
"""The operations by number, in the order of AugMix's own code (Hendrycks et al. 2020)."""

AUTOCONTRAST, EQUALIZE, POSTERIZE, ROTATE, SOLARIZE, SHEAR_X, SHEAR_Y, TRANSLATE_X, TRANSLATE_Y = range(9)
NOTHING = len(OPERATIONS)  # The number of the identity, which pads shorter chains

MOST_DEGREES, MOST_SHEAR, MOST_BITS, MOST_LEVELS = 30, 0.3, 4, 256
"""MaxVal of rotation, shear, posterize and solarize (Fed-AugMix, equation 2); a translation's is a third of the side.
"""

GREYS = 256


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


def blend_images(greys: Tensor, operation: Tensor, level: Tensor, mix: Tensor) -> Tensor:
    """Views float32 [..., V, B, C, H, W] in [0, 1] of images uint8 [..., B, C, H, W].

    ``operation`` int8 and ``level`` float32 are [..., B, V, chains, depth], ``mix`` float32 [..., B, V, 1 + chains].
    """
    *leading, batch, channels, height, width = greys.shape
    given = kept_constants(height, width, greys.device)
    if greys.device.type != "cpu" or build.library(SOURCE) is None:
        return blended(greys.double(), operation, level, mix, given).float()
    views, chains, depth = operation.shape[-3:]
    out = torch.empty(*leading, views, batch, channels, height, width)
    stacks = greys.numel() // max(1, batch * channels * height * width)
    numbers = (stacks, batch, views, chains, depth, channels, height, width)
    tensors = [t.contiguous() for t in (greys, operation, level, mix)]
    build.function(SOURCE, "augmix", "iiiiiiiiPPPPPP")(*numbers, *tensors, given.turns, out)
    return out


def _stacked(info: Any, in_dims: Any, *tensors: Tensor) -> tuple[Tensor, int]:
    """Move the stacked dimension of every tensor to the front, and blend with one more leading dimension."""
    stacked = [
        tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, in_dims, strict=True)
    ]
    return blend(*stacked), 0


blend = opaque("augmix", blend_images, _stacked)


def augmix(unit: Tensor, drawn: Mapping[str, Tensor]) -> Tensor:
    """Views x_augmix = m x + (1 - m) sum_i b_i ch_i(x) (equations 3 and 4): [..., B, C, H, W] to [..., 2, B, C, H, W].

    ``unit`` are images on the unit scale, [0, 1]; they are rounded to the 256 grey levels of the operations. ``drawn``
    is of :func:`draw_augmix` for the shape [..., B]. Views are float32, on the unit scale. Where ``unit`` requires
    gradients, the operations are differentiable, as defined in :func:`apply`.
    """
    if unit.requires_grad:
        greys = unit.double() * 255
        greys = greys + (greys.round() - greys).detach()
        return blended(greys, drawn["operation"], drawn["level"], drawn["mix"]).to(unit.dtype)
    return blend((unit * 255).round().to(torch.uint8), drawn["operation"], drawn["level"], drawn["mix"])


# Operations ------------------------------------------------------------------------------------------------


class Constants(NamedTuple):
    """MaxVal of each operation, float64 [10], and cosine and sine of whole degrees, float64 [61, 2]."""

    most: Tensor
    turns: Tensor


def constants(height: int, width: int, device: torch.device) -> Constants:
    """The constants for images of a size, on a device."""
    most = [0, 0, MOST_BITS, MOST_DEGREES, MOST_LEVELS, MOST_SHEAR, MOST_SHEAR, width / 3, height / 3, 0]
    return Constants(*(torch.tensor(numbers, dtype=torch.float64, device=device) for numbers in (most, turns())))


kept_constants = functools.cache(constants)
"""Cached :func:`constants`, because copies to a GPU synchronise. Not for use inside ``torch.func``'s transforms."""


def apply(images: Tensor, operation: Tensor, level: Tensor, given: Constants | None = None) -> Tensor:
    """Apply one operation to each image: float64 [N, C, H, W] of whole grey levels 0 to 255, to the same.

    ``operation`` int [N] are numbers of :data:`OPERATIONS` or :data:`NOTHING`. ``level`` float [N] is SampLevel, from
    0 to 10, with the sign of the geometric operations. AugLevel = SampLevel / 10 * MaxVal (equation 2), truncated to an
    integer for all but shears, as in AugMix's own code. Pixels from outside the image are 0.

    Gradients of the interpolation are exact. Tables and truncations have a slope of zero nearly everywhere, so their
    gradient is replaced: by the slope of autocontrast's stretch, the sign of solarize, and 1 elsewhere.
    """
    operation, level = operation.long(), level.double()
    height, width = images.shape[-2:]
    most, turned = given or constants(height, width, images.device)
    amount = _amount(operation, level, most)
    seen = _look_up(images, operation, amount)
    return resample(seen, _matrices(operation, amount, turned, height, width))


def _amount(operation: Tensor, level: Tensor, most: Tensor) -> Tensor:
    """AugLevel, float64 [N]: an integer except for shears, and signed for geometric operations."""
    # A tensor of 10, because GPUs divide by a scalar as a product with its reciprocal.
    amount = level.abs() * most[operation] / torch.full_like(level, 10.0)
    sheared = (operation == SHEAR_X) | (operation == SHEAR_Y)
    by_table = (operation == POSTERIZE) | (operation == SOLARIZE)
    amount = torch.where(sheared, amount, amount.floor())
    return torch.where(by_table, amount, amount * level.sign())


def _look_up(images: Tensor, operation: Tensor, amount: Tensor) -> Tensor:
    """Map each grey level by the table of its image and channel."""
    levels = images.detach().long()
    values, slopes = _tables(levels, operation.view(-1, 1, 1), amount.view(-1, 1, 1))
    places = levels.flatten(2)
    seen = values.gather(2, places).view(images.shape)
    if not images.requires_grad:
        return seen
    return seen + slopes.gather(2, places).view(images.shape) * (images - images.detach())


def _tables(levels: Tensor, operation: Tensor, amount: Tensor) -> tuple[Tensor, Tensor]:
    """The new value of each grey level, and the slope there: both float64 [N, C, 256]."""
    grey = torch.arange(GREYS, device=levels.device).expand(*levels.shape[:2], GREYS)
    low, high = levels.amin((2, 3))[..., None], levels.amax((2, 3))[..., None]
    # Pillow's order of rounding: the scale first, then the product, then the sum, all in double precision.
    # A tensor of 255, because a scalar over a tensor is computed as a product with the reciprocal.
    span = (high - low).clamp(min=1).double()
    stretch = torch.full_like(span, 255.0) / span
    stretched = (grey * stretch + -low * stretch).trunc().clamp(0, 255)
    stretched = torch.where(high > low, stretched, grey.double())
    unit = 2.0 ** (8 - MOST_BITS + amount.clamp(max=MOST_BITS - 1))
    kept = grey < GREYS - amount
    values = grey.double()
    slopes = torch.ones_like(values)
    for number, table in (
        (AUTOCONTRAST, stretched),
        (EQUALIZE, _equalized(levels, grey, high).double()),
        (POSTERIZE, grey - grey % unit),
        (SOLARIZE, torch.where(kept, grey, 255 - grey).double()),
    ):
        values = torch.where(operation == number, table, values)
    slopes = torch.where((operation == AUTOCONTRAST) & (high > low), stretch, slopes)
    slopes = torch.where((operation == SOLARIZE) & ~kept, -1.0, slopes)
    return values, slopes


def _equalized(levels: Tensor, grey: Tensor, high: Tensor) -> Tensor:
    """Pillow's table for histogram equalisation, int64 [N, C, 256]; the identity where there are too few levels."""
    places = levels.flatten(2)
    counts = torch.zeros_like(grey).scatter_add(2, places, torch.ones_like(places))
    step = (places.shape[2] - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    return torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), grey).clamp(max=255)


@functools.cache
def turns() -> tuple[tuple[float, float], ...]:
    """Cosine and sine of -30 to 30 whole degrees as Pillow rounds them, at index degrees + 30."""
    angles = (-math.radians(degrees % 360.0) for degrees in range(-MOST_DEGREES, MOST_DEGREES + 1))
    return tuple((round(math.cos(angle), 15), round(math.sin(angle), 15)) for angle in angles)


def _matrices(operation: Tensor, amount: Tensor, turned: Tensor, height: int, width: int) -> Tensor:
    """The affine maps (a, b, c, d, e, f) from result to source, float64 [N, 6]; the identity for table operations.

    The source of (x, y) is (a x + b y + c, d x + e y + f), in pixels; the first pixel covers 0 to 1.
    """
    degrees = torch.where(operation == ROTATE, amount, 0.0).long() + MOST_DEGREES
    cosine, sine = turned[degrees].unbind(1)
    middle_x, middle_y = width / 2, height / 2

    def where(number: int, otherwise: Tensor) -> Tensor:
        return torch.where(operation == number, amount, otherwise)

    b = where(SHEAR_X, sine)
    c = where(TRANSLATE_X, cosine * -middle_x + sine * -middle_y + middle_x)
    d = where(SHEAR_Y, -sine)
    f = where(TRANSLATE_Y, -sine * -middle_x + cosine * -middle_y + middle_y)
    return torch.stack([cosine, b, c, d, cosine, f], 1)


def resample(images: Tensor, matrices: Tensor) -> Tensor:
    """Resample images [N, C, H, W] by affine maps [N, 6]: bilinear, truncated to integer levels; 0 outside."""
    height, width = images.shape[-2:]
    y = torch.arange(height, device=images.device, dtype=torch.float64)[:, None] + 0.5
    x = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
    a, b, c, d, e, f = matrices.view(-1, 6, 1, 1).unbind(1)
    at_x, at_y = a * x + b * y + c, d * x + e * y + f
    inside = (at_x >= 0) & (at_x < width) & (at_y >= 0) & (at_y < height)
    left, top = (at_x - 0.5).floor(), (at_y - 0.5).floor()
    along, down = (at_x - 0.5 - left)[:, None], (at_y - 0.5 - top)[:, None]
    flat = images.flatten(2)

    def pixels(row: Tensor, column: Tensor) -> Tensor:
        """The levels at these places, or at the nearest pixel for places outside the image."""
        places = row.clamp(0, height - 1) * width + column.clamp(0, width - 1)
        return flat.gather(2, places.long().flatten(1)[:, None].expand(-1, flat.shape[1], -1)).view(images.shape)

    def between(row: Tensor) -> Tensor:
        first = pixels(row, left)
        return first + (pixels(row, left + 1) - first) * along

    upper = between(top)
    value = upper + (between(top + 1) - upper) * down
    # Gradients ignore the truncation.
    cut = value + (value.floor() - value).detach() if value.requires_grad else value.floor()
    return torch.where(inside[:, None], cut, 0.0)


def blended(greys: Tensor, operation: Tensor, level: Tensor, mix: Tensor, given: Constants | None = None) -> Tensor:
    """The views in PyTorch, on any device: integer levels float64 [..., B, C, H, W] to [..., 2, B, C, H, W]."""
    depth = operation.shape[-1]
    picture = greys.shape[-3:]
    # [..., B, 2, chains, C, H, W], one image for each chain, then flattened.
    copies = greys[..., None, None, :, :, :].expand(*operation.shape[:-1], *picture)
    images = copies.reshape(-1, *picture)
    for step in range(depth):
        images = apply(images, operation[..., step].flatten(), level[..., step].flatten(), given)
    weights = mix.to(images.dtype)[..., None, None, None] / 255
    chain_sum = (images.view(copies.shape) * weights[..., 1:, :, :, :]).sum(-4)
    return (chain_sum + weights[..., 0, :, :, :] * greys[..., None, :, :, :]).movedim(-4, -5)
