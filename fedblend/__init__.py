"""fedblend: federated learning with blended data.

    import fedblend
    result = fedblend.run(fedblend.Experiment(data="digits", partition={"name": "iid", "clients": 10}, model="mlp"))
    result.metrics      # pandas, one row a round
    result.model        # the final model, a plain nn.Module

Names are imported when they are first used, so that ``fedblend --help`` does not wait for PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedblend.core.part import MODULES

if TYPE_CHECKING:
    from fedblend.core.callbacks import Callback
    from fedblend.core.errors import FedblendError
    from fedblend.data.loaders.torch_data import from_torch
    from fedblend.experiment.config import Experiment
    from fedblend.experiment.parts import part
    from fedblend.runs.api import Result, load, run, run_study

__all__ = [
    "Callback",
    "Experiment",
    "FedblendError",
    "Result",
    "from_torch",
    "load",
    "part",
    "read_run",
    "read_study",
    "run",
    "run_study",
]
__version__ = "0.2.0"

_HOMES = {
    "Callback": "fedblend.core.callbacks",
    "Experiment": "fedblend.experiment.config",
    "FedblendError": "fedblend.core.errors",
    "Result": "fedblend.runs.api",
    "from_torch": "fedblend.data.loaders.torch_data",
    "load": "fedblend.runs.api",
    "part": "fedblend.experiment.parts",
    "read_run": "fedblend.runs.api",
    "read_study": "fedblend.runs.api",
    "run": "fedblend.runs.api",
    "run_study": "fedblend.runs.api",
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
