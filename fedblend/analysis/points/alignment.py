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

from fedblend.analysis.points.loaded_run import (
    CHUNK,
    POINTS,
    Batches,
    LoadedRun,
    Points,
    client_batches,
    with_weights,
)
from fedblend.core.callbacks import Callback
from fedblend.core.engine import CohortResult, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.module import evaluating
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.runs.runner import first_weights, repeating

Row = dict[str, float]


def alignment_by_round(loaded_run: LoadedRun) -> dict[int, float]:
    """Return the alignment of each round's points with all clients' samples, at the run's last model."""
    model, points = loaded_run.model(), loaded_run.points
    real = gradient(model, loaded_run.client_batches())
    x = loaded_run.scale.from_unit(points.x)
    by_round: dict[int, float] = {}
    for round in points.all_rounds():
        rows = points.rounds == round
        by_round[round] = cosine(gradient(model, chunks(x[rows], points.labels[rows])), real)
    return by_round


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


def chunks(x: torch.Tensor, y: torch.Tensor) -> Batches:
    """Split samples and classes into chunks."""
    return zip(x.split(CHUNK), y.split(CHUNK), strict=True)


# In every round ------------------------------------------------------------------------------------------------


class AlignmentProbe(Callback):
    """Measure the alignment of equation 9 in each round, at the aggregate before the server step.

    ``rows`` has a row for each round from the first with points on: ``round`` from 1, ``points`` their number,
    ``alignment`` the cosine between the gradients on all points so far and on all clients' samples at the aggregate,
    ``alignment_new`` the same of the round's own points alone (NaN in a round without good uploads, which makes none),
    and the model's test ``accuracy`` after the server step, where it was evaluated.
    """

    def __init__(self, loop: RoundLoop, on_round: Callable[[Row], None] | None = None) -> None:
        self.loop, self.on_round = loop, on_round
        self.rows: list[Row] = []
        self.aggregate: Mapping[str, torch.Tensor] = {}

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        self.aggregate, _ = self.loop.server.mean(task, result)

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Measure the alignment. Raises :class:`FedblendError` if the server step generates no points."""
        step_state, setup = state.server_part("server_step"), self.loop.setup
        if not set(POINTS) <= set(step_state):
            if not record.uploads:
                return None
            step = self.loop.method.server_step.name
            raise FedblendError(f"method.server_step: '{step}' makes no points")
        row: Row = {
            "round": state.round,
            **_measure_alignment(setup, self.aggregate, Points.from_server_state(step_state), state.round),
        }
        self.rows.append(row | ({} if record.accuracy is None else {"accuracy": record.accuracy}))
        if self.on_round:
            self.on_round(self.rows[-1])
        return None


def replay(
    loop: RoundLoop,
    rounds: int,
    on_round: Callable[[Row], None] | None = None,
    first: dict[str, torch.Tensor] | None = None,
) -> list[Row]:
    """Repeat a run's rounds with an :class:`AlignmentProbe`; return its rows. ``first`` are weights of a warm start."""
    probe = AlignmentProbe(loop, on_round)
    watched = RoundLoop(loop.setup, loop.engine, [probe])
    state, _ = watched.start(first)
    for _ in range(rounds):
        state, record = watched.round(state)
        probe.on_round_end(state, record)
    return probe.rows


def _measure_alignment(setup: Setup, aggregate: Mapping[str, torch.Tensor], points: Points, round: int) -> Row:
    model = with_weights(setup.model, dict(aggregate))
    x = setup.scale.from_unit(points.x)
    real = gradient(model, client_batches(setup))
    new = points.made_in(round)
    of_new = gradient(model, chunks(setup.scale.from_unit(new.x), new.labels)) if len(new) else None
    return {
        "points": len(points),
        "alignment": cosine(gradient(model, chunks(x, points.labels)), real),
        "alignment_new": math.nan if of_new is None else cosine(of_new, real),
    }


def replay_run(loaded_run: LoadedRun, on_round: Callable[[Row], None] | None = None) -> list[Row]:
    """Repeat all rounds of a run in this process, with its engine; see :func:`replay`."""
    directory, setup = loaded_run.directory, loaded_run.setup
    with repeating(directory, setup) as loop:
        return replay(loop, loaded_run.state.round, on_round, first_weights(setup, directory.path))
