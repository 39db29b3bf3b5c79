"""What aggregators compute over the uploads of a cohort, some parameters at a time: a row is a client's tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

CPU_CHUNK, GPU_CHUNK = 1 << 18, 1 << 26
"""Numbers of all uploads that are processed at a time. As float32 they fill half of a core's second-level cache, or 256
MB on a GPU."""


def chunks(rows: Sequence[torch.Tensor]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Parameters of all rows, stacked as [rows, some], with their slice of the flattened rows."""
    flat = [row.reshape(-1) for row in rows]
    width = max(1, (CPU_CHUNK if flat[0].device.type == "cpu" else GPU_CHUNK) // len(flat))
    for start in range(0, len(flat[0]), width):
        place = slice(start, start + width)
        yield place, torch.stack([row[place] for row in flat])


def mean_of_order(rows: Sequence[torch.Tensor], low: int, high: int) -> torch.Tensor:
    """For each parameter the mean of its ``low``-th to ``high - 1``-th smallest values over the rows, counted from 0.

    The result has the rows' shape, in float32 where they are float32, else in float64. All numbers must be finite.
    """
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
