"""All that is measured of a run's points, as tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from fedblend.analysis.plotting import evenly_spaced
from fedblend.analysis.points.features import distances
from fedblend.analysis.points.gradients import alignment_by_round
from fedblend.analysis.points.loaded_run import LoadedRun
from fedblend.analysis.points.train_on_points import TrainingSettings, fresh_accuracy
from fedblend.analysis.points.training import accuracy
from fedblend.analysis.points.vae import train_vae

SHOWN = 8
"""Rounds of which a new model is trained, evenly chosen among those in which points were made."""

Watch = Callable[[str, int, int], None]
"""Called with what is being done, how many steps of it are done, and of how many."""


@dataclass(frozen=True)
class PointMeasurements:
    """What is measured of a run's points.

    ``rounds`` has a row for each round in which points were made: ``round``, ``points`` (so many were made until
    then), ``alignment`` (of that round's points, at the last model), ``distance`` (equation 19, of that round's
    points to the training samples; NaN without an autoencoder) and ``accuracy`` (of a new model trained on the
    points made until then; NaN but for some rounds). ``levels`` has what these compare with by ``name``: the
    distances of "noise", "test" and "train", and the "accuracy" of the run's own last model.
    """

    rounds: pd.DataFrame
    levels: dict[str, float]
    settings: TrainingSettings


def measure_points(
    loaded_run: LoadedRun, settings: TrainingSettings | None = None, vae_epochs: int = 10, watch: Watch | None = None
) -> PointMeasurements:
    """Measure a run's points by the rounds they were made in; ``vae_epochs = 0`` leaves the distances out."""
    say = watch or (lambda what, done, total: None)
    chosen = settings or TrainingSettings.for_run(loaded_run)
    points = loaded_run.points
    made_in = points.all_rounds()
    aligned = alignment_by_round(loaded_run)
    trained = evenly_spaced(made_in, SHOWN)
    accuracies = {}
    say("new models on the points", 0, len(trained))
    for i, round in enumerate(trained, 1):
        accuracies[round] = fresh_accuracy(loaded_run, chosen, round)
        say("new models on the points", i, len(trained))
    far, levels = {}, {"accuracy": accuracy(loaded_run.model(), loaded_run.setup)}
    if vae_epochs:
        vae = train_vae(loaded_run.setup, vae_epochs, lambda done, total: say("autoencoder", done, total))
        found = distances(loaded_run, vae)
        far = found.by_round
        levels |= {"noise": found.noise, "test": found.test, "train": found.train}
    frame = pd.DataFrame(
        {
            "round": made_in,
            "points": [int((points.rounds <= round).sum()) for round in made_in],
            "alignment": [aligned[round] for round in made_in],
            "distance": [far.get(round, float("nan")) for round in made_in],
            "accuracy": [accuracies.get(round, float("nan")) for round in made_in],
        }
    )
    return PointMeasurements(frame, levels, chosen)
