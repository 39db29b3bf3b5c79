"""Dense layers on a few samples: outputs, and steps of SGD on weights (dense.cpp describes the algorithms)."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.fx import Graph, Node

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("dense.cpp")

MOST_SAMPLES = 16
"""Samples up to which these kernels are faster than PyTorch's, which are made for more."""


def run_dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [K, B, I] times w [K, I, O], which is the transpose of a contiguous tensor, to [K, B, O]."""
    if not _is_transposed(w):
        return torch.bmm(x, w)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:2], w.shape[2])
    build.function(SOURCE, "dense", "iiiiPPP")(*x.shape, w.shape[2], x, w, y)
    return y


def add_product(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> None:
    """w [K, O, I] += factor a b, in place, for a [K, O, B] and b [K, B, I]."""
    few = b.shape[1] <= MOST_SAMPLES and w.is_contiguous() and b.is_contiguous() and _is_transposed(a)
    if few and all(_is_cpu_float(t) for t in (w, a, b)) and build.library(SOURCE) is not None:
        build.function(SOURCE, "dense_update", "iiiifPPP")(*b.shape, w.shape[1], factor, a, b, w)
    else:
        w.baddbmm_(a, b, alpha=factor)


def base_plus_product(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """base [O, I] + a^T b of each client, [K, O, I], for a [K, B, O] and b [K, B, I].

    ``a`` and ``b`` may be the first rows of longer contiguous tensors.
    """
    clients, samples, inputs = b.shape
    outputs = a.shape[2]
    room = b.stride(0) // inputs
    strides = (room * outputs, outputs, 1), (room * inputs, inputs, 1)
    suited = base.is_contiguous() and all(_is_cpu_float(t) for t in (base, a, b))
    if not suited or (a.stride(), b.stride()) != strides or build.library(SOURCE) is None:
        return base.expand(clients, outputs, inputs).baddbmm(a.transpose(1, 2), b)
    weights = base.new_empty(clients, outputs, inputs)
    build.function(SOURCE, "dense_make", "iiiiiPPPP")(clients, samples, inputs, outputs, room, a, b, base, weights)
    return weights


def use_dense(graph: Graph, node: Node) -> None:
    """In a traced step, compute products of a few rows with transposed weights by :func:`run_dense`."""
    if node.target is torch.ops.aten.bmm.default:
        x, w = (argument.meta.get("val") for argument in node.args if isinstance(argument, Node))
        if x is not None and w is not None and supports(x, w):
            node.target = run_dense


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the kernel of :func:`run_dense` can be used for tensors of these shapes, strides and types."""
    few = x.shape[1] <= MOST_SAMPLES and _is_cpu_float(x) and _is_cpu_float(w)
    return few and _is_transposed(w) and x.is_contiguous() and build.library(SOURCE) is not None


def _is_cpu_float(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_transposed(matrices: torch.Tensor) -> bool:
    _, rows, columns = matrices.shape
    strides = zip(matrices.shape, matrices.stride(), (rows * columns, 1, rows), strict=True)
    return all(size == 1 or stride == wanted for size, stride, wanted in strides)
