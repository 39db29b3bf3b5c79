"""The C++ kernels of aggregators, for many float32 numbers on a processor; each with its plain PyTorch way beside it.

PyTorch sorts, subtracts and compares at a fraction of the speed at which uploads can be read; the kernels come
near it. Where there is no compiler, or too little to do, the plain ways give the same but for the last bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend._kernels import build
from fedblend.methods.aggregators.network import comparators

SOURCE = Path(__file__).with_name("kernels.cpp")

WORTH = 1 << 16
"""Numbers below which no kernel is used, so that an experiment of small models never starts a compiler."""

CACHE = 1 << 18
"""Numbers of all uploads that are worked on at a time: as float32 they fill half of a core's second-level cache."""

DEVICE = 1 << 26
"""The same on a GPU, which wants much to do at once: 256 MB."""

WIDEST = 1024
"""Parameters of a block of :func:`squared_distances`, where the cache holds that many of every upload."""


def chunks(rows: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """The same parameters of all rows side by side, [rows, some], and where they lie in the flattened rows."""
    flat = [row.reshape(-1) for row in rows]
    width = max(1, (CACHE if flat[0].device.type == "cpu" else DEVICE) // len(flat))
    for start in range(0, len(flat[0]), width):
        place = slice(start, start + width)
        yield place, torch.stack([row[place] for row in flat])


def add_weighted(total: torch.Tensor, tensor: torch.Tensor, weight: float) -> None:
    """total += weight * tensor, in place; total is float64."""
    if _suited([tensor]) and total.is_contiguous():
        build.function(SOURCE, "add_weighted", "qdPP")(tensor.numel(), weight, tensor, total)
    else:
        total.add_(tensor, alpha=weight)


def mean_of_order(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """For each parameter the mean of its ``low``-th to ``high - 1``-th smallest values over the rows, from 0.

    Of the rows' shape; float32 where they are, else float64. All numbers must be finite.
    """
    if not _suited(rows):
        return _plain_mean_of_order(rows, low, high)
    pairs, out = comparators(len(rows), low, high), torch.empty_like(rows[0])
    kernel = build.function(SOURCE, "mean_of_order", "qiPqPiiP")
    kernel(*_rows(rows), len(pairs), pairs.ctypes.data, low, high, out)
    return out


def _plain_mean_of_order(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    out = torch.empty(rows[0].numel(), dtype=_precision(rows[0]), device=rows[0].device)
    for place, chunk in chunks(rows):
        values = chunk.to(out.dtype)
        if values.device.type == "cpu":
            # NumPy sorts short rows with vector instructions (benchmarks/aggregators.py).
            ordered = torch.from_numpy(np.sort(values.t().contiguous().numpy(), axis=1)).t()
        else:
            ordered = values.sort(0).values
        out[place] = ordered[low:high].mean(0, dtype=torch.float64)
    return out.view(rows[0].shape)


def squared_distances(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """sum (row_i - row_j)^2 of all pairs, float64 [rows, rows], on the processor.

    From the differences themselves: a matrix product would need <i, i> + <j, j> - 2 <i, j>, in which what two near
    uploads differ by is lost wherever the origin is far, and one far upload moves any mean taken as the origin.
    """
    number = len(rows)
    if _suited(rows):
        found = torch.zeros(number, number, dtype=torch.float64)
        width = min(WIDEST, max(16, CACHE // number // 16 * 16))
        build.function(SOURCE, "squared_distances", "qiPiP")(*_rows(rows), width, found)
        return found + found.t()
    above = torch.zeros(number * (number - 1) // 2, dtype=torch.float64, device=rows[0].device)
    for _, chunk in chunks(rows):
        above += torch.pdist(chunk.to(_precision(chunk))).double().square()
    found = torch.zeros(number, number, dtype=torch.float64)
    i, j = torch.triu_indices(number, number, 1)
    found[i, j] = above.cpu()
    return found + found.t()


def mean_within(
    rows: Sequence[torch.Tensor], weights: Sequence[float], origin: torch.Tensor, low: float, high: float
) -> torch.Tensor:
    """origin + the weighted mean of those row - origin that lie in [low, high]; origin where none does.

    Of the rows' shape; float32 where they are, else float64.
    """
    shares = torch.tensor(weights, dtype=torch.float64, device=origin.device)
    if _suited([*rows, origin]):
        out = torch.empty_like(origin)
        build.function(SOURCE, "mean_within", "qiPPPddP")(*_rows(rows), shares, origin, low, high, out)
        return out
    start = origin.reshape(-1).double()
    out = torch.empty(len(start), dtype=_precision(origin), device=origin.device)
    for place, chunk in chunks(rows):
        updates = chunk.double() - start[place]
        counted = ((updates >= low) & (updates <= high)) * shares[:, None]
        weight = counted.sum(0)
        out[place] = start[place] + (counted * updates).sum(0) / weight.where(weight > 0, 1.0)
    return out.view(origin.shape)


def _precision(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype == torch.float32 else torch.float64


def _suited(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether kernels can work on these tensors, and there is enough to do."""
    return (
        sum(tensor.numel() for tensor in tensors) >= WORTH
        and all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and build.library(SOURCE) is not None
    )


def _rows(rows: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The arguments that tell a kernel of rows: how long they are, how many, and where."""
    return rows[0].numel(), len(rows), (ctypes.c_void_p * len(rows))(*(r.data_ptr() for r in rows))
