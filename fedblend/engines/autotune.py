"""Choice of the engine, the stack size and the number of ranks: from the experiment, or by timing a few steps."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedblend._kernels import build
from fedblend.core.engine import ClientUpdate
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import allow_tf32, no_tf32
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.layers import CannotStack
from fedblend.engines.trials import (
    MAX_STEP_RATIO,
    faster_kernels,
    make_trial,
    seconds_per_step,
    train_trial,
    with_short_training,
)

MIN_SECONDS_TO_TUNE = 20.0
"""Estimated seconds of a run below which tuning takes longer than it saves."""

MIN_SECONDS_FOR_RANKS = 60.0
"""Estimated seconds of a run from which further ranks save time; each imports PyTorch and reads the data."""

TOLERANCE = {"float32": 0.02, "tf32": 0.02, "bfloat16": 0.3}
"""Largest relative difference between the updates of the stacked engine and the loop in a trial, by precision."""

CPU_STACKS = (4, 8, 16)
"""Stack sizes to time on CPUs; larger stacks exceed the caches."""

TIMED_CLIENTS = 2
"""Most clients of a stack on which single layers are timed."""

GPU_STACKS = (64, 256)
"""Stack sizes to time on GPUs."""

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
    if not setup.training.optimizer.stacks:
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


def plan_engine(
    setup: Setup, processors: int, rounds: int, on_timing: Callable[[str], Any] = lambda name: None
) -> EnginePlan:
    """Choose the engine for ``rounds`` rounds on ``processors`` CPU cores of this machine.

    Settings of the experiment are kept; the others are chosen by timing a few steps of each candidate.
    ``on_timing`` receives the name of each candidate before its steps.
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
    loop = LoopEngine(short, experiment.device)
    step = seconds_per_step(loop, 1)
    total = step * rounds * _steps_a_round(setup)
    if total < MIN_SECONDS_TO_TUNE:
        why = f"the loop needs about {total:.0f} s for the whole run, less than finding a faster way would take"
        return EnginePlan("loop", None, ranks or 1, memory_format, why)
    if experiment.device.startswith("cuda"):
        # One rank a GPU: processes that share a GPU slow each other down.
        processors = torch.cuda.device_count() if experiment.device == "cuda" else 1
    ranks = ranks or (min(processors, experiment.train.cohort) if total >= MIN_SECONDS_FOR_RANKS else 1)
    timings = _time_candidates(short, loop, step, ranks, on_timing)
    listed = "; ".join(f"{_label(candidate)} {1000 * seconds:.2f}" for candidate, seconds in timings)
    return replace(_fastest(short, timings), why=f"milliseconds per client step: {listed}")


def _label(plan: EnginePlan) -> str:
    if plan.engine == "stacked":
        return f"{plan.stack} stacked" + (" without kernels" if plan.kernels == {} else "")
    return "loop" if plan.memory_format == "contiguous" else f"loop, {plan.memory_format}"


def _time_candidates(
    setup: Setup, loop: LoopEngine, step: float, ranks: int, on_timing: Callable[[str], Any]
) -> list[tuple[EnginePlan, float]]:
    """Return every valid plan with its seconds per client step; ``step`` is the loop engine's."""
    experiment = setup.experiment
    timings = []
    if experiment.memory_format != "channels_last":
        timings.append((EnginePlan("loop", None, ranks, "contiguous", ""), step))
    if experiment.memory_format != "contiguous" and any(isinstance(m, nn.Conv2d) for m in setup.model.modules()):
        plan = EnginePlan("loop", None, ranks, "channels_last", "")
        on_timing(_label(plan))
        other = LoopEngine(setup, experiment.device, "channels_last")
        timings.append((plan, seconds_per_step(other, 1)))
    if not unstackable(setup):
        faster: dict[int, dict[str, str] | None] = {}
        for stack in _stacks(setup, ranks):
            plan = EnginePlan("stacked", stack, ranks, "contiguous", "")
            on_timing(_label(plan))
            clients = min(stack, TIMED_CLIENTS)
            if clients not in faster:
                faster[clients] = faster_kernels(setup, clients)
            timings.append(_timed(setup, replace(plan, kernels=faster[clients])))
        fastest = min((plan for plan in timings if plan[0].engine == "stacked"), key=lambda timing: timing[1])[0]
        if fastest.kernels:
            plan = replace(fastest, kernels={})
            on_timing(_label(plan))
            timings.append(_timed(setup, plan))
    return timings


def _timed(setup: Setup, plan: EnginePlan) -> tuple[EnginePlan, float]:
    engine = inner_engine(setup, plan.table(), tested=True)
    return plan, seconds_per_step(engine, plan.stack or 1)


def _fastest(setup: Setup, timings: Sequence[tuple[EnginePlan, float]]) -> EnginePlan:
    """Return the fastest plan; a stacked one must be clearly faster than the loop when both are timed again in turn.

    Candidates are timed one after another, and another process may have slowed down the loop meanwhile.
    """
    loops, stacks = ([one for one in timings if one[0].engine == engine] for engine in ("loop", "stacked"))
    loop, loop_seconds = min(loops, key=lambda timing: timing[1])
    if not stacks:
        return loop
    stacked, seconds = min(stacks, key=lambda timing: timing[1])
    if seconds >= MAX_STEP_RATIO * loop_seconds:
        return loop
    again = [_timed(setup, plan)[1] for plan in (stacked, loop)]
    return stacked if again[0] < MAX_STEP_RATIO * again[1] else loop


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
