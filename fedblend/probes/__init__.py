"""Probes: what is found out about a run afterwards, from its checkpoint. They change nothing in its folder.

Of AggEnhance's points (Ou et al. 2022, sections 3 and 5.2): :func:`fresh_accuracy`, :func:`distances` and
:func:`alignment`; :func:`look` does all three. Of data in a plane: :func:`plane`, the models' decision boundaries. Of
Fed-AugMix: :func:`switches`, when loss scaling switched lambda.
"""

from __future__ import annotations

from fedblend.probes.boundaries import Plane, plane
from fedblend.probes.evidence import Evidence, look
from fedblend.probes.features import Distances, distance, distances
from fedblend.probes.fresh import Settings, fresh_accuracy, fresh_model
from fedblend.probes.gradients import alignment, by_round
from fedblend.probes.replaying import replay, replay_run
from fedblend.probes.scaling import Switched, switches
from fedblend.probes.subject import Points, Subject, read
from fedblend.probes.vae import Vae, train_vae

__all__ = [
    "Distances",
    "Evidence",
    "Plane",
    "Points",
    "Settings",
    "Subject",
    "Switched",
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
