"""The C++ kernels of aggregators, for many float32 numbers on a processor; each with its plain PyTorch way beside it.

PyTorch sorts, subtracts and compares at a fraction of the speed at which uploads can be read; the kernels come
near it. Where there is no compiler, or too little to do, the plain ways give the same but for the last bits.
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
        _call("add_weighted", ctypes.c_int64(tensor.numel()), ctypes.c_double(weight), _at(tensor), _at(total))
    else:
        total.add_(tensor, alpha=weight)


def mean_of_order(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """For each parameter the mean of its ``low``-th to ``high - 1``-th smallest values over the rows, from 0.

    Of the rows' shape; float32 where they are, else float64. All numbers must be finite.
    """
    if not _suited(rows):
        return _plain_mean_of_order(rows, low, high)
    pairs, out = comparators(len(rows), low, high), torch.empty_like(rows[0])
    numbers = (ctypes.c_int64(len(pairs)), pairs.ctypes.data_as(ctypes.c_void_p), low, high)
    _call("mean_of_order", *_rows(rows), *numbers, _at(out))
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
        _call("squared_distances", *_rows(rows), width, _at(found))
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
        _call(
            "mean_within", *_rows(rows), _at(shares), _at(origin), ctypes.c_double(low), ctypes.c_double(high), _at(out)
        )
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
        and library() is not None
    )


def library() -> ctypes.CDLL | None:
    """The kernels; ``None`` where there is no compiler."""
    return build.library(SOURCE)


def _rows(rows: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    """The arguments that tell a kernel of rows: how long they are, how many, and where."""
    return ctypes.c_int64(rows[0].numel()), len(rows), (ctypes.c_void_p * len(rows))(*(r.data_ptr() for r in rows))


def _at(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _call(name: str, *arguments: Any) -> None:
    getattr(library(), name)(*arguments)


def stages(places: int) -> Iterator[np.ndarray]:
    """Batcher's merge exchange for any number of places: stages of comparators (i, j), i < j, int32 [n, 2].

    Knuth, The Art of Computer Programming, volume 3, section 5.2.2, Algorithm M. A comparator puts the smaller
    value at i and the larger at j; those of one stage touch each place at most once.

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
    """Comparators, int32 [n, 2] in order, after which places ``low`` to ``high - 1`` hold what sorting puts there.

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
