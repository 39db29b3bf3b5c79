"""Where a stacked step's time goes: one process, one thread, by kind of operation.

    python benchmarks/profile_step.py [--job A] [--stack 5] [--isa avx2] [--out benchmarks/results]

Each layer is computed in the way that is the fastest when it is timed alone, as `auto` does.

Whole steps are timed as they are run, and in turn with them the same steps operation by operation, each under a
clock; what the operations do not account for is Python between them. Floating point operations are counted from
shapes: two for each multiplication and addition of a convolution (padding included) or matrix product, one for each
element of anything else. The peak is that of a large matrix product, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import machine
import torch
from contestants import HERE, STACKS
from rich.console import Console
from rich.table import Table
from rounds import write_job
from torch import fx

from fedblend.experiment.make_setup import make_setup

sys.path.append(str(HERE / "peers"))

from fedblend_job import table_of
from jobs import Job, load

from fedblend._kernels.operators import RAW
from fedblend.core.engine import TrainTask
from fedblend.engines.autotune import TIMED_CLIENTS, inner_engine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.schedule import Stack
from fedblend.engines.stacked.step import Inputs, Program
from fedblend.engines.trials import faster_kernels
from fedblend.experiment.config import resolve

PEAK_SIZE = 1024
"""Rows and columns of the matrices whose product gives the peak."""

REPEATS = 5
"""Times that a stack's steps are made in each way."""

OURS, LIBRARY, POOLS, PRODUCTS = "convolutions, ours", "convolutions, PyTorch's", "max pools", "matrix products"
POINTWISE, VIEWS, UPDATE, GATHER, PYTHON = "pointwise, sums", "views", "SGD update", "gathering", "Python between"
KINDS = (OURS, LIBRARY, POOLS, PRODUCTS, POINTWISE, VIEWS, UPDATE, GATHER, PYTHON)

LOOKS = ("view", "permute", "transpose", "squeeze", "expand", "detach", "getitem", "slice", "select", "t.default")
"""Words in the names of operations that only look at the same numbers."""


def kind_of(target: Callable[..., Any]) -> str:
    """The kind of an operation, by its name."""
    name = str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))
    if name.startswith("run_conv"):
        return OURS
    if "pool" in name or target in RAW.values():
        return POOLS
    if "conv" in name:
        return LIBRARY
    if "mm" in name.split(".")[-2:][0] or name == "run_dense":
        return PRODUCTS
    return VIEWS if any(word in name for word in LOOKS) else POINTWISE


def flop_of(target: Callable[..., Any], arguments: tuple[Any, ...], made: Any) -> int:
    """Floating point operations of a call."""
    kind, tensors = kind_of(target), [a for a in arguments if isinstance(a, torch.Tensor)]
    if kind == OURS:
        return conv_flop(target.__name__, tensors[0], tensors[1], arguments[2:])
    if kind == LIBRARY:
        return library_flop(tensors, arguments)
    if kind == PRODUCTS:
        a, b = tensors[-2:]
        return product_flop(a, b)
    if kind == VIEWS:
        return 0
    results = [m for m in (made if isinstance(made, tuple | list) else [made]) if isinstance(m, torch.Tensor)]
    return max(t.numel() for t in (*tensors, *results)) if tensors else 0


def conv_flop(name: str, first: torch.Tensor, second: torch.Tensor, last: tuple[Any, ...]) -> int:
    """Of a form of our convolution: output places x channels in x kernel, the same for all three forms."""
    if name in ("run_conv", "run_conv_pool"):
        *_, height, width = first.shape
        _, out, channels, kh, kw = second.shape
        grow = 2 * last[0]
        places = first.shape[0] * first.shape[1] * out * (height + grow - kh + 1) * (width + grow - kw + 1)
        return 2 * places * channels * kh * kw
    # Gradients of pooled outputs are a quarter of those of the outputs.
    pooled = 4 if isinstance(last[-1], torch.Tensor) else 1
    if name == "run_conv_input":
        return 2 * pooled * first.numel() * math.prod(second.shape[2:])
    # The gradient of the weights: of x and of what came out, for a kernel of the two sizes after the padding.
    return 2 * pooled * second.numel() * first.shape[2] * math.prod(last[1:3])


def library_flop(tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> int:
    """Of PyTorch's grouped convolution, or of both its derivatives."""
    backward = tensors[0].dim() == tensors[1].dim() and len(tensors) > 2 and tensors[2].dim() == tensors[0].dim()
    if backward:
        return 4 * tensors[0].numel() * math.prod(tensors[2].shape[1:])
    x, w = tensors[:2]
    places = math.prod(x.shape[2:]) * x.shape[0] * w.shape[0]
    return 2 * places * math.prod(w.shape[1:])


def product_flop(a: torch.Tensor, b: torch.Tensor) -> int:
    """Of a product of matrices, or of stacks of them."""
    return 2 * a.numel() * b.shape[-1]


@dataclass
class Clock:
    """Seconds and floating point operations of every call of a step, by kind and place."""

    seconds: dict[tuple[str, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    flop: dict[tuple[str, int], int] = field(default_factory=dict)

    def note(self, kind: str, place: int, seconds: float, flop: int = 0) -> None:
        """Add a call."""
        self.seconds[kind, place].append(seconds)
        self.flop[kind, place] = flop

    def by_kind(self) -> dict[str, dict[str, float]]:
        """Calls, microseconds and floating point operations of a step by kind; medians over steps, call by call."""
        found: dict[str, dict[str, float]] = {}
        for (kind, place), values in self.seconds.items():
            one = found.setdefault(kind, {"calls": 0, "us": 0.0, "flop": 0})
            one["calls"] += 1
            one["us"] += 1e6 * statistics.median(values)
            one["flop"] += self.flop[kind, place]
        return found


class Clocked(fx.Interpreter):
    """A traced step, run operation by operation under a clock."""

    def __init__(self, graph: fx.GraphModule, clock: Clock) -> None:
        super().__init__(graph)
        self.clock, self.place = clock, 0

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        begun = time.perf_counter()
        made = target(*args, **kwargs)
        seconds = time.perf_counter() - begun
        self.place += 1
        self.clock.note(kind_of(target), self.place, seconds, flop_of(target, args, made))
        return made


class ClockedProgram(Program):
    """Stands in for a program of the engine's."""

    def __init__(self, program: Program, clock: Clock) -> None:
        super().__init__(program.graph, program.bytes, program.low_rank)
        self.clock = clock

    @torch.no_grad()
    def __call__(self, inputs: Inputs) -> tuple[list[Any], list[torch.Tensor]]:
        results = Clocked(self.graph, self.clock).run(*torch.utils._pytree.tree_leaves(inputs.tree()))
        return list(results[: len(inputs.params)]), list(results[len(inputs.params) :])


def update_flop(gradients: list[Any]) -> int:
    """Of plain SGD: two for each weight, or products of matrices that are added to the weights."""
    pairs = [pair for gradient in gradients if isinstance(gradient, tuple) for pair in gradient]
    plain = [gradient for gradient in gradients if isinstance(gradient, torch.Tensor)]
    return sum(product_flop(*pair) for pair in pairs) + 2 * sum(gradient.numel() for gradient in plain)


def clocked_update(stack: Stack, clock: Clock) -> None:
    """Put the stack's optimizer under the clock."""
    optimizer = stack.trainer.optimizer
    plain = optimizer.step

    def step(params: Any, velocity: Any, gradients: Any, *more: Any) -> None:
        begun = time.perf_counter()
        plain(params, velocity, gradients, *more)
        clock.note(UPDATE, 0, time.perf_counter() - begun, update_flop(gradients))

    optimizer.step = step  # type: ignore


def clocked_gather(stack: Stack, step: int, clock: Clock) -> None:
    """Gather a step's batch once more, as the stack does, under the clock."""
    rows = slice(0, len(stack.clients))
    begun = time.perf_counter()
    places = stack.rows[rows].gather(1, stack.firsts[rows, step, None] + stack.offsets[stack.full])
    _ = [half.index_select(0, places.view(-1)).unflatten(0, places.shape) for half in (stack.x, stack.y)]
    clock.note(GATHER, 0, time.perf_counter() - begun)


def peak() -> float:
    """GFLOP/s of a large product of float32 matrices, at its best."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE)
    best = math.inf
    for _ in range(20):
        begun = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - begun)
    return 2 * PEAK_SIZE**3 / best / 1e9


def engine_of(job: Job, path: Path, stack: int) -> StackedEngine:
    """A stacked engine on the job."""
    setup = make_setup(resolve(table_of(job.settings, str(path), False)))
    kernels = faster_kernels(setup, min(stack, TIMED_CLIENTS))
    plan = {"engine": "stacked", "stack": stack, "memory_format": "contiguous", "kernels": kernels}
    made = inner_engine(setup, plan)
    assert isinstance(made, StackedEngine)
    return made


def profiled(engine: StackedEngine, clients: list[int]) -> tuple[list[float], Clock]:
    """Seconds of whole steps as they are, and in turn with them the calls of the same steps under a clock."""
    task = TrainTask(0, engine.setup.weights(), None, engine.setup.sizes(0))
    given = [engine.assign(task, client) for client in clients]
    whole_steps(Stack(engine, task, given))
    whole, clock, plain = [], Clock(), engine.programs
    for _ in range(REPEATS):
        engine.programs = plain
        whole += whole_steps(Stack(engine, task, given))
        engine.programs = {key: ClockedProgram(made, clock) for key, made in plain.items()}
        clocked_steps(Stack(engine, task, given), clock)
    return whole, clock


def whole_steps(stack: Stack) -> list[float]:
    """Make all steps of a stack; returns the seconds of each."""
    seconds = []
    for step in range(stack.steps):
        begun = time.perf_counter()
        stack._step(step)
        seconds.append(time.perf_counter() - begun)
    return seconds


def clocked_steps(stack: Stack, clock: Clock) -> None:
    """Make all steps of a stack under a clock."""
    clocked_update(stack, clock)
    for step in range(stack.steps):
        clocked_gather(stack, step, clock)
        stack._step(step)


def told_of(whole: list[float], clock: Clock) -> dict[str, Any]:
    """All figures of a step."""
    kinds = clock.by_kind()
    us = 1e6 * statistics.median(whole)
    rest = us - sum(one["us"] for one in kinds.values())
    kinds[PYTHON] = {"calls": 0, "us": max(0.0, rest), "flop": 0}
    total = {key: sum(one[key] for one in kinds.values()) for key in ("calls", "flop")}
    return {"kinds": {kind: kinds[kind] for kind in KINDS if kind in kinds}, "whole": {**total, "us": us}}


def show(found: dict[str, Any]) -> None:
    """Print the table, one row a kind of operation."""
    table = Table("kind", "calls", "us a step", "share", "MFLOP", "GFLOP/s", "of the peak")
    for kind, one in [*found["kinds"].items(), ("whole step", found["whole"])]:
        us, flop = one["us"], one["flop"]
        rate = flop / 1e3 / us if flop else 0.0
        counted = [f"{flop / 1e6:.1f}", f"{rate:.1f}", f"{rate / found['peak_gflops']:.0%}"] if flop else []
        table.add_row(kind, f"{one['calls']:g}", f"{us:.0f}", f"{us / found['whole']['us']:.0%}", *counted)
    Console().print(table)


def main() -> None:
    """Profile, print the table, and write the figures where asked to."""
    parser = argparse.ArgumentParser(description="Profile a stacked step.")
    parser.add_argument("--job", choices=sorted(STACKS), default="A")
    parser.add_argument("--stack", type=int, help="clients in the stack (default: a rank's share of the job's cohort)")
    machine.add_option(parser)
    parser.add_argument("--out", type=Path, help="folder for the figures (profile-PROCESSOR-JOB.json)")
    given = parser.parse_args()
    machine.limit(given.isa)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
    given.stack = given.stack or STACKS[given.job][-1]
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = write_job(given.job, Path(folder) / f"{given.job}.npz")
        job = load(path)
        engine = engine_of(job, path, given.stack)
    rates = [peak()]
    whole, clock = profiled(engine, job.cohort(0)[: given.stack])
    rates.append(peak())
    found = {
        **machine.when_and_where(),
        "job": given.job,
        "stack": given.stack,
        "steps": len(whole),
        "peak_size": PEAK_SIZE,
        "peak_gflops": max(rates),
        **told_of(whole, clock),
    }
    show(found)
    if given.out:
        (given.out / f"profile-{machine.kind()}-{given.job}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
