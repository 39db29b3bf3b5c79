"""The alignment of the points round by round, which a checkpoint cannot tell: the run is made once more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedblend import engines
from fedblend.analysis.points.gradients import chunks, cosine, gradient
from fedblend.analysis.points.loaded_run import POINTS, LoadedRun, Points, client_batches, with_weights
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.server_step import ServerContext, Tensors
from fedblend.engines.autotune import EnginePlan
from fedblend.runs.runner import one_thread

Row = dict[str, float]
Stacked = dict[str, torch.Tensor]


class Watched:
    """A server step as it is, that also shows what it is given and what it makes of it."""

    def __init__(self, step: Any) -> None:
        self.step = step
        self.aggregate: Stacked = {}
        self.kept: Stacked = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    def refine(self, weights: Tensors, server: ServerContext) -> tuple[Stacked, Stacked]:
        """What the step itself does."""
        refined, self.kept = self.step.refine(weights, server)
        self.aggregate = dict(weights)
        return refined, self.kept


def replay(federation: RoundLoop, rounds: int, on_round: Callable[[Row], None] | None = None) -> list[Row]:
    """Make a federation's rounds, and look in each at the gradients of equation 9, before the aggregate is tuned.

    A row a round: ``round`` from 1, ``points`` their number, ``alignment`` the cosine between the gradients on all
    points so far and on all clients' samples at the aggregate, ``alignment_new`` the same of the round's own points
    alone, and the model's test ``accuracy`` after tuning, where it was evaluated. The federation makes the same
    rounds as without. Raises :class:`FedblendError` if its server step makes no points.
    """
    setup, watched = federation.setup, Watched(federation.method.server_step)
    before = federation.method
    federation.method = before.model_copy(update={"server_step": watched})
    rows: list[Row] = []
    try:
        state, _ = federation.start()
        for _ in range(rounds):
            state, record = federation.round(state)
            if not set(POINTS) <= set(watched.kept):
                raise FedblendError(f"method.server_step: '{before.server_step.name}' makes no points to look at")
            row: Row = {"round": state.round, **_aligned(setup, watched)}
            rows.append(row | ({"accuracy": record["accuracy"]} if "accuracy" in record else {}))
            if on_round:
                on_round(rows[-1])
    finally:
        federation.method = before
    return rows


def _aligned(setup: Any, watched: Watched) -> Row:
    model = with_weights(setup.model, watched.aggregate)
    points = Points.of(watched.kept)
    x = setup.scale.from_unit(points.x)
    real = gradient(model, client_batches(setup))
    new = points.rounds == points.rounds.max()
    return {
        "points": len(points),
        "alignment": cosine(gradient(model, chunks(x, points.labels)), real),
        "alignment_new": cosine(gradient(model, chunks(x[new], points.labels[new])), real),
    }


def replay_run(subject: LoadedRun, on_round: Callable[[Row], None] | None = None) -> list[Row]:
    """Make all rounds of a run once more, in this process and with the engine that it had; see :func:`replay`."""
    setup = subject.setup
    told = subject.directory.facts().get("engine")
    engines.require_device(setup.experiment.device)
    with one_thread():
        choice = EnginePlan(**{**told, "ranks": 1}) if told else engines.plan_engine(setup, 1, subject.state.round)
        engine = engines.make(setup, choice)
        try:
            return replay(RoundLoop(setup, engine), subject.state.round, on_round)
        finally:
            engine.close()
