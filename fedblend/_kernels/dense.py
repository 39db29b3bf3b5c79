"""Dense layers on a few samples: their outputs, and steps of SGD on their weights; dense.cpp says how."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, Node

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("dense.cpp")

MOST_SAMPLES = 16
"""Samples up to which these kernels are the faster ones; a library's are made for more."""


def run_dense(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [K, B, I] times w [K, I, O], which is the transpose of a contiguous tensor, to [K, B, O]."""
    if not _is_transposed(w):
        return torch.bmm(x, w)
    x = x.contiguous()
    y = x.new_empty(*x.shape[:2], w.shape[2])
    _call("dense", (*x.shape, w.shape[2]), x, w, y)
    return y


def add_product(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> None:
    """w [K, O, I] += factor a b, in place, for a [K, O, B] and b [K, B, I]."""
    few = b.shape[1] <= MOST_SAMPLES and w.is_contiguous() and b.is_contiguous() and _is_transposed(a)
    if few and all(_is_plain(t) for t in (w, a, b)) and build.library(SOURCE) is not None:
        _call("dense_update", (*b.shape, w.shape[1], ctypes.c_float(factor)), a, b, w)
    else:
        w.baddbmm_(a, b, alpha=factor)


def made_of(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Each client's base [O, I] + a^T b as [K, O, I], for a [K, B, O] and b [K, B, I].

    These may be the first rows of longer ones.
    """
    clients, samples, inputs = b.shape
    outputs = a.shape[2]
    room = b.stride(0) // inputs
    rows = (room * outputs, outputs, 1), (room * inputs, inputs, 1)
    plain = base.is_contiguous() and all(_is_plain(t) for t in (base, a, b))
    if not plain or (a.stride(), b.stride()) != rows or build.library(SOURCE) is None:
        return base.expand(clients, outputs, inputs).baddbmm(a.transpose(1, 2), b)
    made = base.new_empty(clients, outputs, inputs)
    _call("dense_make", (clients, samples, inputs, outputs, room), a, b, base, made)
    return made


def use_dense(graph: Graph, node: Node) -> None:
    """In a traced step, let products of a few rows with transposed weights be made by :func:`run_dense`."""
    if node.target is torch.ops.aten.bmm.default:
        x, w = (argument.meta.get("val") for argument in node.args if isinstance(argument, Node))
        if x is not None and w is not None and takes(x, w):
            node.target = run_dense


def takes(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether :func:`run_dense` is there for such tensors."""
    few = x.shape[1] <= MOST_SAMPLES and _is_plain(x) and _is_plain(w)
    return few and _is_transposed(w) and x.is_contiguous() and build.library(SOURCE) is not None


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def _is_transposed(matrices: torch.Tensor) -> bool:
    _, rows, columns = matrices.shape
    steps = zip(matrices.shape, matrices.stride(), (rows * columns, 1, rows), strict=True)
    return all(size == 1 or step == wanted for size, step, wanted in steps)


def _call(name: str, numbers: tuple[Any, ...], *tensors: torch.Tensor) -> None:
    getattr(build.library(SOURCE), name)(*numbers, *(ctypes.c_void_p(t.data_ptr()) for t in tensors))
