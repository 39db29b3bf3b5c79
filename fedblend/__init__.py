"""fedblend: federated learning with blended data.

    import fedblend
    result = fedblend.run(fedblend.Experiment(data="digits", partition={"name": "iid", "clients": 10}, model="mlp"))
    result.metrics      # pandas, one row a round
    result.model        # the final model, a plain nn.Module

A part of your own imports the base class of its kind, and the types of what it receives, from here too.

Names are imported when they are first used, so that ``fedblend --help`` does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedblend.core.part import MODULES

if TYPE_CHECKING:
    from fedblend.core.aggregator import Aggregator, counting
    from fedblend.core.callbacks import Callback
    from fedblend.core.channel import Channel
    from fedblend.core.context import Batch, CohortSummary, Context, LocalTraining, ModelSpec, Net, StepPlan
    from fedblend.core.dataset import Population
    from fedblend.core.errors import FedblendError
    from fedblend.core.metric import Metric
    from fedblend.core.objective import Objective, Personal, Term
    from fedblend.core.optimizer import Optimizer, Schedule
    from fedblend.core.protection import Adversary, Protection
    from fedblend.core.registry import Count, Fraction, NonNegative, Positive
    from fedblend.core.selection import Selection, SelectionContext
    from fedblend.core.server_step import ServerContext, ServerStep
    from fedblend.core.sharing import ClientData, Pool, Sharing, SharingPlan
    from fedblend.core.upload import Upload
    from fedblend.data.loaders.torch_data import from_torch
    from fedblend.experiment.config import Experiment
    from fedblend.experiment.parts import part
    from fedblend.runs.api import Result, load, read_run, read_study, run, run_study

__all__ = [
    "Adversary",
    "Aggregator",
    "Batch",
    "Callback",
    "Channel",
    "ClientData",
    "CohortSummary",
    "Context",
    "Count",
    "Experiment",
    "FedblendError",
    "Fraction",
    "LocalTraining",
    "Metric",
    "ModelSpec",
    "Net",
    "NonNegative",
    "Objective",
    "Optimizer",
    "Personal",
    "Pool",
    "Population",
    "Positive",
    "Protection",
    "Result",
    "Schedule",
    "Selection",
    "SelectionContext",
    "ServerContext",
    "ServerStep",
    "Sharing",
    "SharingPlan",
    "StepPlan",
    "Term",
    "Upload",
    "counting",
    "from_torch",
    "load",
    "part",
    "read_run",
    "read_study",
    "run",
    "run_study",
]
__version__ = "0.3.0"

_HOMES = {
    name: module
    for module, names in {
        "fedblend.core.aggregator": "Aggregator counting",
        "fedblend.core.callbacks": "Callback",
        "fedblend.core.channel": "Channel",
        "fedblend.core.context": "Batch CohortSummary Context LocalTraining ModelSpec Net StepPlan",
        "fedblend.core.dataset": "Population",
        "fedblend.core.errors": "FedblendError",
        "fedblend.core.metric": "Metric",
        "fedblend.core.objective": "Objective Personal Term",
        "fedblend.core.optimizer": "Optimizer Schedule",
        "fedblend.core.protection": "Adversary Protection",
        "fedblend.core.registry": "Count Fraction NonNegative Positive",
        "fedblend.core.selection": "Selection SelectionContext",
        "fedblend.core.server_step": "ServerContext ServerStep",
        "fedblend.core.sharing": "ClientData Pool Sharing SharingPlan",
        "fedblend.core.upload": "Upload",
        "fedblend.data.loaders.torch_data": "from_torch",
        "fedblend.experiment.config": "Experiment",
        "fedblend.experiment.parts": "part",
        "fedblend.runs.api": "Result load read_run read_study run run_study",
    }.items()
    for name in names.split()
}

# This file runs before any other of the package, and imports none of these.
MODULES |= {
    "dataset": "fedblend.data.loaders",
    "scale": "fedblend.data.scale",
    "partition": "fedblend.data.partitions",
    "model": "fedblend.models",
    "sharing": "fedblend.methods.sharing",
    "objective": "fedblend.methods.objectives",
    "term": "fedblend.methods.objectives",
    "personal": "fedblend.methods.personal",
    "augmentation": "fedblend.methods.augment",
    "optimizer": "fedblend.methods.optimizers",
    "schedule": "fedblend.methods.optimizers",
    "upload": "fedblend.methods.uploads",
    "aggregator": "fedblend.methods.aggregators",
    "server_step": "fedblend.methods.server_steps",
    "selection": "fedblend.methods.selections",
    "channel": "fedblend.methods.channels",
    "protection": "fedblend.methods.protections",
    "adversary": "fedblend.methods.adversaries",
    "metric": "fedblend.methods.metrics",
    "callback": "fedblend.runs.run_callbacks",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedblend' has no attribute '{name}'")
