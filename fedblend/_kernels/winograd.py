"""Convolutions of 3x3 by Winograd's F(2x2, 3x3): winograd.cpp transforms, PyTorch multiplies matrices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("winograd.cpp")

PRODUCTS = 16
"""Matrix products that take the place of a convolution's sums."""

GAP = 16
"""Numbers between the matrices of two products (winograd.cpp)."""


MIN_CHANNELS = 16
"""Fewest channels, both in and out, for which this can be faster: the transforms are shared by as many products."""


def supports(channels: int, outputs: int, kernel: Sequence[int], padding: int) -> bool:
    """Whether a convolution (stride 1) can be computed in this way, and be faster."""
    suited = tuple(kernel) == (3, 3) and padding <= 2 and min(channels, outputs) >= MIN_CHANNELS
    return suited and build.library(SOURCE) is not None


def run_conv(x: torch.Tensor, w: torch.Tensor, padding: int, y: torch.Tensor) -> None:
    """Write the convolution of x [K, B, C, H, W] with w [K, O, C, 3, 3] to y [K, B, O, h, w]."""
    for k in range(len(x)):
        _conv(x[k], _weights(w[k], rotated=False), padding, y[k])


def run_conv_input(g: torch.Tensor, w: torch.Tensor, padding: int, x: torch.Tensor) -> None:
    """Write d <g, conv(x, w)> / d x to x: the convolution of the gradients with the rotated kernels."""
    for k in range(len(g)):
        _conv(g[k], _weights(w[k], rotated=True).transpose(1, 2), 2 - padding, x[k])


def run_conv_weight(x: torch.Tensor, g: torch.Tensor, padding: int, w: torch.Tensor) -> None:
    """Write d <g, conv(x, w)> / d w to w."""
    for k in range(len(x)):
        inputs = _inputs(x[k], padding)
        samples, outputs = g.shape[1:3]
        gradients = _matrices(x, outputs, inputs.shape[2])
        _call("winograd_gradient", "iiiiiPP", samples, outputs, *x.shape[3:], padding, g[k], gradients)
        sums = _products(gradients, inputs.transpose(1, 2))
        _call("winograd_weight_gradient", "iiPP", *w.shape[1:3], sums, w[k])


def _conv(x: torch.Tensor, weights: torch.Tensor, padding: int, y: torch.Tensor) -> None:
    products = _products(weights, _inputs(x, padding))
    _call("winograd_output", "iiiiiPP", *y.shape[:2], *x.shape[2:], padding, products, y)


def _inputs(x: torch.Tensor, padding: int) -> torch.Tensor:
    """The transformed tiles [16, C, tiles] of x [B, C, H, W]."""
    samples, channels, *sides = x.shape
    high, wide = ((side + 2 * padding - 1) // 2 for side in sides)
    made = _matrices(x, channels, samples * high * wide)
    _call("winograd_input", "iiiiiPP", *x.shape, padding, x, made)
    return made


def _weights(w: torch.Tensor, rotated: bool) -> torch.Tensor:
    """The transformed kernels [16, O, C] of w [O, C, 3, 3]."""
    made = _matrices(w, *w.shape[:2])
    _call("winograd_weight", "iiiPP", *w.shape[:2], int(rotated), w, made)
    return made


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.bmm(a, b, out=_matrices(a, a.shape[1], b.shape[2]))


def _matrices(like: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Room for a matrix of each product."""
    return like.new_empty(PRODUCTS, rows * columns + GAP)[:, : rows * columns].view(PRODUCTS, rows, columns)


def _call(name: str, types: str, *arguments: object) -> None:
    build.function(SOURCE, name, types)(*arguments)
