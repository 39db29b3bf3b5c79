"""Objectives: the loss that a client minimises on a batch, and terms that are added to it."""

from fedblend.core.objective import Batch, Context, Net, Objective, Plain, StepPlan, Task, Term
from fedblend.methods.objectives.augmix import AugMix
from fedblend.methods.objectives.calibrated import FedLC, FedRS
from fedblend.methods.objectives.feddyn import FedDyn
from fedblend.methods.objectives.fedfa import FedFA
from fedblend.methods.objectives.fedmix import FedMix, HiddenMix, NaiveMix
from fedblend.methods.objectives.fedntd import FedNTD
from fedblend.methods.objectives.fedproto import ToPrototypes
from fedblend.methods.objectives.flea import FLea
from fedblend.methods.objectives.mixup import GlobalMixup, LocalMix
from fedblend.methods.objectives.moon import Moon
from fedblend.methods.objectives.scaffold import Scaffold
from fedblend.methods.objectives.statmix import StatMix
from fedblend.methods.objectives.terms import Distill, Proximal
from fedblend.methods.objectives.virtual import VirtualHomogeneity, VirtualSamples

__all__ = [
    "AugMix",
    "Batch",
    "Context",
    "Distill",
    "FLea",
    "FedDyn",
    "FedFA",
    "FedLC",
    "FedMix",
    "FedNTD",
    "FedRS",
    "GlobalMixup",
    "HiddenMix",
    "LocalMix",
    "Moon",
    "NaiveMix",
    "Net",
    "Objective",
    "Plain",
    "Proximal",
    "Scaffold",
    "StatMix",
    "StepPlan",
    "Task",
    "Term",
    "ToPrototypes",
    "VirtualHomogeneity",
    "VirtualSamples",
]
