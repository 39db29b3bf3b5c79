"""Engines: where clients run. A method never asks which."""

from __future__ import annotations

import torch

from fedblend.core.engine import ClientUpdate, CohortResult, Engine, Scores, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.engines.autotune import EnginePlan, inner_engine, plan_engine
from fedblend.engines.distributed.engine import DistributedEngine
from fedblend.engines.distributed.processes import RankProcesses, free_address
from fedblend.engines.distributed.ranks import Ranks, started_by_torchrun
from fedblend.engines.loop import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine

__all__ = [
    "ClientUpdate",
    "CohortResult",
    "DistributedEngine",
    "Engine",
    "EnginePlan",
    "LoopEngine",
    "Scores",
    "StackedEngine",
    "TrainTask",
    "inner_engine",
    "make",
    "plan_engine",
    "require_device",
]


def make(setup: Setup, choice: EnginePlan) -> Engine:
    """The engine that was chosen; with several ranks, their processes are started. The caller closes it.

    Raises :class:`FedblendError` for a device that is not there, and for more ranks than there are clients: each is a
    process that holds the data, and one without a client only fills the machine.
    """
    require_device(setup.experiment.device)
    clients = len(setup.population)
    if choice.ranks > clients and not started_by_torchrun():
        raise FedblendError(
            f"ranks: {choice.ranks} processes are more than the {clients} clients; valid: 1 to {clients}, and best no "
            "more than this machine has processors"
        )
    inner = inner_engine(setup, choice.table())
    if started_by_torchrun():
        return DistributedEngine(setup, inner, Ranks.of_environment(), choice.table(), RankProcesses())
    if choice.ranks == 1:
        return inner
    others, where = RankProcesses(), free_address()
    others.start(choice.ranks, where)
    try:
        return DistributedEngine(setup, inner, others.meet(choice.ranks, where), choice.table(), others)
    except BaseException:
        others.stop()
        raise


def require_device(device: str) -> None:
    """Raise :class:`FedblendError` if a device is not there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).split("\n")[0]
        if reason.startswith("Expected one of"):
            # PyTorch's list of all kinds of devices that it could be built for.
            reason = "PyTorch knows no such device"
        raise FedblendError(
            f"device: '{device}' is not usable here: {reason}; valid: cpu, or cuda where there is a GPU"
        ) from None
