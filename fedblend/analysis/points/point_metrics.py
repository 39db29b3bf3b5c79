"""All measurements of a run's points, as tables and figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from fedblend.analysis import plotting
from fedblend.analysis.plotting import evenly_spaced
from fedblend.analysis.points.alignment import Row, alignment_by_round
from fedblend.analysis.points.feature_distances import distances, train_vae
from fedblend.analysis.points.loaded_run import LoadedRun
from fedblend.analysis.points.training import TrainingSettings, accuracy, fresh_accuracy

SHOWN = 8  # Number of rounds for which a new model is trained, evenly spaced among the rounds with points

Watch = Callable[[str, int, int], None]
"""Called with the name of a task, its finished steps and its total steps."""


@dataclass(frozen=True)
class PointMeasurements:
    """The measurements of a run's points.

    ``rounds`` has a row for each round with points: ``round``; ``points`` (number of points so far, or of those that
    are left where ``kept``); ``alignment`` (of that round's points, at the last model); ``distance`` (equation 19, of
    that round's points to the training samples; NaN without an autoencoder); ``accuracy`` (of a new model trained on
    the points so far; NaN for most rounds).
    ``levels`` are the reference values: the distances of "noise", "test" and "train", and the "accuracy" of the run's
    last model. ``settings`` are those of the new models.
    """

    rounds: pd.DataFrame
    levels: dict[str, float]
    settings: TrainingSettings
    kept: bool = False
    """Whether the run may have removed its oldest points: all numbers are then of the kept ones."""


def measure_points(
    loaded_run: LoadedRun, settings: TrainingSettings | None = None, vae_epochs: int = 10, watch: Watch | None = None
) -> PointMeasurements:
    """Measure a run's points by round of generation; ``vae_epochs = 0`` leaves the distances out."""
    report = watch or (lambda what, done, total: None)
    chosen = settings or TrainingSettings.for_run(loaded_run)
    points = loaded_run.points
    rounds = points.all_rounds()
    aligned = alignment_by_round(loaded_run)
    trained = evenly_spaced(rounds, SHOWN)
    accuracies = {}
    report("new models on the points", 0, len(trained))
    for i, round in enumerate(trained, 1):
        accuracies[round] = fresh_accuracy(loaded_run, chosen, round)
        report("new models on the points", i, len(trained))
    distance_by_round, levels = {}, {"accuracy": accuracy(loaded_run.model(), loaded_run.setup)}
    if vae_epochs:
        vae = train_vae(loaded_run.setup, vae_epochs, lambda done, total: report("autoencoder", done, total))
        found = distances(loaded_run, vae)
        distance_by_round = found.by_round
        levels |= {"noise": found.noise, "test": found.test, "train": found.train}
    frame = pd.DataFrame(
        {
            "round": rounds,
            "points": [int((points.rounds <= round).sum()) for round in rounds],
            "alignment": [aligned[round] for round in rounds],
            "distance": [distance_by_round.get(round, float("nan")) for round in rounds],
            "accuracy": [accuracies.get(round, float("nan")) for round in rounds],
        }
    )
    return PointMeasurements(frame, levels, chosen, loaded_run.removes_points)


# Figures: curves by round, with reference levels ----------------------------------------------------------------

SIZE = (6.4, 4.2)  # Width and height of a figure in inches
ALIGNMENT = "cosine with the gradient on clients' data"  # Label of an axis

LEVELS = {
    "noise": "uniform noise",
    "test": "test samples",
    "train": "training samples among themselves",
    "accuracy": "the run's own last model",
}
"""Names of the reference levels in figures and tables."""

Curve = tuple[Sequence[float], Sequence[float]]


def draw_points(measurements: PointMeasurements, title: str) -> dict[str, bytes]:
    """Draw a PNG for each available measure; return them by file name."""
    frame, levels = measurements.rounds, measurements.levels
    trained = frame.dropna(subset="accuracy")
    percent = 100 * trained["accuracy"]
    until = "kept points made until round" if measurements.kept else "points made until round"
    made, rounds = "round the points were made in", frame["round"].tolist()
    of_accuracy = {"new model, trained on the points alone": (trained["round"].tolist(), percent.tolist())}
    own = {LEVELS["accuracy"]: 100 * levels["accuracy"]}
    aligned = {"points of the round, at the last model": (rounds, frame["alignment"].tolist())}
    drawn = {
        "accuracy.png": draw_curves(of_accuracy, own, (until, "test accuracy (%)"), title),
        "alignment.png": draw_curves(aligned, {"": 0.0}, (made, ALIGNMENT), title),
    }
    if frame["distance"].notna().any():
        far = {"points of the round": (rounds, frame["distance"].tolist())}
        references = {LEVELS[name]: levels[name] for name in ("noise", "test", "train")}
        axes = (made, "mean cosine distance to training samples")
        drawn["distance.png"] = draw_curves(far, references, axes, title)
    return drawn


def draw_replay(rows: Sequence[Row], title: str, kept: bool = False) -> bytes:
    """Draw a PNG of the alignment in each round of the run."""
    rounds = [row["round"] for row in rows]
    lines = {
        "all kept points" if kept else "all points so far": (rounds, [row["alignment"] for row in rows]),
        "the round's points alone": (rounds, [row["alignment_new"] for row in rows]),
    }
    return draw_curves(lines, {"": 0.0}, ("round", ALIGNMENT), title)


def draw_curves(lines: Mapping[str, Curve], levels: Mapping[str, float], labels: tuple[str, str], title: str) -> bytes:
    """Draw a PNG of curves by round with horizontal levels; a level without a name has no legend entry."""
    figure = plotting.blank_figure(*SIZE, (0.1, 0.08))
    axes = figure.add_subplot()
    plotting.head_figure(figure, title, 11)
    for (name, (x, y)), colour in zip(lines.items(), plotting.COLOURS, strict=False):
        axes.plot(x, y, color=colour, linewidth=1.8, marker="o" if len(x) <= 20 else None, markersize=4, label=name)
    named = [name for name in levels if name]
    for name, value in levels.items():
        at = named.index(name) if name else 0
        axes.axhline(
            value,
            color=plotting.COLOURS[(len(lines) + at) % len(plotting.COLOURS)] if name else plotting.MUTED,
            linestyle=plotting.DASHES[1 + at % 3] if name else "-",
            linewidth=1.4 if name else 0.8,
            label=name or None,
            zorder=1,
        )
    plotting.style_axes(axes, *labels)
    plotting.even_ticks(axes.xaxis)
    axes.margins(x=0.03, y=0.08)
    plotting.add_legend(figure, *axes.get_legend_handles_labels(), fontsize=8.5, ncols=2)
    return plotting.png_bytes(figure)
