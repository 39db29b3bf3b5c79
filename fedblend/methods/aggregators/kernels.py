"""The C++ kernels of aggregators for float32 tensors on a CPU, each with an implementation in PyTorch.

Where there is no compiler, and for small tensors, PyTorch is used; results then differ only in the last bits. The
kernels are 1.8 times (mean) to 8.4 times (interval-mean) as fast as PyTorch, and the median 4.8 times. They reach 30 %
to 101 % of the speed of a copy (`benchmarks/aggregators.py`: 100 uploads of 1.2 million parameters, one thread).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend._kernels import build

SOURCE = Path(__file__).with_name("kernels.cpp")

MIN_NUMBERS = 1 << 16
"""Fewest numbers for which a kernel is used, so that an experiment with small models needs no compiler."""

CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 26
"""Numbers of all uploads that are processed at a time. As float32 they fill half of a core's second-level cache, or 256
MB on a GPU."""

MAX_BLOCK = 1024
"""Most parameters of a block of :func:`squared_distances`."""


def chunks(rows: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parameters of all rows, stacked as [rows, some], with their slice of the flattened rows."""
    flat = [row.reshape(-1) for row in rows]
    width = max(1, (CPU_CHUNK if flat[0].device.type == "cpu" else GPU_CHUNK) // len(flat))
    for start in range(0, len(flat[0]), width):
        place = slice(start, start + width)
        yield place, torch.stack([row[place] for row in flat])


def add_weighted(total: torch.Tensor, tensor: torch.Tensor, weight: float) -> None:
    """Add weight * tensor to ``total`` (float64) in place."""
    if _use_kernel([tensor]) and total.is_contiguous():
        build.function(SOURCE, "add_weighted", "qdPP")(tensor.numel(), weight, tensor, total)
    else:
        total.add_(tensor, alpha=weight)


def mean_of_order(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """For each parameter the mean of its ``low``-th to ``high - 1``-th smallest values over the rows, counted from 0.

    The result has the rows' shape, in float32 where they are float32, else in float64. All numbers must be finite.
    """
    if not _use_kernel(rows):
        return _mean_of_order_in_torch(rows, low, high)
    pairs, out = comparators(len(rows), low, high), torch.empty_like(rows[0])
    kernel = build.function(SOURCE, "mean_of_order", "qiPqPiiP")
    kernel(*_rows(rows), len(pairs), pairs.ctypes.data, low, high, out)
    return out


def _mean_of_order_in_torch(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
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
    """sum (row_i - row_j)^2 of all pairs, float64 [rows, rows], on the CPU.

    The sums are of differences. A matrix product would compute <i, i> + <j, j> - 2 <i, j>, which loses small
    differences of two uploads that are far from the origin.
    """
    number = len(rows)
    if _use_kernel(rows):
        found = torch.zeros(number, number, dtype=torch.float64)
        width = min(MAX_BLOCK, max(16, CPU_CHUNK // number // 16 * 16))
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
    """``origin`` plus the weighted mean of the differences row - origin in [low, high]; ``origin`` without any.

    The result has the rows' shape, in float32 where they are float32, else in float64.
    """
    shares = torch.tensor(weights, dtype=torch.float64, device=origin.device)
    if _use_kernel([*rows, origin]):
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


def _use_kernel(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether kernels support these tensors, and the tensors are large enough."""
    return (
        sum(tensor.numel() for tensor in tensors) >= MIN_NUMBERS
        and all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        and build.library(SOURCE) is not None
    )


def _rows(rows: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The kernel arguments for rows: their length, their number, and their addresses."""
    return rows[0].numel(), len(rows), (ctypes.c_void_p * len(rows))(*(r.data_ptr() for r in rows))


# Sorting networks -------------------------------------------------------------------------------------------
# A comparator network sorts by a fixed list of (minimum, maximum) steps without branches, so that one step processes
# many parameters at once. Steps that do not lead to the required places are left out beforehand.


def stages(places: int) -> Iterator[np.ndarray]:
    """Batcher's merge exchange for any number of places: stages of comparators (i, j), i < j, int32 [n, 2].

    Knuth, The Art of Computer Programming, volume 3, section 5.2.2, Algorithm M. A comparator puts the smaller
    value at i and the larger at j. Comparators of one stage use each place at most once.

    >>> [stage.tolist() for stage in stages(3)]
    [[[0, 2]], [[0, 1]], [[1, 2]]]
    """
    top = 1 << max(0, (places - 1).bit_length() - 1)
    p = top if places > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            i = np.arange(places - d, dtype=np.int32)
            i = i[i & p == r]
            yield np.stack([i, i + d], axis=1)
            if q == p:
                break
            d, q, r = q - p, q // 2, p
        p //= 2


@functools.lru_cache(maxsize=8)
def comparators(places: int, low: int, high: int) -> np.ndarray:
    """Comparators, int32 [n, 2] in order, that put the sorted values into places ``low`` to ``high - 1``.

    >>> comparators(3, 0, 1).tolist()
    [[0, 2], [0, 1]]
    """
    needed = np.zeros(places, bool)
    needed[low:high] = True
    kept = []
    for stage in reversed(list(stages(places))):
        used = needed[stage].any(axis=1)
        needed[stage[used]] = True
        kept.append(stage[used])
    found = np.concatenate([np.empty((0, 2), np.int32), *reversed(kept)])
    found.flags.writeable = False
    return found
