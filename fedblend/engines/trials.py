"""Timed trials: a few training steps of an engine on the largest clients, and single layers of a stack."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from fedblend._kernels.kernel_layers import own_layers, own_ways
from fedblend._kernels.operators import are_usable
from fedblend.core import registry
from fedblend.core.engine import TrainTask, first_client_state, first_server_state
from fedblend.core.random import stream
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool, gather
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.layers import prepare_model
from fedblend.engines.stacked.step import layer_step

MAX_STEP_RATIO = 0.95
"""Largest ratio of a time to the time it is compared with, the loop engine's or PyTorch's, that counts as faster."""

TRIAL_BATCHES = 3
"""Batches per epoch in a trial."""

TRIAL_EPOCHS = 4
"""Largest number of local epochs in a trial."""

LAYER_TURNS = 3
"""Times that each layer is timed in each way."""

Trial = tuple[TrainTask, list[int]]
"""A task, and the clients to train."""


def seconds_per_step(engine: LoopEngine, clients: int, batches: int = TRIAL_BATCHES, limit: float = math.inf) -> float:
    """Return the seconds per client step: the best of three trials on ``clients`` clients, after one that traces.

    After ``limit`` seconds no further trial begins.
    """
    task, end = make_trial(engine, clients, batches), time.monotonic() + limit
    clock, found = _clock_of(engine.device), []
    for _ in range(4):
        start = clock()
        steps = train_trial(engine, task)
        found.append(clock() - start)
        if time.monotonic() >= end:
            break
    return min(found[1:] or found) / max(1, steps)


def with_short_training(setup: Setup, by_sgd: bool = False, epochs: int = TRIAL_EPOCHS) -> Setup:
    """Return the setup with fewer local steps, enough to time one step; or to compare engines, ``by_sgd``.

    Adam would turn rounding errors of gradients that are 0 into steps.
    """
    train = setup.experiment.train
    fewer: dict[str, Any] = {"epochs": min(train.epochs, epochs)}
    if by_sgd and train.optimizer.steps != "sgd":
        fewer |= {"optimizer": registry.build("optimizer", "sgd"), "optimizer_state": "reset"}
    if train.steps:
        fewer["steps"] = min(train.steps, epochs * TRIAL_BATCHES)
    shortened = setup.experiment.model_copy(update={"train": train.model_copy(update=fewer), "slow": None})
    return replace(setup, experiment=shortened)


def make_trial(engine: LoopEngine, clients: int, batches: int) -> Trial:
    """Return a small task on the largest clients, with a pool of what some of the largest clients share."""
    setup, method = engine.setup, engine.setup.method
    most = batches * setup.training.batch_size
    full = setup.sizes(0)
    largest = np.argsort(-full, kind="stable")[:clients]
    repeated = [int(largest[i % len(largest)]) for i in range(clients)]
    sizes = np.minimum(full, most)
    pool = _trial_pool(engine) if method.objective.needs else None
    weights, spec = setup.weights(), model_spec(setup, setup.model)
    train = setup.training
    states = {client: first_client_state(method, train, spec, weights) for client in repeated}
    server_state = first_server_state(method, spec, weights, broadcast=True)
    task = TrainTask(0, weights, pool, sizes, client_states=states, server_state=server_state)
    return task, repeated


def _trial_pool(engine: LoopEngine) -> Pool:
    """Return the pool of the largest two clients that share something, or of as many as the server averages."""
    setup, sharing = engine.setup, engine.setup.method.sharing
    sizes = setup.sizes(0)
    others = np.argsort(-sizes, kind="stable")
    others = others[others != sharing.server]
    asked = [] if sharing.plan.who == "server" else others.tolist()
    shared = engine.share(0, setup.weights(), asked, sizes)
    payloads = dict(islice(shared, max(2, getattr(sharing, "server_average", 1))))
    shared_sizes = sizes.copy()
    shared_sizes[np.setdiff1d(others, [*payloads])] = 0
    spec, rng = model_spec(setup, setup.model), stream(setup.experiment.seed, "trial")
    return setup.pool_for_clients(setup.pool(spec, gather(payloads), shared_sizes, rng))


def train_trial(engine: LoopEngine, trial: Trial) -> int:
    """Training a trial's clients; return the number of steps."""
    task, clients = trial
    for _ in engine.train(task, clients):
        pass
    if engine.device.type == "cuda":
        torch.cuda.synchronize(engine.device)
    train = engine.setup.training
    return sum(train.batches_of(int(task.sizes[client])) for client in clients)


def faster_kernels(setup: Setup, clients: int) -> dict[str, str] | None:
    """Return the layers that fedblend's kernels compute faster than PyTorch in a stack of ``clients``, with the way.

    Each layer is timed alone, with its derivatives, on the shapes of a training batch. ``None`` where kernels cannot be
    used, or the layers' precision is not that of the kernels: the default rule then holds.
    """
    experiment, device = setup.experiment, torch.device(setup.experiment.device)
    timed_precisions = ("float32",) if device.type == "cpu" else ("float32", "tf32")
    if experiment.precision not in timed_precisions or not are_usable(device):
        return None
    model = prepare_model(setup.model, device, kernels={})
    samples = setup.scale(setup.data.train.x[: experiment.train.batch_size]).to(device)
    chosen: dict[str, str] = {}
    timed: dict[tuple[Any, ...], str] = {}
    for name, x in _inputs_of(model, own_layers(model), samples).items():
        layer = model.get_submodule(name)
        kind = (repr(layer), x.shape, x.requires_grad)
        if kind not in timed:
            stacked = x.detach().expand(clients, *x.shape).contiguous()
            ways = {"pytorch": layer, **own_ways(layer, device)}
            calls = [layer_step(way, stacked, x.requires_grad) for way in ways.values()]
            seconds = _seconds_in_turn(calls, device)
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


def _seconds_in_turn(calls: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Return the least seconds of each call; all have their turn one after another, and the first turn warms up."""
    least, clock = [math.inf] * len(calls), _clock_of(device)
    for turn in range(LAYER_TURNS + 1):
        for i, call in enumerate(calls):
            start = clock()
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                least[i] = min(least[i], clock() - start)
    return least


def _clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock; on one thread of a CPU, the thread's own, so that other processes change the choice less."""
    alone = device.type != "cuda" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter
