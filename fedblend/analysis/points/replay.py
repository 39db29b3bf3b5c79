"""The alignment of the points round by round, which a checkpoint cannot tell: the run is made once more."""

from __future__ import annotations

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
from fedblend.runs.runner import one_thread

Row = dict[str, float]


class AlignmentProbe(Callback):
    """Measures, in each round, the gradients of equation 9 at the aggregate before the server step refines it.

    ``rows`` has a row for each round: ``round`` from 1, ``points`` their number, ``alignment`` the cosine between the
    gradients on all points so far and on all clients' samples at the aggregate, ``alignment_new`` the same of the
    round's own points alone, and the model's test ``accuracy`` after the server step, where it was evaluated.
    """

    def __init__(self, loop: RoundLoop, on_round: Callable[[Row], None] | None = None) -> None:
        self.loop, self.on_round = loop, on_round
        self.rows: list[Row] = []
        self.aggregate: Mapping[str, torch.Tensor] = {}

    def on_updates(self, task: TrainTask, result: CohortResult) -> None:
        """Keep the aggregate."""
        self.aggregate, _ = self.loop.aggregate(task, result)

    def on_round_end(self, state: RunState, record: RoundRecord) -> bool | None:
        """Measure. Raises :class:`FedblendError` if the server step makes no points."""
        kept, setup = state.server_part("server_step"), self.loop.setup
        if not set(POINTS) <= set(kept):
            step = self.loop.method.server_step.name
            raise FedblendError(f"method.server_step: '{step}' makes no points to look at")
        row: Row = {"round": state.round, **_measure_alignment(setup, self.aggregate, Points.from_server_state(kept))}
        self.rows.append(row | ({} if record.accuracy is None else {"accuracy": record.accuracy}))
        if self.on_round:
            self.on_round(self.rows[-1])
        return None


def replay(loop: RoundLoop, rounds: int, on_round: Callable[[Row], None] | None = None) -> list[Row]:
    """Make a run's rounds once more under an :class:`AlignmentProbe`; returns its rows."""
    probe = AlignmentProbe(loop, on_round)
    watched = RoundLoop(loop.setup, loop.engine, [probe])
    state, _ = watched.start()
    for _ in range(rounds):
        state, record = watched.round(state)
        probe.on_round_end(state, record)
    return probe.rows


def _measure_alignment(setup: Setup, aggregate: Mapping[str, torch.Tensor], points: Points) -> Row:
    model = with_weights(setup.model, dict(aggregate))
    x = setup.scale.from_unit(points.x)
    real = gradient(model, client_batches(setup))
    new = points.rounds == points.rounds.max()
    return {
        "points": len(points),
        "alignment": cosine(gradient(model, chunks(x, points.labels)), real),
        "alignment_new": cosine(gradient(model, chunks(x[new], points.labels[new])), real),
    }


def replay_run(loaded_run: LoadedRun, on_round: Callable[[Row], None] | None = None) -> list[Row]:
    """Make all rounds of a run once more, in this process and with the engine that it had; see :func:`replay`."""
    setup = loaded_run.setup
    earlier = loaded_run.directory.facts().get("engine")
    engines.require_device(setup.experiment.device)
    with one_thread():
        choice = (
            EnginePlan(**{**earlier, "ranks": 1}) if earlier else engines.plan_engine(setup, 1, loaded_run.state.round)
        )
        engine = engines.make(setup, choice)
        try:
            return replay(RoundLoop(setup, engine), loaded_run.state.round, on_round)
        finally:
            engine.close()
