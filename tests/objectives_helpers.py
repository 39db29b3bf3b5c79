"""What several tests of objectives take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from helpers import engine_of
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import Task
from fedblend.core.engine import ClientUpdate, TrainTask
from fedblend.core.setup import Setup
from fedblend.core.sharing import Pool

CLASSES = Task("classification", 3)


NUMBERS = Task("regression", 3)


def draws(task: Task, n: int, seed: int, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets in float64 (classes as indices)."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=rng, dtype=torch.float64)
    if task.kind == "regression":
        return x, torch.randn(n, task.outputs, generator=rng, dtype=torch.float64)
    return x, torch.randint(task.outputs, (n,), generator=rng)


def one_hot(y: torch.Tensor) -> torch.Tensor:
    """Labels as rows of one 1."""
    return F.one_hot(y, 3).double()


def mean_pool(task: Task, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """One entry: the mean of raw samples."""
    targets = y if task.kind == "regression" else F.one_hot(y, task.outputs).double()
    return {"x": x.mean(0, keepdim=True), "y": targets.mean(0, keepdim=True)}


def random_pool(task: Task, entries: int = 1, seed: int = 5, width: int = 5) -> dict[str, torch.Tensor]:
    """Entries as other clients would send them, in float64."""
    pools = [mean_pool(task, *draws(task, 4, seed + i, width)) for i in range(entries)]
    return {name: torch.cat([p[name] for p in pools]) for name in ("x", "y")}


def train_all(made: Setup, pool: Pool | None) -> Iterable[ClientUpdate]:
    """Train all clients of a world for one round from its first weights."""
    task = TrainTask(0, made.weights(), pool, made.sizes(0))
    return engine_of(made).train(task, range(len(made.population)))


def step_of_sgd(model: nn.Module, loss: torch.Tensor, lr: float) -> None:
    """Move the weights of a module against their gradients."""
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= lr * gradient
