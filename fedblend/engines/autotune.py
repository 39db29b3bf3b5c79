"""Which engine, how many clients in a stack, how many ranks: asked for, or found by timing a few steps."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedblend._kernels import build
from fedblend.core.engine import ClientUpdate, TrainTask, first_client_state, first_server_state
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import gather
from fedblend.engines.loop import LoopEngine
from fedblend.engines.sgd import allow_tf32
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.layers import CannotStack
from fedblend.models.layers import same_tensors

SHORT = 20.0
"""Seconds of a run below which finding the fastest way costs more than it saves."""

WORTH_RANKS = 60.0
"""Seconds of a run from which it pays to start further processes, each of which imports PyTorch and reads the data."""

CLEARLY = 0.95
"""An engine replaces the loop if its step takes at most this share of the loop's: the rest is the clock's noise."""

NEAR = {"float32": 0.02, "tf32": 0.05, "bfloat16": 0.3}
"""Share of a weight's change in a trial by which that in a stack may differ from it: rounding and no more."""

TRIAL_BATCHES = 3
"""Batches an epoch that a trial trains on."""

TRIAL_EPOCHS = 4
"""Local epochs of a trial, at most."""

STACKS = (4, 8, 16)
"""Numbers of clients in a stack that are tried on a processor, whose caches larger ones outgrow."""

MEMORY_SHARE = 0.25
"""Share of the free memory that the stacks of all ranks may take, or of a GPU's one stack."""

MemoryFormat = Literal["contiguous", "channels_last"]


@dataclass(frozen=True)
class EnginePlan:
    """How a run is computed; ``why`` is one sentence for the user."""

    engine: Literal["loop", "stacked", "flower"]
    stack: int | None
    ranks: int
    memory_format: MemoryFormat
    why: str

    def table(self) -> dict[str, Any]:
        """As plain data, for the run's facts and for other ranks."""
        return asdict(self)


def inner_engine(setup: Setup, choice: dict[str, Any], tested: bool = False) -> LoopEngine:
    """The engine of one process. Raises :class:`FedblendError` where the model cannot be stacked.

    ``tested`` says that it is known to stack: another process has tried.
    """
    device = setup.experiment.device
    allow_tf32(setup.experiment.precision)
    if device == "cpu":
        build.keep_memory()
    if choice["engine"] == "loop":
        return LoopEngine(setup, device, choice["memory_format"])
    reason = "" if tested else unstackable(setup)
    if reason:
        raise FedblendError(f"engine: 'stacked' cannot be used here: {reason}; valid: loop, or auto")
    return StackedEngine(setup, device, choice["stack"])


def unstackable(setup: Setup) -> str:
    """Why clients of this model cannot be stacked, or nothing."""
    for name, layer in setup.model.named_modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
            return f"its layer '{name}' is a batch norm with running statistics, which every batch changes"
        if isinstance(layer, nn.RNNBase):
            return f"its layer '{name}' is a fused {type(layer).__name__}, which PyTorch cannot stack (see model lstm)"
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.padding_idx is not None:
            return f"its layer '{name}' has a padding_idx, which PyTorch forgets in a stack"
    if twins := same_tensors(setup.model):
        return f"its '{twins[0]}' and '{twins[1]}' are one tensor"
    setup = _with_short_training(setup)
    loop = LoopEngine(setup, setup.experiment.device)
    trial = _trial(loop, 2, batches=1)
    try:
        made = list(StackedEngine(setup, setup.experiment.device, 2).train(*trial))
    except CannotStack as error:
        return str(error)
    except Exception as error:
        # A fault of the objective or the model itself is told as it is, with client and batch.
        _train(loop, trial)
        return f"PyTorch cannot stack it: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}"
    if any(isinstance(layer, nn.Dropout) for layer in setup.model.modules()):
        # Without it: where a stack draws masks of its own, they are no fault.
        setup = replace(setup, model=_without_dropout(setup.model))
        loop = LoopEngine(setup, setup.experiment.device)
        made = list(StackedEngine(setup, setup.experiment.device, 2).train(*trial))
    return _difference(loop, made, list(loop.train(*trial)))


def _without_dropout(model: nn.Module) -> nn.Module:
    made = copy.deepcopy(model)
    for layer in made.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return made


def _difference(loop: LoopEngine, stacked: Sequence[ClientUpdate], alone: Sequence[ClientUpdate]) -> str:
    """In what clients trained together differ from the same trained alone by more than rounding; nothing if in none."""
    near, weights = NEAR[loop.setup.experiment.precision], loop.setup.weights()
    start = {name: weights[name].double() for name in loop.names}
    for one, other in zip(stacked, alone, strict=True):
        ours, theirs = ({name: made.weights[name].double() - start[name] for name in start} for made in (one, other))
        whole = torch.stack([step.norm() for step in theirs.values()]).norm()
        for name, step in theirs.items():
            if (ours[name] - step).norm() > near * step.norm() + 0.01 * near * whole:
                return f"it would train otherwise than alone, by its '{name}'"
    return ""


def plan_engine(setup: Setup, processors: int, rounds: int) -> EnginePlan:
    """How to compute ``rounds`` rounds, on ``processors`` of this machine.

    What the experiment asks for is taken; the rest is found by timing a few steps of each way that is open.
    """
    asked = setup.experiment
    allow_tf32(asked.precision)
    ranks, short = asked.ranks, _with_short_training(setup)
    if asked.engine != "auto":
        stack = asked.stack
        if asked.engine == "stacked" and stack is None and not unstackable(setup):
            stack = _stacks(short, ranks or 1)[-1]
        return EnginePlan(asked.engine, stack, ranks or 1, asked.memory_format or "contiguous", "as asked for")
    if not asked.method.upload.trains:
        engine: Literal["loop", "stacked"] = "loop" if unstackable(setup) else "stacked"
        return EnginePlan(engine, 1, ranks or 1, asked.memory_format or "contiguous", "no client trains")
    loop = LoopEngine(short, asked.device)
    step = seconds_a_step(loop, 1)
    total = step * rounds * _steps_a_round(setup)
    if total < SHORT:
        why = f"the loop needs about {total:.0f} s for the whole run, less than finding a faster way would take"
        return EnginePlan("loop", None, ranks or 1, asked.memory_format or "contiguous", why)
    if asked.device.startswith("cuda"):
        # Processes that share one GPU only get into each other's way; each rank takes one of its own.
        processors = torch.cuda.device_count() if asked.device == "cuda" else 1
    ranks = ranks or _ranks(asked.train.cohort, processors, total)
    ways = _ways(short, loop, step, ranks)
    fastest = min(ways, key=lambda way: way[1])
    loops = [way for way in ways if way[0].engine == "loop"]
    simple = min(loops, key=lambda way: way[1])
    chosen = fastest if fastest[1] < CLEARLY * simple[1] else simple
    told = "; ".join(f"{name_of(way)} {1000 * seconds:.2f}" for way, seconds in ways)
    return EnginePlan(**{**chosen[0].table(), "why": f"milliseconds a client's step: {told}"})


def _with_short_training(setup: Setup) -> Setup:
    """The same with fewer local steps, of which it takes no more to time one."""
    train = setup.experiment.train
    fewer = {"epochs": min(train.epochs, TRIAL_EPOCHS)}
    if train.steps:
        fewer["steps"] = min(train.steps, TRIAL_EPOCHS * TRIAL_BATCHES)
    experiment = setup.experiment.model_copy(update={"train": train.model_copy(update=fewer)})
    return replace(setup, experiment=experiment)


def name_of(choice: EnginePlan) -> str:
    """A way in a few words."""
    if choice.engine == "stacked":
        return f"{choice.stack} stacked"
    return "loop" if choice.memory_format == "contiguous" else f"loop, {choice.memory_format}"


def _ranks(cohort: int, processors: int, total: float) -> int:
    return min(processors, cohort) if total >= WORTH_RANKS else 1


def _ways(setup: Setup, loop: LoopEngine, step: float, ranks: int) -> list[tuple[EnginePlan, float]]:
    """Every way that is open, with the seconds of a client's step."""
    asked = setup.experiment
    ways = []
    if asked.memory_format != "channels_last":
        ways.append((EnginePlan("loop", None, ranks, "contiguous", ""), step))
    if asked.memory_format != "contiguous" and any(isinstance(m, nn.Conv2d) for m in setup.model.modules()):
        other = LoopEngine(setup, asked.device, "channels_last")
        ways.append((EnginePlan("loop", None, ranks, "channels_last", ""), seconds_a_step(other, 1)))
    if not unstackable(setup):
        for stack in _stacks(setup, ranks):
            engine = StackedEngine(setup, asked.device, stack)
            ways.append((EnginePlan("stacked", stack, ranks, "contiguous", ""), seconds_a_step(engine, stack)))
    return ways


def _stacks(setup: Setup, ranks: int) -> list[int]:
    """Numbers of clients in a stack worth trying: at most a rank's share of the cohort, and what memory allows.

    A cohort of more clients than that is cut into several stacks. What one client's step makes is measured.
    """
    asked = setup.experiment
    if asked.stack:
        return [asked.stack]
    one = StackedEngine(setup, asked.device, 1)
    _train(one, _trial(one, 1, batches=1))
    memory = MEMORY_SHARE * free_memory(one.device) / (ranks if one.device.type == "cpu" else 1)
    most = max(1, min(math.ceil(asked.train.cohort / ranks), int(memory / max(1, one.step_bytes()))))
    tried = STACKS if one.device.type == "cpu" else (64, 256)
    return sorted({1, *(stack for stack in tried if stack < most), *([most] if most <= 2 * tried[-1] else [])})


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device; of a processor's, what the system says can be had without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with open("/proc/meminfo") as lines:
        for line in lines:
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return 1 << 30


def seconds_a_step(engine: LoopEngine, clients: int) -> float:
    """Seconds of one client's step, in a trial on this many clients; the first run, which traces, is left out."""
    task = _trial(engine, clients, TRIAL_BATCHES)
    steps = _train(engine, task)
    best = math.inf
    for _ in range(3):
        start = time.perf_counter()
        _train(engine, task)
        best = min(best, time.perf_counter() - start)
    return best / max(1, steps)


Trial = tuple[TrainTask, list[int]]


def _trial(engine: LoopEngine, clients: int, batches: int) -> Trial:
    """A small task on the clients that hold most, with what the first two of them share."""
    setup, method = engine.setup, engine.setup.experiment.method
    most = batches * setup.experiment.train.batch_size
    full = setup.sizes(0)
    largest = np.argsort(-full, kind="stable")[:clients]
    repeated = [int(largest[i % len(largest)]) for i in range(clients)]
    sizes = np.minimum(full, most)
    pool = None
    if method.objective.needs:
        entries = gather(dict(engine.share(0, setup.weights(), repeated[:2], full)))
        pool = method.sharing.pool(entries, stream(setup.experiment.seed, "trial"))
    weights, spec = setup.weights(), model_spec(setup, setup.model)
    states = {client: first_client_state(method, spec, weights) for client in repeated}
    server_state = first_server_state(method, spec, weights, broadcast=True)
    task = TrainTask(0, weights, pool, sizes, client_states=states, server_state=server_state)
    return task, repeated


def _train(engine: LoopEngine, trial: Trial) -> int:
    """Train a trial's clients; returns how many steps that took."""
    task, clients = trial
    for _ in engine.train(task, clients):
        pass
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    train = engine.setup.experiment.train
    return sum(train.steps_of(int(task.sizes[client])) for client in clients)


def _steps_a_round(setup: Setup) -> float:
    """Steps of all clients in a round, on average."""
    train, sizes = setup.experiment.train, setup.population.sizes
    if train.steps:
        return float(train.cohort * train.steps)
    return float(train.cohort * train.epochs * np.ceil(sizes[sizes > 0] / train.batch_size).mean())
