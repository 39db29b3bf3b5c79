"""Engines run clients' work: in this process, stacked, or on several processes. Methods do not depend on them."""

from __future__ import annotations

import torch

from fedblend._kernels.build import all_missing as missing_kernels
from fedblend.core.engine import ClientUpdate, CohortResult, Engine, OnStep, Scores, TrainTask, no_step
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.engines.autotune import EnginePlan, inner_engine, plan_engine
from fedblend.engines.distributed.distributed_engine import DistributedEngine
from fedblend.engines.distributed.processes import RankProcesses, defined_in_main, free_address
from fedblend.engines.distributed.ranks import Ranks, started_by_torchrun
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.config import as_table

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
    "missing_kernels",
    "plan_engine",
    "require_device",
]


def make(setup: Setup, plan: EnginePlan, on_step: OnStep = no_step) -> Engine:
    """Create the engine of a plan, and start the processes of its other ranks. The caller closes the engine.

    ``on_step`` receives this process's steps.

    Raises :class:`FedblendError` for a device that is not available, and for more ranks than clients: each rank is a
    process that holds the data.
    """
    require_device(setup.experiment.device)
    clients = len(setup.population)
    if plan.ranks > clients and not started_by_torchrun():
        raise FedblendError(
            f"ranks: {plan.ranks} processes are more than the {clients} clients; valid: 1 to {clients}, and best no "
            "more than this machine has processors"
        )
    inner = inner_engine(setup, plan.table())
    inner.on_step = on_step
    if started_by_torchrun():
        return DistributedEngine(setup, inner, Ranks.from_environment(), plan.table(), RankProcesses())
    if plan.ranks == 1:
        return inner
    if own := defined_in_main(as_table(setup.experiment)):
        raise FedblendError(
            f"ranks: {plan.ranks} processes cannot all import '{own}', which this script or notebook defines; move it "
            "to a module of its own (my_parts.py), or set ranks = 1"
        )
    processes, address = RankProcesses(), free_address()
    processes.start(plan.ranks, address, setup)
    try:
        return DistributedEngine(setup, inner, processes.connect(plan.ranks, address), plan.table(), processes)
    except BaseException:
        processes.stop()
        raise


def require_device(device: str) -> None:
    """Raise :class:`FedblendError` if a device is not available, or has no float64, in which sums are computed."""
    try:
        torch.zeros((), dtype=torch.float64, device=device).item()
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).split("\n")[0].split(". ")[0]
        if reason.startswith("Expected one of"):
            # PyTorch's message lists every device type that it could be built for.
            reason = "PyTorch has no such device type"
        raise FedblendError(
            f"device: '{device}' is not usable here: {reason}; valid: cpu, or cuda where there is a GPU"
        ) from None
