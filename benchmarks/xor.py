"""What encoding and decoding XorMixFL's samples takes, beside a copy of them.

Random pictures of 28 x 28 pixels, of which samples are drawn at random rows. Encoding reads two samples and writes one,
decoding the same; a copy reads one and writes one. With p samples in a blend encoding reads 2 p. "Two gathers and an
XOR" is what plain PyTorch would do, on all samples at once; "without the kernel" is what is done where there is no
compiler. Contestants take turns; speed is that of the pixels that come out, medians over turns. Times are the
processor's, which others on the machine disturb less; with one thread on a quiet machine they are the clock's. "Bytes"
are those that must be read and written, as a multiple of a copy's.

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
from functools import partial
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from turns import timed

from fedblend._kernels import build
from fedblend.core.random import stream
from fedblend.methods.sharing.xor import decode, encode

SIDE = 28
BLENDED = (1, 3, 5)
ALPHA = 0.95


class Contestant(NamedTuple):
    """What is timed, and the samples that it has to read for each one that it writes."""

    run: Callable[[], torch.Tensor]
    reads: int

    @property
    def bytes(self) -> float:
        """Bytes beside those of a copy."""
        return (self.reads + 1) / 2


def contestants(samples: int) -> dict[str, Contestant]:
    """What is timed, by name."""
    rng = stream(0, "benchmark")
    x = torch.from_numpy(rng.integers(0, 256, (samples, 1, SIDE, SIDE), np.uint8))
    rows = {p: (rng.integers(samples, size=(samples, p)), rng.integers(samples, size=(samples, p))) for p in BLENDED}
    seeds = encode(x, *rows[1], ALPHA)
    first, second = (torch.from_numpy(r[:, 0].copy()) for r in rows[1])
    made = {
        "copy": Contestant(lambda: x.clone(), 1),
        "gather": Contestant(lambda: x[first], 1),
        "two gathers and an XOR": Contestant(lambda: x[first] ^ x[second], 2),
    }
    for p, (a, b) in rows.items():
        made[f"encode, p = {p}"] = Contestant(partial(encode, x, a, b, ALPHA), 2 * p)
        made[f"decode, p = {p}"] = Contestant(partial(decode, seeds, x, b, ALPHA), 1 + p)
        made[f"encode, p = {p}, without the kernel"] = Contestant(partial(_plain, x, a, b), 2 * p)
    return made


def _plain(x: torch.Tensor, a: np.ndarray, b: np.ndarray) -> torch.Tensor:
    with mock.patch.object(build, "library", return_value=None):
        return encode(x, a, b, ALPHA)


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
    seconds = timed({name: one.run for name, one in runs.items()}, given.turns, time.process_time)
    size = given.samples * SIDE * SIDE / 1e9
    table = Table(
        "what",
        "GB/s",
        "times as long as a copy",
        "bytes beside a copy's",
        title=f"{given.samples} pictures, {given.threads} thread(s)",
    )
    rows = []
    for name, times in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(times, seconds["copy"], strict=True))
        bytes_ = runs[name].bytes
        rows.append({"what": name, "gb_s": size / statistics.median(times), "of_copy": ratio, "bytes": bytes_})
        table.add_row(name, f"{rows[-1]['gb_s']:.2f}", f"{ratio:.2f}", f"{bytes_:g}")
    Console().print(table)
    if given.out:
        facts = {"torch": torch.__version__, "threads": given.threads, "machine": platform.machine()}
        facts |= {"cores": os.cpu_count(), "samples": given.samples, "turns": given.turns, "alpha": ALPHA}
        given.out.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
