"""XOR mixup (XorMixFL, section 3): functions that draw, blend, encode and decode 8-bit samples.

Samples are uint8 [n, ...] throughout. p samples of one label are *blended* into one, b <- alpha b + (1 - alpha) x_t for
t = 1 .. p - 1 from b = x_0 (equation 1), rounded half to even at each step, so that p = 1 blends nothing. A blended
target sample is *encoded* by the bit-wise XOR with a blended dummy sample of another label (equation 2) and *decoded*
by the XOR with another blended sample of the dummy's label (equation 3): the same one gives the target back exactly.

Where a dummy's pixel is 0 the encoded pixel *is* the target's.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from fedblend.core.errors import FedblendError
from fedblend.methods.sharing.xor_kernels import CHUNK, WHITE, xor_of_blends

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
