"""Our convolutions beside PyTorch's, layer by layer: direct ones, and by Winograd's algorithm where that is possible.

Each row is a convolution of ten samples a client, forward, by its input and by its weights, in GFLOP/s. All ways have
their turn one after another, on a clock that stands still while others have the processor; the best turn counts. The
peak is a matrix product's in the same run.

    python benchmarks/kernels.py [--turns 20] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import machine
import torch
from rich.console import Console
from rich.table import Table

from fedblend._kernels import build, operators, winograd

BATCH = 10
LAYERS = (
    ("LeNet-5, first", 1, 28, 6, 5, 2),
    ("LeNet-5, second", 6, 14, 16, 5, 0),
    ("pfl's CNN, first", 1, 28, 32, 3, 0),
    ("pfl's CNN, second", 32, 26, 64, 3, 0),
    ("AggEnhance's CNN, first", 3, 32, 16, 3, 1),
    ("AggEnhance's CNN, second", 16, 16, 32, 3, 1),
    ("AggEnhance's CNN, third", 32, 8, 32, 3, 1),
    ("VGG, first", 3, 32, 32, 3, 1),
    ("VGG, second", 32, 32, 64, 3, 1),
    ("VGG, third", 64, 16, 128, 3, 1),
    ("VGG, fourth", 128, 16, 128, 3, 1),
    ("VGG, fifth", 128, 8, 256, 3, 1),
    ("VGG, sixth", 256, 8, 256, 3, 1),
)
"""Name, input channels, side, output channels, kernel, padding."""

Calls = tuple[Callable[[], object], ...]


def best(calls: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """The least seconds of each call, which have their turns one after another."""
    least = [math.inf] * len(calls)
    for turn in range(turns + 1):
        for i, call in enumerate(calls):
            begun = time.thread_time()
            call()
            taken = time.thread_time() - begun
            # The first turn is to warm up.
            least[i] = min(least[i], taken) if turn else least[i]
    return least


def ours(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, padding: int, side: int = 0) -> Calls:
    """The three forms in our kernels, by Winograd's tiles of ``side`` or in the direct way."""
    return (
        lambda: operators.run_conv(x, w, padding, side),
        lambda: operators.run_conv_input(g, w, padding, x.shape[3], x.shape[4], winograd=side),
        lambda: operators.run_conv_weight(x, g, padding, w.shape[3], w.shape[4], winograd=side),
    )


def pytorchs(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor, padding: int, layout: torch.memory_format) -> Calls:
    """The three forms in oneDNN, in a memory format."""
    image, weight, gradient = (t[0].contiguous(memory_format=layout) for t in (x, w, g))
    settings = ([1, 1], [padding] * 2, [1, 1], False, [0, 0], 1)

    def backward(*mask: bool) -> Callable[[], object]:
        return lambda: torch.ops.aten.convolution_backward(gradient, image, weight, None, *settings, [*mask, False])

    return (lambda: torch.conv2d(image, weight, padding=padding), backward(True, False), backward(False, True))


def rates(layer: tuple[str, int, int, int, int, int], turns: int) -> dict[str, object]:
    """GFLOP/s of the three forms in our kernels, and in PyTorch's."""
    name, channels, side, outputs, kernel, padding = layer
    x, w = torch.randn(1, BATCH, channels, side, side), torch.randn(1, outputs, channels, kernel, kernel)
    g = torch.randn_like(operators.run_conv(x, w, padding))
    work = 2 * g.numel() * channels * kernel * kernel / 1e9
    ways = {
        "ours": ours(x, w, g, padding),
        "pytorch": pytorchs(x, w, g, padding, torch.contiguous_format),
        "channels_last": pytorchs(x, w, g, padding, torch.channels_last),
    }
    if winograd.supports(channels, outputs, (kernel, kernel), padding):
        ways |= {way: ours(x, w, g, padding, side) for way, side in winograd.WAYS.items()}
    seconds = best([call for calls in ways.values() for call in calls], turns)
    found = {way: [work / s for s in seconds[3 * i : 3 * i + 3]] for i, way in enumerate(ways)}
    return {"layer": name, "mflop": 1000 * work, **found}


def peak(turns: int) -> float:
    """GFLOP/s of a large product of float32 matrices."""
    a, b = torch.randn(2, 1024, 1024)
    return 2 * 1024**3 / 1e9 / best([lambda: a @ b], turns)[0]


def show(found: dict[str, Any]) -> None:
    """Print rates forward, by input and by weights: direct kernels, Winograd's faster tile, PyTorch's faster format."""
    title = f"GFLOP/s; a matrix product's peak: {found['peak_gflops']:.0f}"
    table = Table("layer", "MFLOP", "direct", "Winograd's", "tile", "PyTorch's", title=title)
    for one in found["rows"]:
        theirs = [max(pair) for pair in zip(one["pytorch"], one["channels_last"], strict=True)]
        tiles = {side: one[way] for way, side in (("winograd", "2x2"), ("winograd-4x4", "4x4")) if way in one}
        side = min(tiles, key=lambda side: sum(1 / rate for rate in tiles[side]), default="")
        ours, fast, best_of_theirs = (
            ", ".join(f"{rate:.0f}" for rate in rates) for rates in (one["ours"], tiles.get(side, []), theirs)
        )
        table.add_row(one["layer"], f"{one['mflop']:.0f}", ours, fast, side, best_of_theirs)
    Console().print(table)


def main() -> None:
    """Measure, print the table, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description="Time our convolutions beside PyTorch's.")
    parser.add_argument("--turns", type=int, default=20, help="turns of each way")
    parser.add_argument("--layers", nargs="*", default=[""], help="only layers with one of these in their names")
    parser.add_argument("--out", type=Path, help="folder for the figures (kernels-PROCESSOR.json)")
    machine.add_option(parser)
    given = parser.parse_args()
    machine.limit(given.isa)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    if build.library() is None:
        raise SystemExit(build.missing())
    build.keep_memory()
    wanted = [layer for layer in LAYERS if any(word in layer[0] for word in given.layers)]
    found = {**machine.when_and_where(), "batch": BATCH, "turns": given.turns, "peak_gflops": peak(given.turns)}
    found["rows"] = [rates(layer, given.turns) for layer in wanted]
    show(found)
    if given.out:
        (given.out / f"kernels-{machine.kind()}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
