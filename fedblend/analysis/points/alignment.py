"""Alignment: the cosine between the gradients on points and on the clients' samples (AggEnhance, equation 9).

If it is not negative, training on the points lowers the loss on the samples, to first order. The loss is the mean
cross-entropy, the gradient is of all trainable weights, and the model is in evaluation mode. A checkpoint has only the
last model, so that a run is repeated for the alignment in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from fedblend.analysis.points.loaded_run import Batches, LoadedRun, Points, client_batches, with_weights
from fedblend.core.callbacks import Callback
from fedblend.core.engine import CohortResult, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.module import evaluating
from fedblend.core.setup import Setup
from fedblend.runs.runner import first_weights, repeating

Row = dict[str, float]


def alignment_by_round(loaded_run: LoadedRun) -> dict[int, float]:
    """Return the alignment of each round's points with all clients' samples, at the run's last model."""
    model, points = loaded_run.model(), loaded_run.points
    real = gradient(model, client_batches(loaded_run.setup))
    scale = loaded_run.setup.scale
    return {round: cosine(gradient(model, points.made_in(round).batches(scale)), real) for round in points.all_rounds()}


def gradient(model: nn.Module, batches: Batches) -> torch.Tensor:
    """Return the gradient of the mean cross-entropy over all batches, as one float64 vector."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros(sum(p.numel() for p in trainable), dtype=torch.float64)
    count = 0
    with evaluating(model):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y, reduction="sum")
            gradients = torch.autograd.grad(loss, trainable, allow_unused=True, materialize_grads=True)
            total += torch.cat([g.flatten().double() for g in gradients])
            count += len(y)
    return total / max(1, count)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the cosine between two vectors; NaN if one of them is zero."""
    length = float(a.norm() * b.norm())
    return float(a @ b) / length if length else math.nan


# In every round ------------------------------------------------------------------------------------------------


class KeepAggregate(Callback):
    """Keeps the aggregate of the last round, before the server step."""

    def __init__(self, loop: RoundLoop) -> None:
        self.loop = loop
        self.aggregate: Mapping[str, torch.Tensor] = {}

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        self.aggregate, _ = self.loop.server.mean(task, result)


def replay(
    loop: RoundLoop,
    rounds: int,
    on_round: Callable[[Row], None] | None = None,
    first: dict[str, torch.Tensor] | None = None,
) -> list[Row]:
    """Repeat a run's rounds, and measure the alignment of equation 9 in each, at the aggregate before the server step.

    Returns a row for each round from the first with points on: ``round`` from 1, ``points`` their number, ``alignment``
    the cosine between the gradients on all points so far and on all clients' samples at the aggregate,
    ``alignment_new`` the same of the round's own points alone (NaN in a round without good uploads, which makes none),
    and the model's test ``accuracy`` after the server step, where it was evaluated. ``first`` are weights of a warm
    start. Raises :class:`FedblendError` if the server step generates no points.
    """
    kept, rows = KeepAggregate(loop), list[Row]()
    watched = RoundLoop(loop.setup, loop.engine, [kept])
    state, _ = watched.start(first)
    for _ in range(rounds):
        state, record = watched.round(state)
        points = Points.from_server_state(state.server_part("server_step"))
        if points is None:
            if record.uploads:
                raise FedblendError(f"method.server_step: '{loop.method.server_step.name}' makes no points")
            continue
        row = {"round": state.round, **_measure_alignment(loop.setup, kept.aggregate, points, state.round)}
        rows.append(row | ({} if record.accuracy is None else {"accuracy": record.accuracy}))
        if on_round:
            on_round(rows[-1])
    return rows


def _measure_alignment(setup: Setup, aggregate: Mapping[str, torch.Tensor], points: Points, round: int) -> Row:
    model, new = with_weights(setup.model, aggregate), points.made_in(round)
    real = gradient(model, client_batches(setup))
    return {
        "points": len(points),
        "alignment": cosine(gradient(model, points.batches(setup.scale)), real),
        "alignment_new": cosine(gradient(model, new.batches(setup.scale)), real) if len(new) else math.nan,
    }


def replay_run(loaded_run: LoadedRun, on_round: Callable[[Row], None] | None = None) -> list[Row]:
    """Repeat all rounds of a run in this process, with its engine; see :func:`replay`."""
    directory, setup = loaded_run.directory, loaded_run.setup
    with repeating(directory, setup) as loop:
        return replay(loop, loaded_run.state.round, on_round, first_weights(setup, directory.path))
