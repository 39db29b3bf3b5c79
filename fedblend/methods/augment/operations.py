"""AugMix's nine operations on grey levels, with Pillow's results; each image has its own operation and level.

A step of a chain is a look-up in a table of 256 grey levels, followed by an affine map with resampling. Each operation
is one of the two, and the other is the identity. So images with different operations are processed together, and every
grey level equals Pillow's.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

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
    return resample(seen, _matrices(operation, amount, turned, *images.shape[-2:]))


def _amount(operation: Tensor, level: Tensor, most: Tensor) -> Tensor:
    """AugLevel, float64 [N]: an integer except for shears, and signed for geometric operations."""
    # A tensor of 10, because GPUs divide by a scalar as a product with its reciprocal.
    amount = level.abs() * most[operation] / torch.full_like(level, 10.0)
    sheared = (operation == SHEAR_X) | (operation == SHEAR_Y)
    by_table = (operation == POSTERIZE) | (operation == SOLARIZE)
    amount = torch.where(sheared, amount, amount.floor())
    return torch.where(by_table, amount, amount * level.sign())


# Tables ----------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """The new value of each grey level, and the slope there: both float64 [N, C, 256]."""

    values: Tensor
    slopes: Tensor


def _look_up(images: Tensor, operation: Tensor, amount: Tensor) -> Tensor:
    """Map each grey level by the table of its image and channel."""
    levels = images.detach().long()
    tables = _tables(levels, operation.view(-1, 1, 1), amount.view(-1, 1, 1))
    places = levels.flatten(2)
    seen = tables.values.gather(2, places).view(images.shape)
    if not images.requires_grad:
        return seen
    return seen + tables.slopes.gather(2, places).view(images.shape) * (images - images.detach())


def _tables(levels: Tensor, operation: Tensor, amount: Tensor) -> Tables:
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
    return Tables(values, slopes)


def _equalized(levels: Tensor, grey: Tensor, high: Tensor) -> Tensor:
    """Pillow's table for histogram equalisation, int64 [N, C, 256]; the identity where there are too few levels."""
    places = levels.flatten(2)
    counts = torch.zeros_like(grey).scatter_add(2, places, torch.ones_like(places))
    step = (places.shape[2] - counts.gather(2, high)) // 255
    below = counts.cumsum(2) - counts
    return torch.where(step > 0, (step // 2 + below) // step.clamp(min=1), grey).clamp(max=255)


# Affine maps -----------------------------------------------------------------------------------------------


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


def blended(
    greys: torch.Tensor, operation: torch.Tensor, level: torch.Tensor, mix: torch.Tensor, given: Constants | None = None
) -> torch.Tensor:
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
