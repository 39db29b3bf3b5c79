"""Measurements of a run from its checkpoint. They change nothing in the run's folder.

AggEnhance's class interior points (Ou et al. 2022, sections 3 and 5.2): :func:`fresh_accuracy`, :func:`distances`
and :func:`alignment`; :func:`measure_points` computes all three. Data of two features: :func:`plane`, the models'
decision boundaries. Fed-AugMix: :func:`switches`, the batches in which loss scaling took the large lambda.
"""

from __future__ import annotations

from fedblend.analysis.points.boundaries import Plane, plane
from fedblend.analysis.points.feature_distances import Distances, Vae, distance, distances, train_vae
from fedblend.analysis.points.gradients import alignment, alignment_by_round
from fedblend.analysis.points.loaded_run import LoadedRun, Points, read
from fedblend.analysis.points.loss_scaling import ClientSwitches, switches
from fedblend.analysis.points.point_metrics import PointMeasurements, measure_points
from fedblend.analysis.points.replay import replay, replay_run
from fedblend.analysis.points.training import TrainingSettings, fresh_accuracy, fresh_model

__all__ = [
    "ClientSwitches",
    "Distances",
    "LoadedRun",
    "Plane",
    "PointMeasurements",
    "Points",
    "TrainingSettings",
    "Vae",
    "alignment",
    "alignment_by_round",
    "distance",
    "distances",
    "fresh_accuracy",
    "fresh_model",
    "measure_points",
    "plane",
    "read",
    "replay",
    "replay_run",
    "switches",
    "train_vae",
]
