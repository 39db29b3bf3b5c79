"""Choice of the engine, the stack size and the number of ranks: from the experiment, or by timing a few steps."""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from fedblend._kernels import build
from fedblend.core import registry
from fedblend.core.engine import ClientUpdate, TrainTask, first_client_state, first_server_state
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool, gather
from fedblend.engines.loop import LoopEngine
from fedblend.engines.sgd import allow_tf32
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.layers import CannotStack, own_layers, own_ways, prepare_model
from fedblend.engines.stacked.step import layer_step

MIN_SECONDS_TO_TUNE = 20.0
"""Estimated seconds of a run below which tuning takes longer than it saves."""

MIN_SECONDS_FOR_RANKS = 60.0
"""Estimated seconds of a run from which further ranks save time; each imports PyTorch and reads the data."""

MAX_STEP_RATIO = 0.95
"""Largest ratio of an engine's step time to the loop's at which the engine replaces the loop; above is noise."""

TOLERANCE = {"float32": 0.02, "tf32": 0.05, "bfloat16": 0.3}
"""Largest relative difference between the updates of the stacked engine and the loop in a trial, by precision."""

TRIAL_BATCHES = 3
"""Batches per epoch in a trial."""

TRIAL_EPOCHS = 4
"""Largest number of local epochs in a trial."""

CPU_STACKS = (4, 8, 16)
"""Stack sizes to time on CPUs; larger stacks exceed the caches."""

TIMED_CLIENTS = 2
"""Most clients of a stack on which single layers are timed."""

LAYER_TURNS = 3
"""Times that each layer is timed in each way."""

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
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.track_running_stats:
            return f"its layer '{name}' is a batch norm with running statistics, which every batch changes"
        if isinstance(layer, nn.RNNBase):
            return f"its layer '{name}' is a fused {type(layer).__name__}, which PyTorch cannot stack (see model lstm)"
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.padding_idx is not None:
            return f"its layer '{name}' has a padding_idx, which PyTorch ignores in a stack"
    for name, first in setup.twins.items():
        return f"its '{first}' and '{name}' are one tensor"
    if not setup.experiment.train.optimizer.stacks:
        return f"the optimizer '{setup.experiment.train.optimizer.path}' is one of the loop engine's"
    setup = _with_short_training(setup, by_sgd=True)
    loop = LoopEngine(setup, setup.experiment.device)
    trial = _trial(loop, 2, batches=1)
    try:
        updates = list(StackedEngine(setup, setup.experiment.device, 2).train(*trial))
    except CannotStack as error:
        return str(error)
    except Exception as error:
        # An error of the objective or the model occurs in the loop too, and is raised there with client and batch.
        _train(loop, trial)
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
        in_stack, in_loop = ({name: u.weights[name].double() - start[name] for name in start} for u in pair)
        total_norm = torch.stack([change.norm() for change in in_loop.values()]).norm()
        for name, change in in_loop.items():
            if (in_stack[name] - change).norm() > tolerance * change.norm() + 0.01 * tolerance * total_norm:
                return f"its '{name}' would train differently in a stack than in the loop engine"
    return ""


def plan_engine(setup: Setup, processors: int, rounds: int) -> EnginePlan:
    """Choose the engine for ``rounds`` rounds on ``processors`` CPU cores of this machine.

    Settings of the experiment are kept; the others are chosen by timing a few steps of each candidate.
    """
    experiment = setup.experiment
    allow_tf32(experiment.precision)
    ranks, short = experiment.ranks, _with_short_training(setup)
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
    timings = _time_candidates(short, loop, step, ranks)
    listed = "; ".join(f"{_label(candidate)} {1000 * seconds:.2f}" for candidate, seconds in timings)
    return replace(_fastest(short, timings), why=f"milliseconds per client step: {listed}")


def _with_short_training(setup: Setup, by_sgd: bool = False) -> Setup:
    """Return the setup with fewer local steps, enough to time one step; or to compare engines, ``by_sgd``.

    Adam would turn rounding errors of gradients that are 0 into steps.
    """
    train = setup.experiment.train
    fewer: dict[str, Any] = {"epochs": min(train.epochs, TRIAL_EPOCHS)}
    if by_sgd and not train.optimizer.is_sgd:
        fewer |= {"optimizer": registry.build("optimizer", "sgd"), "optimizer_state": "reset"}
    if train.steps:
        fewer["steps"] = min(train.steps, TRIAL_EPOCHS * TRIAL_BATCHES)
    shortened = setup.experiment.model_copy(update={"train": train.model_copy(update=fewer)})
    return replace(setup, experiment=shortened)


def _label(plan: EnginePlan) -> str:
    if plan.engine == "stacked":
        return f"{plan.stack} stacked" + (" without kernels" if plan.kernels == {} else "")
    return "loop" if plan.memory_format == "contiguous" else f"loop, {plan.memory_format}"


def _time_candidates(setup: Setup, loop: LoopEngine, step: float, ranks: int) -> list[tuple[EnginePlan, float]]:
    """Return every valid plan with its seconds per client step; ``step`` is the loop engine's."""
    experiment = setup.experiment
    timings = []
    if experiment.memory_format != "channels_last":
        timings.append((EnginePlan("loop", None, ranks, "contiguous", ""), step))
    if experiment.memory_format != "contiguous" and any(isinstance(m, nn.Conv2d) for m in setup.model.modules()):
        other = LoopEngine(setup, experiment.device, "channels_last")
        timings.append((EnginePlan("loop", None, ranks, "channels_last", ""), seconds_per_step(other, 1)))
    if not unstackable(setup):
        faster: dict[int, dict[str, str] | None] = {}
        for stack in _stacks(setup, ranks):
            clients = min(stack, TIMED_CLIENTS)
            if clients not in faster:
                faster[clients] = faster_kernels(setup, clients)
            timings.append(_timed(setup, EnginePlan("stacked", stack, ranks, "contiguous", "", faster[clients])))
        fastest = min((plan for plan in timings if plan[0].engine == "stacked"), key=lambda timing: timing[1])[0]
        if fastest.kernels:
            timings.append(_timed(setup, replace(fastest, kernels={})))
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


def faster_kernels(setup: Setup, clients: int) -> dict[str, str] | None:
    """Return the layers that fedblend's kernels compute faster than PyTorch in a stack of ``clients``, with the way.

    Each layer is timed alone, with its derivatives, on the shapes of a training batch. ``None`` where kernels cannot be
    used, or the precision is not float32: the default rule then holds.
    """
    experiment = setup.experiment
    if experiment.device != "cpu" or experiment.precision != "float32" or build.library() is None:
        return None
    model = prepare_model(setup.model, torch.device("cpu"), kernels={})
    samples = setup.data.train.x[: experiment.train.batch_size]
    chosen: dict[str, str] = {}
    timed: dict[tuple[Any, ...], str] = {}
    for name, x in _inputs_of(model, own_layers(model), setup.scale(samples)).items():
        layer = model.get_submodule(name)
        kind = (repr(layer), x.shape, x.requires_grad)
        if kind not in timed:
            stacked = x.detach().expand(clients, *x.shape).contiguous()
            ways = {"pytorch": layer, **own_ways(layer)}
            seconds = _seconds_in_turn([layer_step(way, stacked, x.requires_grad) for way in ways.values()])
            # As with engines: what is not clearly faster is noise.
            seconds[0] *= MAX_STEP_RATIO
            timed[kind] = min(zip(seconds, ways, strict=True))[1]
        if timed[kind] != "pytorch":
            chosen[name] = timed[kind]
    return chosen


def _inputs_of(model: nn.Module, names: Sequence[str], samples: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return each layer's first batch of images in a pass; it requires a gradient behind a trained layer."""
    inputs: dict[str, torch.Tensor] = {}
    hooks = []
    for name in names:

        def note(_: nn.Module, given: tuple[torch.Tensor], name: str = name) -> None:
            if given[0].dim() == 4:
                inputs.setdefault(name, given[0])

        hooks.append(model.get_submodule(name).register_forward_pre_hook(note))
    model(samples)
    for hook in hooks:
        hook.remove()
    return inputs


def _seconds_in_turn(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the least seconds of each call; all have their turn one after another, and the first turn warms up."""
    least = [math.inf] * len(calls)
    for turn in range(LAYER_TURNS + 1):
        for i, call in enumerate(calls):
            start = _clock()
            call()
            if turn:
                least[i] = min(least[i], _clock() - start)
    return least


def _clock() -> float:
    """Return seconds; on one thread, the thread's own, so that other processes change the choice less."""
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


def _stacks(setup: Setup, ranks: int) -> list[int]:
    """Return the stack sizes to time: at most a rank's share of the cohort, and what fits into memory.

    A larger cohort is cut into several stacks. The memory of one client's step is measured.
    """
    experiment = setup.experiment
    if experiment.stack:
        return [experiment.stack]
    one = StackedEngine(setup, experiment.device, 1)
    _train(one, _trial(one, 1, batches=1))
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


def seconds_per_step(engine: LoopEngine, clients: int) -> float:
    """Return the seconds per client step: the best of three trials on ``clients`` clients, after one that traces."""
    task = _trial(engine, clients, TRIAL_BATCHES)
    steps = _train(engine, task)
    clock = time.perf_counter if engine.device.type == "cuda" else _clock
    best = math.inf
    for _ in range(3):
        start = clock()
        _train(engine, task)
        best = min(best, clock() - start)
    return best / max(1, steps)


Trial = tuple[TrainTask, list[int]]
"""A task, and the clients to train."""


def _trial(engine: LoopEngine, clients: int, batches: int) -> Trial:
    """Return a small task on the largest clients, with a pool of what some of the largest clients share."""
    setup, method = engine.setup, engine.setup.experiment.method
    most = batches * setup.experiment.train.batch_size
    full = setup.sizes(0)
    largest = np.argsort(-full, kind="stable")[:clients]
    repeated = [int(largest[i % len(largest)]) for i in range(clients)]
    sizes = np.minimum(full, most)
    pool = _trial_pool(engine) if method.objective.needs else None
    weights, spec = setup.weights(), model_spec(setup, setup.model)
    train = setup.experiment.train
    states = {client: first_client_state(method, train, spec, weights) for client in repeated}
    server_state = first_server_state(method, spec, weights, broadcast=True)
    task = TrainTask(0, weights, pool, sizes, client_states=states, server_state=server_state)
    return task, repeated


def _trial_pool(engine: LoopEngine) -> Pool:
    """Return the pool of the largest two clients that share something, or of as many as the server averages."""
    setup, sharing = engine.setup, engine.setup.experiment.method.sharing
    sizes = setup.sizes(0)
    others = np.argsort(-sizes, kind="stable")
    others = others[others != sharing.server]
    asked = [] if sharing.made_by_server else others.tolist()
    shared = engine.share(0, setup.weights(), asked, sizes)
    payloads = dict(islice(shared, max(2, getattr(sharing, "server_average", 1))))
    told = sizes.copy()
    told[np.setdiff1d(others, [*payloads])] = 0
    spec, rng = model_spec(setup, setup.model), stream(setup.experiment.seed, "trial")
    return setup.pool_for_clients(setup.pool(spec, gather(payloads), told, rng))


def _train(engine: LoopEngine, trial: Trial) -> int:
    """Train a trial's clients; return the number of steps."""
    task, clients = trial
    for _ in engine.train(task, clients):
        pass
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    train = engine.setup.experiment.train
    return sum(train.batches_of(int(task.sizes[client])) for client in clients)


def _steps_a_round(setup: Setup) -> float:
    """Return the mean number of steps of all clients in a round."""
    train, sizes = setup.experiment.train, setup.population.sizes
    if train.steps:
        return float(train.cohort * train.steps)
    return float(train.cohort * train.epochs * np.ceil(sizes[sizes > 0] / train.batch_size).mean())
