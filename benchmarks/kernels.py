"""Our convolutions and pools beside PyTorch's, layer by layer: where `engines/stacking.py` draws its line.

Each row is a convolution of ten samples a client, forward, by its input and by its weights, in GFLOP/s; the peak is a
matrix product's in the same run.

    python benchmarks/kernels.py          or, with the repeats of each:          python benchmarks/kernels.py 40
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from fedblend.engines.kernels import build, operators
from fedblend.engines.stacking import MOST_CHANNELS

BATCH = 10
LAYERS = (
    ("LeNet-5, first", 1, 28, 6, 5, 2),
    ("LeNet-5, second", 6, 14, 16, 5, 0),
    ("pfl's CNN, first", 1, 28, 32, 3, 0),
    ("pfl's CNN, second", 32, 26, 64, 3, 0),
    ("VGG, first", 3, 32, 32, 3, 1),
    ("VGG, second", 32, 32, 64, 3, 1),
    ("VGG, fourth", 128, 16, 128, 3, 1),
)
"""Name, input channels, side, output channels, kernel, padding."""


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call."""
    work()
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def rates(layer: tuple[str, int, int, int, int, int], repeats: int) -> list[float]:
    """GFLOP/s of ours, then PyTorch's: forward, by input, by weights."""
    _, channels, side, outputs, kernel, padding = layer
    x, w = torch.randn(1, BATCH, channels, side, side), torch.randn(1, outputs, channels, kernel, kernel)
    y = operators.run_conv(x, w, padding)
    g = torch.randn_like(y)
    work = 2 * y.numel() * channels * kernel * kernel / 1e9

    def backward(mask: list[bool]) -> Callable[[], object]:
        settings = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], 1, mask)
        return lambda: torch.ops.aten.convolution_backward(g[0], x[0], w[0], None, *settings)

    calls = (
        lambda: operators.run_conv(x, w, padding),
        lambda: operators.run_conv_input(g, w, padding, side, side),
        lambda: operators.run_conv_weight(x, g, padding, kernel, kernel),
        lambda: torch.conv2d(x[0], w[0], padding=padding),
        backward([True, False, False]),
        backward([False, True, False]),
    )
    return [work / seconds(call, repeats) for call in calls]


def main(repeats: int) -> None:
    """Print the table."""
    torch.set_num_threads(1)
    if build.library() is None:
        raise SystemExit(build.missing())
    build.keep_memory()
    square = torch.randn(512, 512)
    peak = 2 * 512**3 / 1e9 / seconds(lambda: square @ square, repeats)
    table = Table(title=f"GFLOP/s; a matrix product's peak: {peak:.0f}; ours takes up to {MOST_CHANNELS} channels")
    table.add_column("layer", no_wrap=True)
    for column in ("ours", "by input", "by weights", "PyTorch", "by input", "by weights"):
        table.add_column(column, justify="right")
    for layer in LAYERS:
        table.add_row(layer[0], *(f"{rate:.0f}" for rate in rates(layer, repeats)))
    Console().print(table)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
