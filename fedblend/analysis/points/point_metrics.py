"""All measurements of a run's points, as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from fedblend.analysis.plotting import evenly_spaced
from fedblend.analysis.points.feature_distances import distances, train_vae
from fedblend.analysis.points.gradients import alignment_by_round
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
