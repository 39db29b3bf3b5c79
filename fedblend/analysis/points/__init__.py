"""Probes: what is found out about a run afterwards, from its checkpoint. They change nothing in its folder.

Of AggEnhance's points (Ou et al. 2022, sections 3 and 5.2): :func:`fresh_accuracy`, :func:`distances` and
:func:`alignment`; :func:`look` does all three. Of data in a plane: :func:`plane`, the models' decision boundaries. Of
Fed-AugMix: :func:`switches`, when loss scaling switched lambda.
"""

from __future__ import annotations

from fedblend.analysis.points.boundaries import Plane, plane
from fedblend.analysis.points.features import Distances, distance, distances
from fedblend.analysis.points.gradients import alignment, by_round
from fedblend.analysis.points.loaded_run import LoadedRun, Points, read
from fedblend.analysis.points.loss_scaling import Switched, switches
from fedblend.analysis.points.point_metrics import Evidence, look
from fedblend.analysis.points.replay import replay, replay_run
from fedblend.analysis.points.train_on_points import TrainingSettings, fresh_accuracy, fresh_model
from fedblend.analysis.points.vae import Vae, train_vae

__all__ = [
    "Distances",
    "Evidence",
    "LoadedRun",
    "Plane",
    "Points",
    "Switched",
    "TrainingSettings",
    "Vae",
    "alignment",
    "by_round",
    "distance",
    "distances",
    "fresh_accuracy",
    "fresh_model",
    "look",
    "plane",
    "read",
    "replay",
    "replay_run",
    "switches",
    "train_vae",
]
