"""The round's record: how far it moved the model, its evaluation and costs, the best round so far and the target."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import torch

from fedblend.core.cohort import BegunRound
from fedblend.core.engine import CohortResult, Engine
from fedblend.core.errors import FedblendError
from fedblend.core.evaluation import evaluate
from fedblend.core.extremes import Diverged
from fedblend.core.record import RoundLog, RoundRecord
from fedblend.core.setup import Experiment, Setup, reference_device
from fedblend.core.state import RunState, replaced
from fedblend.core.trees import Tensors

BEST = "validation"
"""Slot of the server's state with the round that is best on validation, and its value."""


class Recorder:
    """Makes a run's records.

    Raises :class:`FedblendError` for metrics that are not defined for the task.
    """

    def __init__(self, setup: Setup, engine: Engine, log: RoundLog) -> None:
        self.setup, self.engine, self.log = setup, engine, log
        self.experiment: Experiment = setup.experiment
        self.method = setup.method
        self.device = reference_device(setup) if self.experiment.evaluates_device else None
        self.tests_each = self.experiment.evaluates_each
        self.metric, self.signs = criteria(setup)
        self.warned = False

    def record(
        self, begun: BegunRound, state: RunState, result: CohortResult | None, bounded: bool
    ) -> tuple[RunState, RoundRecord]:
        """The state after a round, with the best round so far, and the round's record.

        Raises :class:`Diverged` where the outcome must be ``bounded``, and the loss of the aggregate is not finite.
        """
        if self.experiment.convergence_tol is not None:
            self._note_change(begun.state, state, result, self.experiment.convergence_tol)
        state, record = self.write(state)
        if record.measured and not self.warned and (warning := self.method.objective.warning(record.measured)):
            warnings.warn(warning, stacklevel=2)
            self.warned = True
        of_aggregate = self.method.upload.is_model and self.device is None and not self.tests_each
        if result is not None and bounded and of_aggregate and not math.isfinite(record.loss or 0.0):
            raise Diverged("the model's loss is not finite")
        return state, record

    def _note_change(self, before: RunState, state: RunState, result: CohortResult | None, bound: float) -> None:
        """Note how far the round moved the model, or the mean outputs, and whether the run has converged.

        A round without uploads does not count as converged, nor one in which clients do not train yet.
        """
        upload = self.method.upload
        change = upload.change(before, state, self.setup.trained)
        waits = upload.trains and not upload.trains_in(before.round)
        self.log.note(
            change=change if math.isfinite(change) else None,
            converged=change < bound and not (result is not None and not result.good) and not waits,
        )

    def write(self, state: RunState) -> tuple[RunState, RoundRecord]:
        """The record of what was noted, with an evaluation where one is due, and the state with the best round."""
        log = self.log
        record = RoundRecord(state.round, **log.facts)
        last = state.round >= self.experiment.rounds or record.converged
        if state.round % self.experiment.eval_every == 0 or last:
            with log.time("evaluate"):
                self._evaluate(state, record)
        log.write(record, self.experiment.compute_seconds)
        return (state, record) if record.validation is None else self._note_best(state, record)

    def _evaluate(self, state: RunState, record: RoundRecord) -> None:
        """Evaluate the state's models, and set the record's fields.

        These are the server's model, or that of the reference device after its training; where each client is tested
        with its own model, those of the clients that have one.
        """
        own = None if self.device is None else state.client_states.get(self.device)
        models: dict[int, Tensors] | None = None
        if self.tests_each:
            field = self.method.personal.keeps or "model"
            models = {client: model for client, kept in state.client_states.items() if (model := getattr(kept, field))}
        weights = {**state.weights, **own.model} if own else state.weights
        for name, value in evaluate(self.engine, weights, self.setup, models).items():
            setattr(record, name, value)

    def evaluated(self, state: RunState, record: RoundRecord) -> tuple[RunState, RoundRecord]:
        """Return the state and the record with an evaluation, if the record has none."""
        if record.evaluated:
            return state, record
        self._evaluate(state, record)
        return (state, record) if record.validation is None else self._note_best(state, record)

    def _note_best(self, state: RunState, record: RoundRecord) -> tuple[RunState, RoundRecord]:
        """Note which round so far is best on validation, the first of equal ones. The state keeps it."""
        value = record.score_of(self.metric, validation=True)
        best = state.server_part(BEST).get("best")
        if value is not None and math.isnan(value):
            value = None  # a model that diverged is not the best
        if value is not None and (best is None or self.signs[self.metric] * (value - float(best[1])) > 0):
            best = torch.tensor([state.round, value], dtype=torch.float64)
            state = replace(state, server_state=replaced(state.server_state, BEST, {"best": best}))
        if best is not None:
            record.best_round = int(best[0])
        return state, record

    def reaches_target(self, record: RoundRecord) -> bool:
        """Whether the run ends because the record reaches the target."""
        if not self.experiment.stop_at_target:
            return False
        name = self.experiment.target_metric
        value = record.score_of(name, self.experiment.validation.active)
        return value is not None and self.signs[name] * (value - self.experiment.target) >= 0


def criteria(setup: Setup) -> tuple[str, dict[str, float]]:
    """The metric that says which round is best, and the sign of each metric: 1.0 where larger is better."""
    experiment, classifies = setup.experiment, setup.task.kind == "classification"
    metrics, validation = experiment.metrics, experiment.validation
    for i, metric in enumerate(metrics):
        try:
            metric.require_possible(setup.task)
        except ValueError as error:
            raise FedblendError(f"metrics[{i}]: {error}") from None
    needed = {"validation.metric": validation.metric if validation.active else None}
    needed |= {"target_metric": experiment.target_metric if experiment.stop_at_target else None}
    for field, name in needed.items():
        if name == "accuracy" and not classifies:
            raise FedblendError(
                f"{field}: accuracy is not defined for {setup.task.kind} data; valid: loss, or one of metrics"
            )
    larger = {"accuracy": True, "loss": False, **{m.label: m.larger_is_better for m in metrics}}
    signs = {name: 1.0 if better else -1.0 for name, better in larger.items()}
    return validation.metric or ("accuracy" if classifies else "loss"), signs
