"""Objectives: what loss a client minimises on a batch, and terms that add to any of them."""

from fedblend.objectives.augmix import AugMix
from fedblend.objectives.base import Batch, Context, Net, Objective, Plain, Plan, Term
from fedblend.objectives.distill import Distill
from fedblend.objectives.means import FedMix, HiddenMix, NaiveMix
from fedblend.objectives.mixup import GlobalMixup, LocalMix
from fedblend.objectives.proximal import Proximal
from fedblend.objectives.task import Task

__all__ = [
    "AugMix",
    "Batch",
    "Context",
    "Distill",
    "FedMix",
    "GlobalMixup",
    "HiddenMix",
    "LocalMix",
    "NaiveMix",
    "Net",
    "Objective",
    "Plain",
    "Plan",
    "Proximal",
    "Task",
    "Term",
]
