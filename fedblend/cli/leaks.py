"""``fedblend leaks``: print the leak report card of runs, and write it with its figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.privacy.leak_report import Leak, LeakReport, leak_report
from fedblend.cli.compare import print_left_out
from fedblend.cli.console import Console, number, table
from fedblend.cli.progress import steps_shown
from fedblend.core.files import csv_frame, write_atomically, write_json
from fedblend.report.scatter_figures import draw_leaks, strongest
from fedblend.runs.directory import find_runs
from fedblend.runs.runner import one_thread
from fedblend.runs.summary import megabytes

FIGURE = "leaks.png"
DIGITS = {"mse": 3, "psnr": 2, "ssim": 3}  # Digits of measures after the point

NOTES = (
    "MSE on the model's scale, PSNR (dB) and SSIM of pictures in [0, 1], means over images. Images that an attack "
    "rebuilt from weights are compared with the originals. Means and mixtures are compared with the nearest raw sample "
    "of all clients.",
    "A lower MSE, a higher PSNR or a higher SSIM means a larger leak. Recognised: the nearest raw sample is one of "
    "those that were mixed or averaged. Distance: Euclidean, on stored values (pixels from 0 to 255).",
    "Member: true minus false positive rate of an attacker who tells samples that were used from others, by their "
    "loss under the final model or by the distance to what was shared (0: guessing, 1: certain).",
)

OF_FEATURES = (
    "Runs on features of a frozen backbone: all measures, also of members, are of features, not of the raw samples. "
    "Features may be inverted to samples by whoever has the backbone."
)


def show_leaks(runs: Sequence[Path], out: Path | None = None, trust: bool = False) -> None:
    """Print the leak report card of runs, and write it with its figure into a folder if one is given."""
    if out is not None:
        make_folder(out)  # an unusable folder is refused before the measurements
    begun = [run for run in find_runs(list(runs)) if run.has_begun(run.path)]
    cards = []
    with steps_shown() as steps, one_thread():
        for done, (run, name) in enumerate(zip(begun, distinct_names([run.path for run in begun]), strict=True), 1):
            cards.append(leak_report(run, trust).named(name))
            steps("runs", done, len(begun))
    console = Console()
    leaks = [leak for card in cards for leak in card.leaks]
    console.print(_sent_table(leaks))
    console.print(_rebuilt_table(leaks))
    for card in cards:
        if card.by_size:
            console.print(_sizes_table(card))
    for line in NOTES:
        console.tell(line, style="dim")
    if any("backbone" in run.facts().get("data", {}) for run in begun):
        console.tell(OF_FEATURES, style="dim")
    print_left_out(begun, trust)
    if out is not None:
        drawn = _write(out, cards, leaks)
        console.tell(f"Table and figure: {out}" if drawn else f"Table: {out}; no figure, since nothing was rebuilt")


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of each path, as many as tell it from the others.

    >>> distinct_names([Path("one/fedavg-seed0"), Path("two/fedavg-seed0"), Path("two/fedmix-seed0")])
    ['one/fedavg-seed0', 'two/fedavg-seed0', 'fedmix-seed0']
    """
    parts = [path.resolve().parts for path in paths]
    names = []
    for own in parts:
        others, length = [one for one in parts if one != own], 1
        while length < len(own) and any(one[-length:] == own[-length:] for one in others):
            length += 1
        names.append("/".join(own[-length:]))
    return names


def _with_firsts(leaks: Sequence[Leak]) -> list[tuple[Leak, bool, bool]]:
    """Each leak, and whether it is the first of its run, and of its kind there."""
    earlier = [("", ""), *((leak.run, leak.kind) for leak in leaks)]
    return [
        (leak, leak.run != before[0], (leak.run, leak.kind) != before)
        for leak, before in zip(leaks, earlier, strict=False)
    ]


def _sent_table(leaks: Sequence[Leak]) -> Table:
    """A row for each kind of payload of a run: what left, and how well an attacker tells members."""
    rows = [
        (
            leak.run if new_run else "",
            f"{leak.kind}: {leak.shape}" if leak.shape else leak.kind,
            f"{leak.times:,} times by {leak.senders:,} clients, {megabytes(leak.bytes)}",
            number(100 * leak.accuracy, 1) if new_run else "",
            number(leak.membership, 3),
        )
        for leak, new_run, new_kind in _with_firsts(leaks)
        if new_kind
    ]
    return _table(("run", "what left", "sent", "test %", "member"), rows, texts=3)


def _rebuilt_table(leaks: Sequence[Leak]) -> Table:
    rows = [
        (
            leak.run if new_run else "",
            leak.kind if new_kind else "",
            leak.how,
            *(number(getattr(leak, name), digits) for name, digits in DIGITS.items()),
            "" if math.isnan(leak.recognised) else f"{leak.recognised:.0%}",
        )
        for leak, new_run, new_kind in _with_firsts(leaks)
    ]
    return _table(("run", "kind", "rebuilt by", "MSE", "PSNR", "SSIM", "recognised"), rows, texts=3)


def _table(headings: Sequence[str], rows: Sequence[tuple[str, ...]], texts: int) -> Table:
    """A table of which the first columns are ``texts``, and columns of numbers that are all empty are left out."""
    filled = [place for place in range(texts, len(headings)) if any(row[place] for row in rows)]
    numbers = [headings[place] for place in filled]
    made = table(headings[:texts], numbers, ruled=True, no_wrap=True, padding=(0, 1, 0, 0))
    for row in rows:
        made.add_row(*row[:texts], *(row[place] for place in filled))
    return made


def _sizes_table(card: LeakReport) -> Table:
    """The distance of means to raw samples by M_k (samples a mean); the run's own M_k is marked."""
    rows = [
        (
            f"{row['samples_per_mean']}{' (the run)' if row['own'] else ''}",
            str(row["samples"]),
            number(row["distance"], 0),
            *(number(row[name], digits) for name, digits in DIGITS.items()),
            f"{row['recognised']:.0%}",
            f"{row['by_chance']:.1%}",
        )
        for row in card.by_size
    ]
    headings = ("M_k", "means", "distance", "MSE", "PSNR", "SSIM", "recognised", "by chance")
    made = _table(headings, rows, texts=0)
    made.title = Text(f"{card.run}: means by M_k")
    return made


def _write(out: Path, cards: Sequence[LeakReport], leaks: Sequence[Leak]) -> bool:
    rows: list[dict[str, Any]] = [leak.table() for leak in leaks]
    write_atomically(out / "leaks.csv", csv_frame(pd.DataFrame(rows)))
    sizes = [{"run": card.run, **row} for card in cards for row in card.by_size]
    write_json(out / "leaks.json", {"leaks": rows, "means_by_size": sizes})
    if not strongest(leaks):
        (out / FIGURE).unlink(missing_ok=True)
        return False
    write_atomically(out / FIGURE, draw_leaks(leaks))
    return True
