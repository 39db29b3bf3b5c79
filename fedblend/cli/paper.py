"""``fedblend paper channel``, ``points``, ``boundaries`` and ``switches``: answers to questions of single papers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from fedblend.analysis.attacks.outcome import make_folder
from fedblend.analysis.plotting import evenly_spaced
from fedblend.analysis.points import point_metrics
from fedblend.analysis.points.alignment import Row, replay_run
from fedblend.analysis.points.boundaries import plane
from fedblend.analysis.points.loaded_run import read
from fedblend.analysis.points.loss_scaling import ClientSwitches, describe_switches, sum_by_round, switches
from fedblend.analysis.points.point_metrics import PointMeasurements, measure_points
from fedblend.analysis.points.training import TrainingSettings
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, number, table
from fedblend.cli.interrupts import interrupted_once
from fedblend.cli.progress import steps_shown
from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.files import csv_frame, write_atomically
from fedblend.core.setup import Setup
from fedblend.core.trees import bytes_of
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.channels import Link, Wireless
from fedblend.methods.objectives.augmix import AugMix
from fedblend.report.boundary_figure import accuracies, draw_boundaries
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory, find_runs, only_run, reading
from fedblend.runs.runner import one_thread

MOST_REPLAYED, MOST_SWITCHED = 8, 16  # Rounds in the terminal's tables, evenly spaced; the files have all
LOG, FIGURE = "switches.csv", "switches.png"

# A channel's closed forms ---------------------------------------------------------------------------------------

OUTPUT_BITS = 32  # Bits of one number of the mean outputs (b_out)
COLUMNS = ("link", "payload", "bits", "mean\nSNR", "success", "bits\na slot", "slots\nneeded", "mean\nms", "outage")


def payloads(setup: Setup, seeds: Sequence[int]) -> dict[str, dict[str, int]]:
    """Bits of each payload, by direction and name (Mix2FLD, sections II-C and III-A).

    A model has the bits of its tensors (32 a weight), mean outputs have 32 x classes^2, a seed sample has the bits of
    its stored form (8 a pixel). ``seeds`` are the numbers N_S of seed samples that are sent with the first outputs.
    """
    both = {"model": 8 * bytes_of(setup.model.state_dict())}
    if setup.task.kind == "classification":
        both["outputs"] = OUTPUT_BITS * setup.task.outputs**2
    up = dict(both)
    if setup.task.kind == "classification" and setup.data.kind not in ("text", "tokens"):
        x = setup.data.train.x
        up["1 seed"] = 8 * x[0].numel() * x.element_size()
        up |= {f"outputs, {n} seed{'s' if n > 1 else ''}": both["outputs"] + n * up["1 seed"] for n in seeds}
    return {"up": up, "down": both}


def show_channel(file: Path, samples: Sequence[int], changes: Sequence[Change] = ()) -> None:
    """Print the closed forms of the channel of a file's first experiment."""
    experiment = next(iter(api.expand_file(file, changes, None).experiments.values()))
    channel = experiment.channel
    if not isinstance(channel, Wireless):
        raise FedblendError(f"channel.name: '{channel.name}' has no slots; valid: wireless (--set channel=wireless)")
    sent = payloads(make_setup(experiment), samples)
    transmitting = channel.devices or experiment.train.cohort
    console = Console()
    for distance in sorted({channel.nearest or channel.distance, channel.distance}):
        links = {direction: channel.link(direction, transmitting, distance) for direction in sent}
        console.print(
            f"{transmitting} devices share the uplink, at {distance:g} m; up to {links['up'].limit} slots of "
            f"{channel.slot * 1000:g} ms each way"
        )
        console.print(_channel_table(links, sent))


def _channel_table(links: dict[str, Link], sent: dict[str, dict[str, int]]) -> Table:
    # Narrow enough for 80 columns: in a narrower terminal Rich would cut numbers off, and so print wrong ones.
    made = table(COLUMNS[:2], COLUMNS[2:], no_wrap=True, collapse_padding=True)
    for direction, link in links.items():
        for payload, bits in sent[direction].items():
            chances = (f"{link.snr:,.4g}", f"{link.success:.4f}", f"{link.bits_per_slot:,.0f}")
            time = (f"{int(link.needed(bits)):,}", f"{1000 * link.mean_seconds(bits):,.4g}")
            made.add_row(direction, payload, f"{bits:,}", *chances, *time, f"{link.outage(bits):.3g}")
    return made


# Class interior points ------------------------------------------------------------------------------------------


def show_points(
    run: Path,
    vae_epochs: int,
    replay: bool = False,
    out: Path | None = None,
    trust: bool = False,
    **settings: Any,
) -> None:
    """Measure a run's class interior points; ``settings`` are fields of :class:`TrainingSettings` that are given."""
    rows: list[Row] = []
    with reading(find_runs([run]), trust), steps_shown() as steps, one_thread():
        loaded_run = read(run)
        chosen = TrainingSettings.for_run(loaded_run, **settings)
        if out is not None:
            make_folder(out)  # an unusable folder is refused before the measurements
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
        numbers = (number(row["alignment"], 3), number(row["distance"], 4), number(100 * row["accuracy"], 1))
        rounds.add_row(str(row["round"]), f"{row['points']:,}", *numbers)
    console.print(rounds)
    lines = [
        "alignment: cosine of the gradients on the round's points and on clients' data, at the last model (equation 9)",
        f"new model: trained only on the {kept} made until then, {settings.epochs} epochs, lr {settings.lr:g}, "
        f"batch {settings.batch_size}; the run's own last model: {100 * levels['accuracy']:.1f} %",
    ]
    if "noise" in levels:
        references = ", ".join(
            f"{point_metrics.LEVELS[name]} {levels[name]:.4f}" for name in ("noise", "test", "train")
        )
        lines.insert(1, f"distance: of the round's points to the training samples (equation 19); {references}")
    if measurements.kept:
        lines.append("kept points: the run removes its oldest ones (method.server_step.keep), and no file has them")
    for line in lines:
        console.print(line, style="dim")


def _print_replay(console: Console, rows: Sequence[Row], kept: bool) -> None:
    chosen = set(evenly_spaced([int(row["round"]) for row in rows], MOST_REPLAYED))
    points = "kept\npoints" if kept else "points\nso far"
    everything = f"alignment\nall {'kept ' if kept else ''}points"
    rounds = table([], ["round", points, everything, "alignment\nnew points", "accuracy %"], ruled=True, no_wrap=True)
    for row in rows:
        if int(row["round"]) in chosen:
            shares = (number(row["alignment"], 3), number(row["alignment_new"], 3))
            accuracy = number(100 * row.get("accuracy", math.nan), 1)
            rounds.add_row(str(int(row["round"])), f"{int(row['points']):,}", *shares, accuracy)
    console.print()
    console.print(rounds)
    text = "repeated run: both gradients at each round's aggregate before the server step; accuracy after it"
    console.print(text, style="dim")


def _write_points(out: Path, measurements: PointMeasurements, rows: Sequence[Row], title: str) -> None:
    levels = pd.DataFrame({"name": list(measurements.levels), "value": list(measurements.levels.values())})
    write_atomically(out / "points.csv", csv_frame(measurements.rounds))
    write_atomically(out / "levels.csv", csv_frame(levels))
    pngs = point_metrics.draw_points(measurements, title)
    if rows:
        write_atomically(out / "replay.csv", csv_frame(pd.DataFrame(rows)))
        pngs["replay.png"] = point_metrics.draw_replay(rows, title, measurements.kept)
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


# Switches of loss scaling ---------------------------------------------------------------------------------------


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
            _write_switches(out, rows, directory)
        console = Console()
        if rows:
            _print_switches(console, rows, directory)
    if out is not None and rows:
        console.tell(f"Log and figure: {out / LOG}, {out / FIGURE}")
    if stopped:
        raise Stopped(f"stopped after {rows[-1].round if rows else 0} of {total} rounds")


def _print_switches(console: Console, rows: Sequence[ClientSwitches], run: RunDirectory) -> None:
    totals = sum_by_round(rows)
    chosen = set(evenly_spaced([one.round for one in totals], MOST_SWITCHED))
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


def _write_switches(out: Path, rows: Sequence[ClientSwitches], run: RunDirectory) -> None:
    write_atomically(out / LOG, csv_frame(pd.DataFrame([asdict(row) for row in rows])))
    totals = sum_by_round(rows)
    line = ([float(one.round) for one in totals], [100 * one.share for one in totals])
    labels = ("round", "batches with the large lambda (%)")
    write_atomically(
        out / FIGURE, point_metrics.draw_curves({"of all clients of the round": line}, {}, labels, run.path.name)
    )
