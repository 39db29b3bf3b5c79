"""What ``fedblend leaks`` prints and writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.privacy.leak_report import Leak, LeakReport, leak_report
from fedblend.cli.progress import steps_shown
from fedblend.report.leaks import draw
from fedblend.runs.directory import find_runs
from fedblend.runs.files import write_atomically, write_json
from fedblend.runs.runner import one_thread
from fedblend.runs.summary import megabytes

NOTES = (
    "MSE on the model's scale, PSNR (dB) and SSIM of pictures in [0, 1], means: of images that an attack rebuilt from "
    "weights, beside the originals; of means and mixtures, beside the raw sample nearest to each of all that clients "
    "hold.",
    "A lower MSE, a higher PSNR and SSIM leak more. Recognised: the nearest raw sample is one that it was made of. "
    "Distance: Euclidean, on stored values (pixels from 0 to 255).",
)


def show_leaks(paths: Sequence[Path], out: Path | None) -> None:
    """Print the leak report card of runs, and write it with its figure into a folder if one is given."""
    if out is not None:
        make_folder(out)  # before anything that takes long
    runs = find_runs(list(paths))
    cards = []
    with steps_shown() as shown, one_thread():
        for number, run in enumerate(runs, 1):
            cards.append(leak_report(run))
            shown("runs", number, len(runs))
    console = Console()
    leaks = [leak for one in cards for leak in one.leaks]
    console.print(_table(leaks))
    for one in cards:
        if one.by_size:
            console.print(_by_size(one))
    for line in NOTES:
        console.print(Text(line), style="dim", soft_wrap=True)
    if out is not None:
        _write(out, cards, leaks)
        console.print(f"Table and figure: {out}", highlight=False, soft_wrap=True)


def _table(leaks: Sequence[Leak]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading in ("run", "what left", "sent", "rebuilt by"):
        table.add_column(heading, overflow="fold")
    for heading in ("accuracy %", "MSE", "PSNR", "SSIM", "recognised"):
        table.add_column(heading, justify="right", no_wrap=True)
    before: Leak | None = None
    for leak in leaks:
        new = before is None or (before.run, before.kind) != (leak.run, leak.kind)
        what = f"{leak.kind}: {leak.shape}" if leak.shape else leak.kind
        sent = f"{leak.times:,} times by {leak.senders:,} clients, {megabytes(leak.bytes)}"
        table.add_row(
            Text(leak.run if before is None or before.run != leak.run else ""),
            Text(what if new else ""),
            sent if new else "",
            Text(leak.how),
            _number(100 * leak.accuracy, 1) if before is None or before.run != leak.run else "",
            _number(leak.mse, 3),
            _number(leak.psnr, 2),
            _number(leak.ssim, 3),
            "" if math.isnan(leak.recognised) else f"{leak.recognised:.0%}",
        )
        before = leak
    return table


def _by_size(one: LeakReport) -> Table:
    """The nearness of means by M_k; the run's own is marked."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold", title=f"{one.run}: means by M_k")
    for heading in ("M_k", "means", "distance", "MSE", "PSNR", "SSIM", "recognised", "by chance"):
        table.add_column(heading, justify="right")
    for row in one.by_size:
        table.add_row(
            f"{row['samples_per_mean']}{' (the run)' if row['own'] else ''}",
            str(row["samples"]),
            _number(row["distance"], 0),
            _number(row["mse"], 3),
            _number(row["psnr"], 2),
            _number(row["ssim"], 3),
            f"{row['recognised']:.0%}",
            f"{row['by_chance']:.1%}",
        )
    return table


def _number(value: float, digits: int) -> str:
    if math.isnan(value):
        return ""
    return "∞" if math.isinf(value) else f"{value:.{digits}f}"


def _write(out: Path, cards: Sequence[LeakReport], leaks: Sequence[Leak]) -> None:
    rows: list[dict[str, Any]] = [leak.table() for leak in leaks]
    write_atomically(out / "leaks.csv", pd.DataFrame(rows).to_csv(index=False))
    sizes = [{"run": one.run, **row} for one in cards for row in one.by_size]
    write_json(out / "leaks.json", {"leaks": rows, "means_by_size": sizes})
    write_atomically(out / "leaks.png", draw(leaks))
