"""``fedblend paper points`` and ``boundaries``: measure class interior points, and draw decision boundaries."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.plotting import evenly_spaced
from fedblend.analysis.points import point_figures
from fedblend.analysis.points.boundaries import plane
from fedblend.analysis.points.loaded_run import read
from fedblend.analysis.points.point_metrics import PointMeasurements, measure_points
from fedblend.analysis.points.replay import Row, replay_run
from fedblend.analysis.points.training import TrainingSettings
from fedblend.cli.console import Console, table
from fedblend.cli.progress import steps_shown
from fedblend.core.errors import FedblendError
from fedblend.core.files import csv_frame, write_atomically
from fedblend.report.boundary_figure import accuracies, draw_boundaries
from fedblend.runs.directory import find_runs, reading
from fedblend.runs.runner import one_thread

ROWS = 8  # Largest number of rounds of a replay in the terminal, evenly spaced; the file has all


def show_points(
    run: Path,
    vae_epochs: int,
    replay: bool = False,
    out: Path | None = None,
    trust: bool = False,
    **settings: float | None,
) -> None:
    """Measure a run's class interior points, print the tables, and write them with figures into ``out`` if given.

    ``settings`` are ``epochs``, ``lr`` and ``batch_size`` of a new model on the points, where they are given.
    """
    with reading(find_runs([run]), trust):
        _show_points(run, settings, vae_epochs, replay, out)


def _show_points(run: Path, settings: Mapping[str, Any], vae_epochs: int, replay: bool, out: Path | None) -> None:
    loaded_run = read(run)
    chosen = TrainingSettings.for_run(loaded_run, **settings)
    if out is not None:
        make_folder(out)  # an unusable folder is refused before the measurements
    rows: list[Row] = []
    with steps_shown() as steps, one_thread():
        measurements = measure_points(loaded_run, chosen, vae_epochs, steps)
        if replay:
            total = loaded_run.state.round
            steps("rounds", 0, total)
            rows = replay_run(loaded_run, lambda row: steps("rounds", int(row["round"]), total))
    console = Console()
    _print_points(console, measurements)
    if rows:
        _print_replay(console, rows, measurements.kept)
    if out is not None:
        _write_points(out, measurements, rows, loaded_run.directory.path.name)
        console.tell(f"Tables and figures: {out}")


def _print_points(console: Console, measurements: PointMeasurements) -> None:
    levels, settings = measurements.levels, measurements.settings
    kept = "kept points" if measurements.kept else "points"
    rounds = table(
        [], ["round", f"{kept}\nuntil then", "alignment", "distance", "new model\naccuracy %"], ruled=True, no_wrap=True
    )
    for row in measurements.rounds.dropna(subset="accuracy").to_dict("records"):
        distance = "" if math.isnan(row["distance"]) else f"{row['distance']:.4f}"
        numbers = (f"{row['alignment']:.3f}", distance, f"{100 * row['accuracy']:.1f}")
        rounds.add_row(str(row["round"]), f"{row['points']:,}", *numbers)
    console.print(rounds)
    lines = [
        "alignment: cosine of the gradients on the round's points and on clients' data, at the last model (equation 9)",
        f"new model: trained only on the {kept} made until then, {settings.epochs} epochs, lr {settings.lr:g}, "
        f"batch {settings.batch_size}; the run's own last model: {100 * levels['accuracy']:.1f} %",
    ]
    if "noise" in levels:
        references = ", ".join(
            f"{point_figures.LEVELS[name]} {levels[name]:.4f}" for name in ("noise", "test", "train")
        )
        lines.insert(1, f"distance: of the round's points to the training samples (equation 19); {references}")
    if measurements.kept:
        lines.append("kept points: the run removes its oldest ones (method.server_step.keep), and no file has them")
    for line in lines:
        console.print(line, style="dim")


def _print_replay(console: Console, rows: Sequence[Row], kept: bool) -> None:
    chosen = set(evenly_spaced([int(row["round"]) for row in rows], ROWS))
    number = "kept\npoints" if kept else "points\nso far"
    everything = f"alignment\nall {'kept ' if kept else ''}points"
    rounds = table([], ["round", number, everything, "alignment\nnew points", "accuracy %"], ruled=True, no_wrap=True)
    for row in rows:
        if int(row["round"]) in chosen:
            accuracy = f"{100 * row['accuracy']:.1f}" if "accuracy" in row else ""
            values = (row["alignment"], row["alignment_new"])
            numbers = ["" if math.isnan(value) else f"{value:.3f}" for value in values]
            rounds.add_row(str(int(row["round"])), f"{int(row['points']):,}", *numbers, accuracy)
    console.print()
    console.print(rounds)
    text = "repeated run: both gradients at each round's aggregate before the server step; accuracy after it"
    console.print(text, style="dim")


def _write_points(out: Path, measurements: PointMeasurements, rows: Sequence[Row], title: str) -> None:
    levels = pd.DataFrame({"name": list(measurements.levels), "value": list(measurements.levels.values())})
    write_atomically(out / "points.csv", csv_frame(measurements.rounds))
    write_atomically(out / "levels.csv", csv_frame(levels))
    pngs = point_figures.draw_points(measurements, title)
    if rows:
        write_atomically(out / "replay.csv", csv_frame(pd.DataFrame(rows)))
        pngs["replay.png"] = point_figures.draw_replay(rows, title, measurements.kept)
    for name, png in pngs.items():
        write_atomically(out / name, png)


def show_boundaries(runs: list[Path], out: Path, trust: bool = False) -> None:
    """Draw the decision boundaries of runs' models and print the accuracies. ``out`` must end in ``.png``."""
    if out.suffix.lower() != ".png":
        raise FedblendError(f"--out {out}: is not valid; name a file that ends in .png")
    found = find_runs(runs)
    with steps_shown() as steps, one_thread(), reading(found, trust):
        shown = plane(found, tick=lambda done, total: steps("models of clients' samples", done, total))
    make_folder(out.parent)
    write_atomically(out, draw_boundaries(shown))
    boundaries = table(["boundary"], ["accuracy %"], ruled=True, no_wrap=True)
    for name, accuracy in accuracies(shown):
        boundaries.add_row(name, f"{100 * accuracy:.1f}")
    console = Console()
    console.print(boundaries)
    console.tell(f"Picture: {out}")
