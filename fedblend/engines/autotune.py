"""Choice of the engine, the stack size and the number of ranks: from the experiment, or by timing a few steps."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import math
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedblend import __version__
from fedblend._kernels import build
from fedblend.core.engine import ClientUpdate, OnStep, no_step
from fedblend.core.errors import FedblendError
from fedblend.core.files import write_atomically
from fedblend.core.setup import Setup
from fedblend.engines.distributed.forks import can_fork
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import allow_tf32, no_tf32
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.layers import CannotStack
from fedblend.engines.trials import (
    MAX_STEP_RATIO,
    TRIAL_BATCHES,
    TRIAL_EPOCHS,
    faster_kernels,
    make_trial,
    seconds_per_step,
    train_trial,
    with_short_training,
)
from fedblend.experiment.config import as_table

MIN_SECONDS = 5.0
"""Estimated seconds of a run below which it is not worth choosing."""

TUNING_SHARE = 0.05
"""Largest share of a run's estimated time in which candidates are timed."""

RANK_SECONDS = {"copy": 0.4, "process": 5.0}
"""Seconds until a further rank works: a copy of this process, or a new one that imports PyTorch and reads the data."""

ROUND_SECONDS = 0.004
"""Seconds that several ranks need in a round to give each other work and results."""

TOLERANCE = {"float32": 0.02, "tf32": 0.02, "bfloat16": 0.3}
"""Largest relative difference between the updates of the stacked engine and the loop in a trial, by precision."""

CPU_STACKS = (4, 8, 16)
"""Stack sizes to time on CPUs; larger stacks exceed the caches."""

TIMED_CLIENTS = 2
"""Most clients of a stack on which single layers are timed."""

GPU_STACKS = (64, 256)
"""Stack sizes to time on GPUs."""

LIKELY_STACKS = {"cpu": 8, "cuda": 256}
"""Stack sizes that are fastest most often, which are timed first."""

MEMORY_SHARE = 0.25
"""Share of the free memory for the stacks of all ranks; on a GPU, for one stack."""

MemoryFormat = Literal["contiguous", "channels_last"]


@dataclass(frozen=True)
class EnginePlan:
    """The engine of a run and its settings."""

    engine: Literal["loop", "stacked", "flower"]
    stack: int | None
    """Clients in one stack; ``None`` for other engines and for the default."""
    ranks: int
    """Processes, at least 1."""
    memory_format: MemoryFormat
    """Memory format of images in the loop engine."""
    why: str
    """The reason, in one sentence for the user."""
    kernels: Mapping[str, str] | None = None
    """Layers that fedblend's kernels compute in stacks, each with its way; ``None`` for other engines and the rule."""

    def table(self) -> dict[str, Any]:
        """Return plain data, for the run's facts and for other ranks."""
        return asdict(self)


def inner_engine(setup: Setup, plan: dict[str, Any], tested: bool = False) -> LoopEngine:
    """Return the engine of one process. Raises :class:`FedblendError` where the model cannot be stacked.

    ``tested`` skips this check: rank 0 has already made it.
    """
    device = setup.experiment.device
    allow_tf32(setup.experiment.precision)
    if device == "cpu":
        build.keep_memory()
    if plan["engine"] == "loop":
        return LoopEngine(setup, device, plan["memory_format"])
    reason = "" if tested else unstackable(setup)
    if reason:
        raise FedblendError(f"engine: 'stacked' cannot be used here: {reason}; valid: loop, or auto")
    return StackedEngine(setup, device, plan["stack"], kernels=plan.get("kernels"))


def unstackable(setup: Setup) -> str:
    """Return the reason why clients of this model cannot be stacked; empty where they can."""
    for name, layer in setup.model.named_modules():
        is_norm = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats
        if is_norm and f"{name}.running_mean".lstrip(".") not in setup.frozen:
            return f"its layer '{name}' is a batch norm with running statistics, which every batch changes"
        if isinstance(layer, nn.RNNBase):
            return f"its layer '{name}' is a fused {type(layer).__name__}, which PyTorch cannot stack (see model lstm)"
        is_embedding = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        if is_embedding and layer.padding_idx is not None and layer.weight.requires_grad:
            return f"its layer '{name}' has a padding_idx, which PyTorch ignores in a stack"
    for name, first in setup.twins.items():
        return f"its '{first}' and '{name}' are one tensor"
    if setup.training.optimizer.steps == "torch":
        return f"the optimizer '{setup.training.optimizer.path}' is one of the loop engine's"
    with no_tf32():  # the sums of a deep network's first gradients nearly cancel: rounded factors would hide a mistake
        return _unlike_the_loop(with_short_training(setup, by_sgd=True))


def _unlike_the_loop(setup: Setup) -> str:
    """Return how two clients train differently in a stack than in the loop engine; empty where they do not."""
    loop = LoopEngine(setup, setup.experiment.device)
    trial = make_trial(loop, 2, batches=1)
    try:
        updates = list(StackedEngine(setup, setup.experiment.device, 2).train(*trial))
    except CannotStack as error:
        return str(error)
    except Exception as error:
        # An error of the objective or the model occurs in the loop too, and is raised there with client and batch.
        train_trial(loop, trial)
        return f"PyTorch cannot stack it: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
    if loop.device.type != "cpu" and any(isinstance(layer, nn.Dropout) for layer in setup.model.modules()):
        # Compared without dropout: on other devices than CPUs a stack draws other masks than the loop.
        setup = replace(setup, model=_without_dropout(setup.model))
        loop = LoopEngine(setup, setup.experiment.device)
        updates = list(StackedEngine(setup, setup.experiment.device, 2).train(*trial))
    return _difference(loop, updates, list(loop.train(*trial)))


def _without_dropout(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


def _difference(loop: LoopEngine, stacked: Sequence[ClientUpdate], expected: Sequence[ClientUpdate]) -> str:
    """Return which parameter's update in a stack differs from the loop's by more than rounding; empty for none."""
    tolerance, weights = TOLERANCE[loop.setup.experiment.precision], loop.setup.weights()
    start = {name: weights[name].double() for name in loop.names}
    for pair in zip(stacked, expected, strict=True):
        in_stack, in_loop = ({name: u.weights[name].to(start[name]) - start[name] for name in start} for u in pair)
        total_norm = torch.stack([change.norm() for change in in_loop.values()]).norm()
        for name, change in in_loop.items():
            if (in_stack[name] - change).norm() > tolerance * change.norm() + 0.01 * tolerance * total_norm:
                return f"its '{name}' would train differently in a stack than in the loop engine"
    return ""


def plan_engine(setup: Setup, processors: int, rounds: int, on_step: OnStep = no_step) -> EnginePlan:
    """Choose the engine for ``rounds`` rounds on ``processors`` CPU cores of this machine.

    Settings of the experiment are kept; the others are chosen by timing a few steps of each candidate.
    ``on_step`` receives the name of each candidate before its steps.
    """
    experiment = setup.experiment
    allow_tf32(experiment.precision)
    ranks, short = experiment.ranks, with_short_training(setup)
    memory_format: MemoryFormat = experiment.memory_format or "contiguous"
    if experiment.engine != "auto":
        stack = experiment.stack
        if experiment.engine == "stacked" and stack is None and not unstackable(setup):
            stack = _stacks(short, ranks or 1)[-1]
        return EnginePlan(experiment.engine, stack, ranks or 1, memory_format, "as asked for")
    if not experiment.method.upload.trains:
        engine: Literal["loop", "stacked"] = "loop" if unstackable(setup) else "stacked"
        return EnginePlan(engine, 1, ranks or 1, memory_format, "no client trains")
    once = LoopEngine(with_short_training(setup, epochs=1), experiment.device)
    step = seconds_per_step(once, 1, batches=1, limit=1.0)
    total = step * rounds * _steps_a_round(setup)
    if total < MIN_SECONDS:
        why = f"the loop needs about {total:.0f} s for the whole run, less than finding a faster way would take"
        return EnginePlan("loop", None, ranks or 1, memory_format, why)
    if experiment.device.startswith("cuda"):
        # One rank a GPU: processes that share a GPU slow each other down.
        processors = torch.cuda.device_count() if experiment.device == "cuda" else 1
    ranks = ranks or _worthwhile_ranks(min(processors, experiment.train.cohort), total, rounds)
    limit = TUNING_SHARE * total / ranks
    # Without a home directory nothing is remembered.
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError, RuntimeError):
        kept = json.loads(_plan_file(setup, ranks).read_text(encoding="utf-8"))
        if kept["limit"] >= limit / 2:
            return EnginePlan(**kept["plan"])
    plan = _fastest(short, step, ranks, limit, on_step)
    with contextlib.suppress(OSError, FedblendError, RuntimeError):
        file = _plan_file(setup, ranks)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps({"limit": limit, "plan": plan.table()}))
    return plan


def _worthwhile_ranks(most: int, total: float, rounds: int) -> int:
    """Return ``most`` ranks if they save more than they cost of a run of ``total`` seconds, else 1."""
    cost = (most - 1) * RANK_SECONDS["copy" if can_fork() else "process"] + rounds * ROUND_SECONDS
    return most if total * (1 - 1 / max(1, most)) > cost else 1


def _plan_file(setup: Setup, ranks: int) -> Path:
    """The file in fedblend's cache that keeps the plan for this model, training, clients, machine and versions."""
    table, data = as_table(setup.experiment), setup.data.train
    of_run = [table.get(name) for name in ("model", "train", "method", "device", "precision", "memory_format", "stack")]
    of_data = [len(setup.population), int(setup.population.sizes.max(initial=0)), *data.x.shape[1:], str(data.x.dtype)]
    cpu = torch.backends.cpu.get_cpu_capability()
    machine = [ranks, torch.get_num_threads(), platform.node(), cpu, torch.__version__, __version__]
    digest = hashlib.sha256(json.dumps([of_run, of_data, machine], sort_keys=True).encode()).hexdigest()
    return build.cache() / "engines" / f"{digest[:20]}.json"


def _label(plan: EnginePlan) -> str:
    if plan.engine == "stacked":
        return f"{plan.stack} stacked" + (" without kernels" if plan.kernels == {} else "")
    return "loop" if plan.memory_format == "contiguous" else f"loop, {plan.memory_format}"


def _fastest(setup: Setup, step: float, ranks: int, limit: float, on_step: OnStep) -> EnginePlan:
    """Return the fastest of the plans that ``limit`` seconds allow to time, the likeliest first.

    ``step`` is the loop engine's. A stack must be clearly faster than the loop, which is timed again after it: another
    process may have slowed down the loop meanwhile.
    """
    experiment, end, timings = setup.experiment, time.monotonic() + limit, []

    def allows(clients: int) -> bool:
        return time.monotonic() + 2 * clients * step * TRIAL_BATCHES * TRIAL_EPOCHS < end

    def timed(plan: EnginePlan) -> tuple[float, EnginePlan]:
        on_step(f"timing engines: {_label(plan)}", 0, 0)
        engine = inner_engine(setup, plan.table(), tested=True)
        timings.append((seconds_per_step(engine, plan.stack or 1, limit=end - time.monotonic()), plan))
        return timings[-1]

    def fastest() -> tuple[float, EnginePlan] | None:
        return min((one for one in timings if one[1].engine == "stacked"), key=lambda one: one[0], default=None)

    loop = EnginePlan("loop", None, ranks, experiment.memory_format or "contiguous", "")
    timings.append((step, loop))
    if experiment.memory_format is None and any(isinstance(m, nn.Conv2d) for m in setup.model.modules()) and allows(2):
        timings.clear()
        timed(loop)
        timed(replace(loop, memory_format="channels_last"))
    chosen = min(timings, key=lambda one: one[0])[1]
    if allows(4) and not unstackable(setup):
        kernels = faster_kernels(setup, TIMED_CLIENTS) if allows(4 * TIMED_CLIENTS) else None
        likely = LIKELY_STACKS["cpu" if experiment.device == "cpu" else "cuda"]
        for stack in sorted(_stacks(setup, ranks), key=lambda stack: abs(math.log(stack / likely))):
            if allows(stack):
                timed(EnginePlan("stacked", stack, ranks, "contiguous", "", kernels if stack > 1 else None))
        if (best := fastest()) and best[1].kernels and allows(best[1].stack or 1):
            timed(replace(best[1], kernels={}))
        if (best := fastest()) and best[0] < MAX_STEP_RATIO * timed(chosen)[0]:
            chosen = best[1]
    listed = "; ".join(f"{_label(plan)} {1000 * seconds:.2f}" for seconds, plan in timings)
    return replace(chosen, why=f"milliseconds per client step: {listed}")


def _stacks(setup: Setup, ranks: int) -> list[int]:
    """Return the stack sizes to time: at most a rank's share of the cohort, and what fits into memory.

    A larger cohort is cut into several stacks. The memory of one client's step is measured.
    """
    experiment = setup.experiment
    if experiment.stack:
        return [experiment.stack]
    one = StackedEngine(setup, experiment.device, 1)
    train_trial(one, make_trial(one, 1, batches=1))
    memory = MEMORY_SHARE * free_memory(one.device) / (ranks if one.device.type == "cpu" else 1)
    most = max(1, min(math.ceil(experiment.train.cohort / ranks), int(memory / max(1, one.step_bytes()))))
    sizes = CPU_STACKS if one.device.type == "cpu" else GPU_STACKS
    return sorted({1, *(size for size in sizes if size < most), *([most] if most <= 2 * sizes[-1] else [])})


def free_memory(device: torch.device) -> int:
    """Return the free bytes on a device; for CPUs, the memory available without swapping (1 GiB where unknown)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError), open("/proc/meminfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 1 << 30


def _steps_a_round(setup: Setup) -> float:
    """Return the mean number of steps of all clients in a round."""
    train, sizes = setup.training, setup.population.sizes
    samples, clients = np.unique(sizes[sizes > 0], return_counts=True)
    return float(train.cohort * np.average([train.batches_of(n) for n in samples.tolist()], weights=clients))
