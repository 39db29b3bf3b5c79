"""The round loop, the only one in fedblend. It is engine-agnostic: an engine runs all client work.

share, once or when due:  client.share -> protection -> uplink -> server makes the pool
every round:  selection of a cohort -> downlink -> client.train -> protection -> uplink
              -> aggregate -> server step -> evaluate -> record
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from fedblend.core.callbacks import Callback
from fedblend.core.cohort import FIRST, SELECTION, BegunRound, Cohorts
from fedblend.core.engine import CohortResult, Engine, first_server_state
from fedblend.core.errors import FedblendError
from fedblend.core.exchange import Exchange
from fedblend.core.extremes import Diverged, without_extremes
from fedblend.core.possible import require_possible
from fedblend.core.record import RoundLog, RoundRecord
from fedblend.core.recorder import Recorder
from fedblend.core.server import Server
from fedblend.core.setup import Experiment, Setup, model_spec
from fedblend.core.state import RunState, replaced
from fedblend.core.trees import add_prefix, without

StateAndRecord = tuple[RunState, RoundRecord]


class RoundLoop:
    """A run's rounds as a function of plain state: ``state, record = loop.round(state)``."""

    def __init__(self, setup: Setup, engine: Engine, callbacks: Sequence[Callback] = ()) -> None:
        self.setup, self.engine, self.callbacks = setup, engine, tuple(callbacks)
        self.experiment: Experiment = setup.experiment
        self.method = setup.method
        self.ended_by = ""
        """What ended the run early: names of callbacks, and ``target``; empty after all rounds."""
        self.spec, self.log = model_spec(setup, engine.server_model()), RoundLog()
        require_possible(setup, self.spec, self.callbacks)
        self.exchange = Exchange(setup, engine, self.spec, self.log)
        self.cohorts = Cohorts(setup, engine, self.spec, self.log, self.callbacks)
        self.server = Server(setup, engine, self.spec, self.log)
        self.recorder = Recorder(setup, engine, self.log)

    def round(self, state: RunState) -> StateAndRecord:
        """Make one round: share if due, train a cohort, aggregate, refine, evaluate."""
        begun = self.begin_round(state)
        if not self.method.upload.trains_in(state.round):
            return self._finish(begun, None)
        result = self.cohorts.collect(begun)
        try:
            return self._finish(begun, result)
        except Diverged as diverged:
            return without_extremes(self._finish, self.cohorts, begun, result, str(diverged))

    def begin_round(self, state: RunState) -> BegunRound:
        """Make the round's steps before training: the cohort, sharing if due, the pool, and the cohort's downlink."""
        self.log.begin()
        cohort, has_model = self.cohorts.choose(state)
        if not self.exchange.plan.after_training:
            state, received = self.exchange.share_if_due(state, self.setup.sizes(state.round), cohort)
            has_model = np.union1d(has_model, received)
        return self.cohorts.begin(state, cohort, self.exchange.pool_for_clients(state), has_model)

    def _finish(self, begun: BegunRound, result: CohortResult | None, bounded: bool = True) -> StateAndRecord:
        """Make the steps of a round after training. Raises :class:`Diverged` if the outcome must be ``bounded``."""
        state = begun.state if result is None else self.server.aggregate(begun, result, bounded)
        if self.exchange.plan.after_training:  # under the round's aggregate
            state, _ = self.exchange.share_if_due(state, self.setup.sizes(state.round), begun.drawn)
        pool = self.exchange.pool_for_step(state) if self.method.server_step.active else None
        state = self.server.step(state, begun, result, pool)
        return self.recorder.record(begun, state, result, bounded)

    # A run --------------------------------------------------------------------------------------------------------

    def start(self, weights: dict[str, torch.Tensor] | None = None) -> StateAndRecord:
        """Return the state before the first round, and the record of the untrained model (round 0).

        ``weights`` are the first weights, of another run, in a warm start (:mod:`fedblend.runs.runner`).
        """
        if weights is None and self.experiment.start is not None:
            raise FedblendError(f"start: '{self.experiment.start}': a run's rounds cannot be made again without it")
        weights, clients = weights or self.setup.weights(), len(self.setup.population)
        server_state = first_server_state(self.method, self.spec, weights)
        server_state |= add_prefix(f"{SELECTION}/", self.experiment.selection.init_state(clients))
        if self.experiment.start is not None and self.experiment.begins_at_clients:
            server_state = replaced(server_state, FIRST, without(weights, self.setup.frozen))
        state = RunState(0, weights, np.zeros(clients, bool), np.zeros(clients, np.int64), server_state=server_state)
        self.log.begin()
        return self.recorder.write(state)

    def run(self, state: RunState, record: RoundRecord) -> RunState:
        """Make the remaining rounds; stop early if the run converges, reaches its target, or a callback ends it."""
        for callback in self.callbacks:
            callback.on_run_begin(self.setup, state)
        # A killed run may have ended, with no status written.
        self.ended_by = self._end_of(state, record)
        while state.round < self.experiment.rounds and not record.converged and not self.ended_by:
            state, record = self.round(state)
            names = []
            for callback in self.callbacks:
                if callback.on_round_end(state, record):
                    names.append(getattr(callback, "name", type(callback).__name__))
                    # The last round is evaluated before later callbacks write the state and the record.
                    state, record = self.recorder.evaluated(replace(state, ended_by=", ".join(names)), record)
            self.ended_by = self._end_of(state, record)
        for callback in self.callbacks:
            callback.on_run_end(state)
        return state

    def _end_of(self, state: RunState, record: RoundRecord) -> str:
        """Return what ends the run after this round: names of callbacks, and ``target``; empty if it goes on."""
        target = "target" if state.round and self.recorder.reaches_target(record) else ""
        return ", ".join(filter(None, [state.ended_by, target]))
