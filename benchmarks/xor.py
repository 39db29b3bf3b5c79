"""What encoding and decoding XorMixFL's samples takes, beside a copy of them.

Random pictures of 28 x 28 pixels, of which samples are drawn at random rows. Encoding reads two samples and writes one,
decoding the same; a copy reads one and writes one. "Two gathers and an XOR" is what plain PyTorch would do, on all
samples at once. Contestants take turns; speed is that of the pixels that come out, medians over turns.

    python benchmarks/xor.py [--samples 60000] [--turns 15] [--threads 1] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from fedblend.random import stream
from fedblend.sharing.xor import decode, encode

SIDE = 28


def contestants(samples: int) -> dict[str, Callable[[], torch.Tensor]]:
    """What is timed, by name."""
    rng = stream(0, "benchmark")
    x = torch.from_numpy(rng.integers(0, 256, (samples, 1, SIDE, SIDE), np.uint8))
    rows = {p: [rng.integers(samples, size=(samples, p)) for _ in range(2)] for p in (1, 3)}
    seeds = encode(x, *rows[1], 0.5)
    first, second = (torch.from_numpy(r[:, 0].copy()) for r in rows[1])
    return {
        "copy": lambda: x.clone(),
        "gather": lambda: x[first],
        "two gathers and an XOR": lambda: x[first] ^ x[second],
        "encode, p = 1": lambda: encode(x, *rows[1], 0.5),
        "decode, p = 1": lambda: decode(seeds, x, rows[1][1], 0.5),
        "encode, p = 3": lambda: encode(x, *rows[3], 0.5),
        "decode, p = 3": lambda: decode(seeds, x, rows[3][1], 0.5),
    }


def main() -> None:
    """Time all contestants, print a table, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    runs = contestants(given.samples)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(given.turns + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if turn:
                seconds[name].append(time.perf_counter() - start)
    size = given.samples * SIDE * SIDE / 1e9
    table = Table(
        "what", "GB/s", "times as long as a copy", title=f"{given.samples} pictures, {given.threads} thread(s)"
    )
    rows = []
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["copy"], strict=True))
        rows.append({"what": name, "gb_s": size / statistics.median(times), "of_copy": ratio})
        table.add_row(name, f"{rows[-1]['gb_s']:.2f}", f"{ratio:.2f}")
    Console().print(table)
    if given.out:
        facts = {"torch": torch.__version__, "threads": given.threads, "machine": platform.machine()}
        facts |= {"cores": os.cpu_count(), "samples": given.samples, "turns": given.turns}
        given.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
