"""The alignment of the points in every round. A checkpoint has only the last model, so the run is repeated."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from fedblend import engines
from fedblend.analysis.points.gradients import chunks, cosine, gradient
from fedblend.analysis.points.loaded_run import POINTS, LoadedRun, Points, client_batches, with_weights
from fedblend.core.callbacks import Callback
from fedblend.core.engine import CohortResult, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.engines.autotune import EnginePlan
from fedblend.runs.runner import first_weights, one_thread

Row = dict[str, float]


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
    setup = loaded_run.setup
    earlier = loaded_run.directory.facts().get("engine")
    engines.require_device(setup.experiment.device)
    with one_thread():
        plan = (
            EnginePlan(**{**earlier, "ranks": 1}) if earlier else engines.plan_engine(setup, 1, loaded_run.state.round)
        )
        engine = engines.make(setup, plan)
        try:
            first = first_weights(setup, loaded_run.directory.path)
            return replay(RoundLoop(setup, engine), loaded_run.state.round, on_round, first)
        finally:
            engine.close()
