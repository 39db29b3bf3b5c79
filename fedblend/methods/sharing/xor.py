"""XOR mixup (XorMixFL, section 3): functions that draw, blend, encode and decode 8-bit samples.

Samples are uint8 [n, ...] throughout. p samples of one label are *blended* into one, b <- alpha b + (1 - alpha) x_t for
t = 1 .. p - 1 from b = x_0 (equation 1), rounded half to even at each step, so that p = 1 blends nothing. A blended
target sample is *encoded* by the bit-wise XOR with a blended dummy sample of another label (equation 2) and *decoded*
by the XOR with another blended sample of the dummy's label (equation 3): the same one gives the target back exactly.

Where a dummy's pixel is 0 the encoded pixel *is* the target's.

A C++ kernel blends samples and XORs the blends in one pass, or plain PyTorch where there is no compiler
(`benchmarks/xor.py` times both). They use fixed-point integers, so that they agree in every pixel. Alpha is rounded to
2^-23. A value within 2^-16 of a half is treated as a half: for an alpha of up to four decimals only a half is so near.
"""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch

from fedblend._kernels import build
from fedblend.core.errors import FedblendError

SOURCE = Path(__file__).with_name("xor.cpp")

WHITE = 255  # The largest pixel
CHUNK = 1 << 16  # Pixels that PyTorch processes at a time, so that intermediate results fit into a processor's cache
BITS = 23  # Fractional bits of the fixed-point numbers: the most that leave room for 255 in 32 bits
HALF, MASK, WINDOW = 1 << (BITS - 1), (1 << BITS) - 1, 128
"""One half, the mask of the fractional bits, and the distance from a half that the rounding of alpha can cause
(255 / 2, rounded up)."""

MAX_DENOMINATOR = 128
"""Largest denominator of alpha for which 16 fractional bits distinguish a half from other values: these are at least
2^16 / (2 MAX_DENOMINATOR) away, more than WINDOW and the rounding of alpha."""

# Which samples ----------------------------------------------------------------------------------------------


def draw_within(labels: np.ndarray, wanted: np.ndarray, p: int, rng: np.random.Generator) -> np.ndarray:
    """Draw up to ``p`` different samples of each wanted label: rows int64 [count, p], -1 where a label has fewer.

    ``labels`` int64 [n] are the labels of the samples, ``wanted`` int64 [count] those to draw. Each row is a uniform
    draw without replacement, in random order. Raises :class:`FedblendError` for a label without samples.
    """
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=int(wanted.max(initial=0)) + 1)
    starts, available = (np.cumsum(counts) - counts)[wanted], counts[wanted]
    if len(available) and not available.min():
        raise FedblendError(f"label {int(wanted[available.argmin()])} is to be blended, but there is no sample of it")
    places = np.full((len(wanted), p), -1)
    for k in range(p):
        place = rng.integers(np.maximum(available - k, 1))
        # Count only places that are not drawn yet: skip each earlier one, in ascending order.
        for earlier in np.sort(places[:, :k], axis=1).T:
            place += place >= earlier
        places[:, k] = np.where(k < available, place, -1)
    # Earlier places of -1 are skipped above too, but only in rows whose further places are all -1.
    return np.where(places >= 0, order[np.maximum(starts[:, None] + places, 0)], -1)


def shortages(counts: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Samples that each target label lacks to be as common as the commonest label (q = m - n): int64 [C].

    ``counts`` int64 [C] are the server's base samples by label, ``targets`` int64 the target labels. Other labels lack
    none.
    """
    short = np.zeros_like(counts)
    short[targets] = counts.max(initial=0) - counts[targets]
    return short


# Pixels -----------------------------------------------------------------------------------------------------


def blend(x: torch.Tensor, places: np.ndarray, alpha: float) -> torch.Tensor:
    """Blend (g^p of equation 1) the rows ``places`` int64 [count, p] (-1: none) of x uint8: uint8 [count, ...]."""
    return xor_of_blends(x, places, None, alpha)


def encode(
    x: torch.Tensor, targets: np.ndarray, dummies: np.ndarray, alpha: float, noise: torch.Tensor | None = None
) -> torch.Tensor:
    """Encode (equation 2): the XOR of blended targets with blended dummies, uint8 [count, ...].

    ``targets`` and ``dummies`` int64 [count, p] are rows of x uint8 [n, ...] (-1: none). ``noise`` uint8 [count, ...]
    is added to the dummies first; sums are clipped at 255.
    """
    return xor_of_blends(x, targets, dummies, alpha, noise)


def decode(encoded: torch.Tensor, x: torch.Tensor, dummies: np.ndarray, alpha: float) -> torch.Tensor:
    """Decode (equation 3): the XOR of encoded samples uint8 [count, ...] with blended samples of x uint8 [n, ...].

    ``dummies`` int64 [count, p] are rows of x (-1: none).
    """
    return xor_of_blends(x, encoded, dummies, alpha)


def superpose(x: torch.Tensor, parts: list[np.ndarray], shares: list[float], alpha: float) -> torch.Tensor:
    """Mix blended samples (MixFL's vanilla mixup): the weighted sum, rounded half to even, uint8 [count, ...].

    ``parts`` are rows int64 [count, p] of x uint8 [n, ...], ``shares`` their weights, with the sum 1.
    """
    mixed = torch.empty((len(parts[0]), *x.shape[1:]), dtype=torch.uint8)
    step = max(1, CHUNK // max(1, math.prod(x.shape[1:])))
    for start in range(0, len(mixed), step):
        rows = slice(start, start + step)
        total = torch.zeros(mixed[rows].shape)
        for places, share in zip(parts, shares, strict=True):
            total.add_(blend(x, places[rows], alpha).float().mul_(share))
        mixed[rows] = total.round_().clamp_(0, WHITE)
    return mixed


# Kernel -----------------------------------------------------------------------------------------------------


def xor_of_blends(
    x: torch.Tensor,
    first: np.ndarray | torch.Tensor,
    second: np.ndarray | None,
    alpha: float,
    noise: torch.Tensor | None = None,
) -> torch.Tensor:
    """The XOR of the blends of ``first`` and of ``second``, uint8 [count, ...].

    Both are rows int64 [count, p] of x uint8 [n, ...]; -1 means no sample, except in the first column. ``first`` may
    also be samples uint8 [count, ...], which are not blended. Without ``second`` there is no XOR. ``noise`` uint8
    [count, ...] is added to the second blends; sums are clipped at 255. Raises :class:`IndexError` for rows that do not
    exist.
    """
    mixed = torch.empty((len(first), *x.shape[1:]), dtype=torch.uint8)
    for places in (first, second):
        if isinstance(places, np.ndarray) and places.size and not -1 <= places.min() <= places.max() < len(x):
            raise IndexError(f"rows from {places.min()} to {places.max()} of {len(x)} samples")
        if isinstance(places, np.ndarray) and places.size and places[:, 0].min() < 0:
            raise IndexError("a blend of no samples")
    weight = round(alpha * (1 << BITS))
    if build.library(SOURCE) is None:
        _in_chunks(x, first, second, weight, noise, mixed)
        return mixed
    given = first.contiguous() if isinstance(first, torch.Tensor) else None
    rows = [
        torch.from_numpy(np.ascontiguousarray(places, np.int64)) if isinstance(places, np.ndarray) else None
        for places in (first, second)
    ]
    widths = [0 if one is None else one.shape[1] for one in rows]
    build.function(SOURCE, "xor_of_blends", "PqqqPPqPPiiP")(
        x.contiguous(), math.prod(x.shape[1:]), len(mixed), widths[0], rows[0], given, widths[1], rows[1],
        None if noise is None else noise.contiguous(), weight, coarse_weight(alpha), mixed,
    )  # fmt: skip
    return mixed


def coarse_weight(alpha: float) -> int:
    """Alpha in units of 2^-16 where that suffices to distinguish a half from other values; otherwise 0.

    >>> coarse_weight(0.5), coarse_weight(0.123)
    (32768, 0)
    """
    near = Fraction(alpha).limit_denominator(MAX_DENOMINATOR)
    return round(alpha * (1 << 16)) if abs(near - Fraction(alpha)) < 1e-12 else 0


def _in_chunks(
    x: torch.Tensor,
    first: np.ndarray | torch.Tensor,
    second: np.ndarray | None,
    weight: int,
    noise: torch.Tensor | None,
    mixed: torch.Tensor,
) -> None:
    """What the kernel does, where there is none."""
    flat, out = x.flatten(1), mixed.flatten(1)
    step = min(max(1, CHUNK // max(1, flat.shape[1])), max(1, len(out)))
    space, dummies = torch.empty(2, step, flat.shape[1], dtype=torch.int32), torch.empty_like(out[:step])
    for start in range(0, len(out), step):
        rows = slice(start, start + step)
        if isinstance(first, torch.Tensor):
            out[rows] = first.flatten(1)[rows]
        else:
            _blend(flat, first[rows], weight, out[rows], space)
        if second is not None:
            dummy = dummies[: len(out[rows])]
            _blend(flat, second[rows], weight, dummy, space)
            if noise is not None:
                dummy.add_(torch.minimum(noise.flatten(1)[rows], WHITE - dummy))
            out[rows].bitwise_xor_(dummy)


def _blend(flat: torch.Tensor, places: np.ndarray, weight: int, out: torch.Tensor, space: torch.Tensor) -> None:
    """Blend rows ``places`` of x uint8 [n, pixels] into ``out``; ``space`` int32 [2, count, pixels] is for work."""
    rows = torch.from_numpy(places)
    torch.index_select(flat, 0, rows[:, 0].contiguous(), out=out)
    for k in range(1, rows.shape[1]):
        there = torch.from_numpy(np.flatnonzero(places[:, k] >= 0))
        all_there = len(there) == len(out)
        b, a = space[:, : len(there)]
        b.copy_(out if all_there else out[there])
        a.copy_(torch.index_select(flat, 0, rows[there, k]))
        b.sub_(a).mul_(weight).add_(a.bitwise_left_shift_(BITS)).add_(HALF + WINDOW)
        tie = torch.bitwise_and(b, MASK, out=a).lt_(2 * WINDOW)
        b.bitwise_right_shift_(BITS)
        b.sub_(tie.bitwise_and_(b))
        if all_there:
            out.copy_(b)
        else:
            out[there] = b.to(torch.uint8)
