"""``fedblend paper switches``: count the batches in which loss scaling took the large lambda, by repeating a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.plotting import evenly_spaced
from fedblend.analysis.points.loss_scaling import ClientSwitches, describe_switches, sum_by_round, switches
from fedblend.analysis.points.point_figures import draw_curves
from fedblend.cli.console import Console, table
from fedblend.cli.interrupts import interrupted_once
from fedblend.cli.progress import steps_shown
from fedblend.core.errors import Stopped
from fedblend.core.files import csv_frame, write_atomically
from fedblend.methods.objectives.augmix import AugMix
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, only_run, reading

ROWS = 16  # Largest number of rounds in the terminal, evenly spaced; the file has all
LOG, FIGURE = "switches.csv", "switches.png"


def show_switches(run: Path, out: Path | None = None, trust: bool = False) -> None:
    """Print the number of batches with the large lambda in each round; write log and figure into ``out`` if given."""
    directory = only_run(run)
    if out is not None:
        make_folder(out)  # an unusable folder is refused before the run is repeated
    total = checkpoint.round_of(directory.path) or 0
    rows: list[ClientSwitches] = []
    stopped = False
    with reading([directory], trust), interrupted_once():
        with steps_shown() as shown:
            shown("rounds", 0, total)

            def note(of_round: list[ClientSwitches]) -> None:
                rows.extend(of_round)
                shown("rounds", of_round[0].round if of_round else 0, total)

            try:
                switches(directory.path, note)
            except KeyboardInterrupt:
                stopped = True
        if out is not None and rows:
            _write(out, rows, directory)
        console = Console()
        if rows:
            _print(console, rows, directory)
    if out is not None and rows:
        console.tell(f"Log and figure: {out / LOG}, {out / FIGURE}")
    if stopped:
        raise Stopped(f"stopped after {rows[-1].round if rows else 0} of {total} rounds")


def _print(console: Console, rows: Sequence[ClientSwitches], run: RunDirectory) -> None:
    totals = sum_by_round(rows)
    chosen = set(evenly_spaced([one.round for one in totals], ROWS))
    rounds = table([], ["round", "batches", "large lambda", "share %"], ruled=True, no_wrap=True)
    for one in totals:
        if one.round in chosen:
            rounds.add_row(str(one.round), f"{one.batches:,}", f"{one.large:,}", f"{100 * one.share:.1f}")
    console.print(rounds)
    objective = run.experiment().method.objective
    assert isinstance(objective, AugMix)
    rule = (
        f"large lambda: {objective.large_lambda:g} in place of {objective.lam:g}, where the loss is above "
        f"{objective.threshold:g} times the divergence"
    )
    for line in (describe_switches(totals), rule):
        console.tell(line, style="dim")


def _write(out: Path, rows: Sequence[ClientSwitches], run: RunDirectory) -> None:
    """Write the log, with a row for each client of each round, and the figure of the share by round."""
    write_atomically(out / LOG, csv_frame(pd.DataFrame([asdict(row) for row in rows])))
    totals = sum_by_round(rows)
    line = ([float(one.round) for one in totals], [100 * one.share for one in totals])
    labels = ("round", "batches with the large lambda (%)")
    write_atomically(out / FIGURE, draw_curves({"of all clients of the round": line}, {}, labels, run.path.name))
