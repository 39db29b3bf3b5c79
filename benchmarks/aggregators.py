"""How fast uploads become one: each aggregator on 100 uploads of 1.2 million parameters, beside a plain copy of them.

Uploads are float32, 480 MB in all, and lie in memory as training leaves them: one tensor each, somewhere else. All
contestants have their turn before the next repeat, on one thread; gigabytes a second are those of the uploads. The
memory is the most that a contestant had beyond the uploads, which a gathering aggregator cannot do without.

    python benchmarks/aggregators.py [--repeats 7] [--clients 100] [--parameters 1200000] [--out FILE.json]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from turns import timed

from fedblend.core.aggregator import Aggregator
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.aggregators.robust import IntervalMean, Krum, Median, MultiKrum, TrimmedMean

STATUS = Path("/proc/self/status")


def arguments() -> argparse.Namespace:
    """What is to be timed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--parameters", type=int, default=1_200_000)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    return parser.parse_args()


def uploads(clients: int, parameters: int) -> list[Any]:
    """Random uploads of one tensor, with their weights."""
    generator = torch.Generator().manual_seed(0)
    return [({"w": torch.randn(parameters, generator=generator)}, float(1 + k)) for k in range(clients)]


def contestants(given: list[Any]) -> dict[str, Callable[[], object]]:
    """What is timed, by name."""
    start = {"w": torch.zeros_like(given[0][0]["w"])}
    copies = [torch.empty_like(tensors["w"]) for tensors, _ in given]

    def copy() -> None:
        for to, (tensors, _) in zip(copies, given, strict=True):
            to.copy_(tensors["w"])

    def aggregate(aggregator: Aggregator) -> Callable[[], object]:
        return lambda: aggregator.finish(aggregator.partial(given), start)

    byzantine = max(0, min(20, (len(given) - 3) // 2))
    aggregators = {
        "mean": WeightedMean(),
        "median": Median(),
        "trimmed-mean, 0.1": TrimmedMean(share=0.1),
        "interval-mean": IntervalMean(),
        f"krum, {byzantine}": Krum(byzantine=byzantine),
        f"multi-krum, {byzantine}": MultiKrum(byzantine=byzantine),
    }
    return {"copy": copy} | {name: aggregate(aggregator) for name, aggregator in aggregators.items()}


def megabytes(run: Callable[[], object]) -> float | None:
    """The most memory that a run has beyond what there was before it; ``None`` where Linux does not tell."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
        before = memory("VmRSS")
        run()
        return (memory("VmHWM") - before) / 1e6
    except (OSError, StopIteration):
        return None


def memory(field: str) -> int:
    """Bytes that this process has (VmRSS), or had at most (VmHWM)."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(field))
    return 1024 * int(line.split()[1])


def measure(asked: argparse.Namespace) -> dict[str, Any]:
    """Time all contestants in turn."""
    given = uploads(asked.clients, asked.parameters)
    size = sum(tensors["w"].nbytes for tensors, _ in given)
    runs = contestants(given)
    extra = {key: megabytes(run) for key, run in runs.items()}
    seconds = timed(runs, asked.repeats, warm_up=0)
    copied = statistics.median(seconds["copy"])
    rows = [
        {
            "aggregator": name,
            "gb_s": size / 1e9 / statistics.median(took),
            "best_gb_s": size / 1e9 / min(took),
            "x_copy": statistics.median(took) / copied,
            "extra_mb": extra[name],
            "seconds": took,
        }
        for name, took in seconds.items()
    ]
    machine = {"processor": platform.machine(), "torch": torch.__version__, "threads": torch.get_num_threads()}
    return {"clients": asked.clients, "parameters": asked.parameters, "machine": machine, "rows": rows}


def show(found: dict[str, Any]) -> None:
    """Print the table."""
    table = Table("aggregator", "GB/s", "best", "times a copy's time", "MB beyond the uploads")
    for row in found["rows"]:
        extra = "" if row["extra_mb"] is None or row["aggregator"] == "copy" else f"{row['extra_mb']:.0f}"
        numbers = (f"{row['gb_s']:.2f}", f"{row['best_gb_s']:.2f}", f"{row['x_copy']:.1f}", extra)
        table.add_row(row["aggregator"], *numbers)
    Console().print(table)
    print(f"{found['clients']} uploads of {found['parameters']:,} float32 parameters; medians, in turn, one thread.")


def main() -> None:
    """Measure, print and write."""
    torch.set_num_threads(1)
    asked = arguments()
    found = measure(asked)
    show(found)
    if asked.out:
        asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
