"""The round loop, the only one in fedblend. It is engine-agnostic: an engine runs all client work.

    sharing, once or when due:  client.share -> protection -> uplink -> server.pool
    every round:  cohort -> downlink -> client.train -> protection -> uplink
                  -> aggregate -> after_aggregation of client parts -> server step -> evaluate -> record

:meth:`RoundLoop.round` is the algorithm; the methods below it are its steps, in the order of their calls.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedblend.core.callbacks import Callback
from fedblend.core.channel import transmit
from fedblend.core.context import CohortSummary
from fedblend.core.engine import (
    CohortResult,
    Engine,
    TrainTask,
    aggregator_of,
    client_parts,
    extras_like,
    extras_sum,
    first_client_state,
    first_server_state,
)
from fedblend.core.errors import FedblendError, by_reason, listed
from fedblend.core.evaluation import Selection, evaluate, own_tests
from fedblend.core.objective import ClientPart
from fedblend.core.protection import Protection, ReleaseContext
from fedblend.core.random import stream
from fedblend.core.record import CostMeter, RoundRecord
from fedblend.core.server_step import ServerContext
from fedblend.core.setup import Setup, cohort_of, model_spec, reference_device
from fedblend.core.sharing import Payload, Pool
from fedblend.core.sharing_steps import SharingSteps
from fedblend.core.state import ClientState, RunState, replaced
from fedblend.core.trees import Tensors, strip_prefix
from fedblend.core.upload import (
    all_finite,
    as_kept,
    as_model_and_table,
    bytes_of,
    finite_fault,
    form_fault,
    squares_finite,
)

Weights = dict[str, torch.Tensor]

StateAndRecord = tuple[RunState, RoundRecord]

EARLIER = "earlier rounds are kept"
"""In each message about a round that stops the run."""

FIRST = "first"
"""Slot of the server's state with the first weights of a warm start, if clients may begin with them."""


class Diverged(FedblendError):
    """A round's aggregate is out of bounds, or the loss of its model is not finite."""


@dataclass(frozen=True)
class BegunRound:
    """A round before its training: sharing and downlink are done."""

    state: RunState
    """The state, with what was shared and downloaded in this round."""
    task: TrainTask
    """What the engine needs to train clients."""
    cohort: list[int]
    """Clients that take part."""
    pool: Pool
    """The pool that the server made of all entries."""
    costs: CostMeter
    """Costs of the round so far."""
    facts: dict[str, Any]
    """Fields of the round's record so far."""


class RoundLoop:
    """A run's rounds as a function of plain state: ``state, record = loop.round(state)``."""

    def __init__(self, setup: Setup, engine: Engine, callbacks: Sequence[Callback] = ()) -> None:
        self.setup, self.engine, self.callbacks = setup, engine, tuple(callbacks)
        self.experiment = setup.experiment
        self.method = setup.method
        self.ended_by = ""
        """What ended the run early: names of callbacks, and ``target``; empty after all rounds."""
        self._require_possible()
        self.sharing = SharingSteps(setup, engine, self.spec, self.draw_cohort)
        self.device = reference_device(setup)

    # A run --------------------------------------------------------------------------------------------------------

    def start(self, weights: Weights | None = None) -> tuple[RunState, RoundRecord]:
        """Return the state before the first round, and the record of the untrained model (round 0).

        ``weights`` are the first weights, of another run, in a warm start (:mod:`fedblend.runs.warm_start`).
        """
        if weights is None and self.experiment.start is not None:
            raise FedblendError(f"start: '{self.experiment.start}': a run's rounds cannot be made again without it")
        weights, clients = weights or self.setup.weights(), len(self.setup.population)
        state = RunState(0, weights, np.zeros(clients, bool), np.zeros(clients, np.int64))
        server_state = first_server_state(self.method, self.spec, weights)
        if self.experiment.start is not None and self.experiment.begins_at_clients:
            server_state = replaced(server_state, FIRST, weights)
        state = replace(state, server_state=server_state)
        return self.selection.note_best(state, self._record(state, CostMeter(), {}))

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
                    state, record = self._evaluated(replace(state, ended_by=", ".join(names)), record)
            self.ended_by = self._end_of(state, record)
        for callback in self.callbacks:
            callback.on_run_end(state)
        return state

    def _end_of(self, state: RunState, record: RoundRecord) -> str:
        """Return what ends the run after this round: names of callbacks, and ``target``; empty if it goes on."""
        target = "target" if state.round and self.selection.reaches_target(record) else ""
        return ", ".join(filter(None, [state.ended_by, target]))

    # A round ------------------------------------------------------------------------------------------------------

    def round(self, state: RunState) -> tuple[RunState, RoundRecord]:
        """Make one round: share if due, train a cohort, aggregate, refine, evaluate."""
        begun = self.begin_round(state)
        if not self.method.upload.trains_in(begun.state.round):
            return self._conclude(begun, None)
        result = self._train(begun)
        try:
            return self._conclude(begun, result)
        except Diverged as diverged:
            return self._conclude_without_extremes(begun, result, str(diverged))

    def _conclude(self, begun: BegunRound, result: CohortResult | None, bounded: bool = True) -> StateAndRecord:
        """Make the steps of a round after training. Raises :class:`Diverged` if the outcome must be ``bounded``."""
        before, task, costs, facts = begun.state, begun.task, begun.costs, dict(begun.facts)
        state, weights, outputs, known = before, before.weights, before.global_outputs, before.weights
        if result is not None:
            facts |= self._facts(result)
            with costs.time("aggregate"):
                weights, outputs = self.aggregate(task, result)
            weights, server_state = self._after_aggregation(task, weights, state.server_state, result)
            if bounded:
                self._require_bounded(before, weights, outputs, server_state)
                known = weights
            state = replace(state, server_state=server_state, client_states=self._kept(task, result, state))
        if self.method.sharing.after_training:
            state, shared, _ = self.sharing.share_if_due(state, weights, task.sizes, costs)
            facts |= shared
        state = replace(state, global_outputs=outputs)
        if result is None or result.good:
            weights, state = self._refine(state, weights, begun, result)
        weights = self.setup.tied(weights)
        self._require_finite(before, known, weights)
        facts |= self._change(before, weights, outputs, facts)
        state = replace(state, round=before.round + 1, weights=weights, ended_by="")
        record = self._record(state, costs, facts)
        of_aggregate = self.method.upload.is_model and not (
            self.experiment.evaluates_device or self.experiment.evaluates_each
        )
        if result is not None and bounded and of_aggregate and not math.isfinite(record.loss or 0.0):
            raise Diverged("the model's loss is not finite")
        return self.selection.note_best(state, record)

    def _conclude_without_extremes(self, begun: BegunRound, result: CohortResult, diverged: str) -> StateAndRecord:
        """Make the steps after training without the uploads of the largest changes, as few as make the round good.

        Changes within a factor of ten of the largest are left out together. Where no upload can stay, simulated clients
        have diverged, and the round counts with all of them. With real clients the run stops, so that it can go on from
        its checkpoint; with a masked sum it stops at once, because no upload can be left out.
        """
        task, cohort = begun.task, listed([client for client, _, _ in result.good])
        start, aggregator = self.setup.shared(task.weights), aggregator_of(self.setup, task.round)
        stopped = f"round {task.round + 1}: {diverged}, with the uploads of clients {cohort}"
        is_real = self.engine.secret_rng() is not None
        if is_real and aggregator.secure_aggregated:
            raise FedblendError(
                f"{stopped}, which are masked: none can be left out alone; {EARLIER}: end the SuperNode of the site at "
                "fault, or give smaller steps, and continue the run"
            )
        if len(result.uploads) < len(result.good) or (result.extras and not result.each_extras):
            result = self._collect(replace(task, keeps_uploads=True), result.cohort, result.lost)
        sizes: dict[int, float] = {}
        for client, _, _ in result.good:
            changes = [t.double() - start[n] if n in start else t for n, t in result.uploads[client].items()]
            beside = result.each_extras.get(client, {}).values()
            sizes[client] = max((float(t.abs().max()) for t in (*changes, *beside) if t.numel()), default=0.0)
        left = result
        while sizes:
            most = max(sizes.values())
            why = f"with its changes of up to {most:.3g} {diverged} (a learning rate, or inputs, too large?)"
            left = left.without({c: why for c, size in sizes.items() if size >= most / 10}, aggregator)
            sizes = {c: size for c, size in sizes.items() if size < most / 10}
            try:
                outcome = self._conclude(begun, left)
            except FedblendError as error:
                if is_real and not isinstance(error, Diverged):
                    raise
                continue
            if sizes:
                self._require_enough(task, left)
                return outcome
            if is_real:
                raise FedblendError(f"{stopped} (a learning rate, or inputs, too large?); {EARLIER}")
        return self._conclude(begun, result, bounded=False)

    def begin_round(self, state: RunState) -> BegunRound:
        """Make the round's steps before training: sharing if due, the pool, the cohort and its downlink."""
        costs, sizes = CostMeter(), self.setup.sizes(state.round)
        facts: dict[str, Any] = {}
        has_model = np.empty(0, np.int64)
        if not self.method.sharing.after_training:
            state, facts, has_model = self.sharing.share_if_due(state, state.weights, sizes, costs)
        pool = self.sharing.pool_of(state)
        sent = self.sharing.pool_for_clients(pool)
        self.sharing.require_pool(pool, sent, state.round)
        cohort: list[int] = []
        if self.method.upload.trains_in(state.round):
            drawn = self.draw_cohort(state.round)
            received, state = self._download(state, drawn, sent, has_model, costs)
            cohort, states = self._client_states(state, drawn, received)
        else:
            states = {}
        mixed = sent if self.method.objective.needs else None
        outputs, broadcast = state.global_outputs, self._broadcast(state)
        reads = any(callback.reads_uploads for callback in self.callbacks)
        task = TrainTask(state.round, state.weights, mixed, sizes, outputs, states, broadcast, keeps_uploads=reads)
        return BegunRound(state, task, cohort, pool, costs, facts)

    # Cohort and downlink ------------------------------------------------------------------------------------------

    def draw_cohort(self, round: int) -> np.ndarray:
        """Return the clients of a round, in order, int64 [clients]. Override this method for another choice."""
        return cohort_of(self.setup, round)

    def _download(
        self, state: RunState, cohort: np.ndarray, pool: Pool, has_model: np.ndarray, costs: CostMeter
    ) -> tuple[np.ndarray, RunState]:
        """Send the model, mean outputs, parts' server state and the pool to clients that lack them.

        Returns which clients received all of it, bool [cohort], and the state.
        """
        with costs.time("download"):
            sharing, method = self.method.sharing, self.method
            weights = 0 if method.stateful_clients else bytes_of(self.setup.shared(state.weights))
            outputs = bytes_of(state.global_outputs) if any(term.uses_outputs for term in method.terms) else 0
            extras = bytes_of(self._broadcast(state))
            goes_to_clients = sharing.sent_to_clients and method.objective.needs
            pool_bytes = bytes_of(pool.tensors) if goes_to_clients else 0
            fresh, without_model = ~state.has_pool[cohort], ~np.isin(cohort, has_model)
            sizes = weights * without_model + outputs + extras + pool_bytes * fresh
            received = transmit(self.setup, "down", "downlink", sizes, cohort, state.round, costs)
            costs.count("down", "weights", weights * int(without_model.sum()))
            costs.count("down", method.upload.bytes_kind, outputs * len(cohort))
            costs.count("down", "extras", extras * len(cohort))
            costs.count("down", sharing.bytes_kind, pool_bytes * int(fresh.sum()))
            has_pool = state.has_pool.copy()
            has_pool[cohort[received]] = True
        return received, replace(state, has_pool=has_pool)

    def _client_states(
        self, state: RunState, cohort: np.ndarray, received: np.ndarray
    ) -> tuple[list[int], dict[int, ClientState]]:
        """Return the clients that take part, and the states of clients that keep anything.

        A client without the pool that its objective mixes with takes no part. A client that keeps its own model, or
        did not receive the round's model, starts from the last model that it had.
        """
        taking_part: list[int] = []
        states: dict[int, ClientState] = {}
        for client, did_receive in zip(cohort.tolist(), received.tolist(), strict=True):
            if self.method.objective.needs and not state.has_pool[client]:
                continue
            taking_part.append(client)
            kept = self.kept_by(state, client, did_receive)
            if kept:
                states[client] = kept
        return taking_part, states

    def kept_by(self, state: RunState, client: int, did_receive: bool) -> ClientState:
        """Return a client's state at the start of a round; ``did_receive``: whether the round's model reached it."""
        kept = state.client_states.get(client)
        if kept is None:
            kept = first_client_state(self.method, self.setup.training, self.spec, state.weights)
        if did_receive and not self.method.stateful_clients:
            return replace(kept, model={}, outputs={})
        model = kept.model or state.server_part(FIRST) or self.setup.weights()
        return replace(kept, model=model, outputs=(did_receive and state.global_outputs) or kept.outputs)

    def _broadcast(self, state: RunState) -> Weights:
        """Return the tensors that parts keep at the server and send to every client of the cohort."""
        slots = tuple(f"{slot}/" for slot, part in client_parts(self.method).items() if part.broadcasts)
        return {name: t for name, t in state.server_state.items() if name.startswith(slots)}

    # Training and aggregation -------------------------------------------------------------------------------------

    def _train(self, begun: BegunRound) -> CohortResult:
        """Train the cohort; return what aggregation needs of the good uploads.

        Raises :class:`FedblendError` for fewer good uploads than the experiment's ``min_uploads``.
        """
        task, clients, costs = begun.task, begun.cohort, begun.costs
        for callback in self.callbacks:
            callback.on_round_begin(begun.state, np.array(clients, np.int64))
        like = self.method.upload.like(self.setup.shared(task.weights), self.setup.task)
        size = self.experiment.protection.bytes_on_air(like) + bytes_of(extras_like(self.method, task))
        sizes = np.full(len(clients), size)
        arrives = transmit(self.setup, "up", "uplink", sizes, np.array(clients, np.int64), task.round, costs)
        lost = {client for client, came in zip(clients, arrives.tolist(), strict=True) if not came}
        with costs.time("aggregate"):
            result = self._collect(task, clients, lost)
        costs.seconds["aggregate"] -= result.seconds
        costs.seconds["train"] += result.seconds
        costs.count("up", self.method.upload.bytes_kind, result.sent)
        for (direction, kind), number in result.extra_bytes.items():
            costs.count(direction, kind, number)
        self._require_enough(task, result)
        for callback in self.callbacks:
            callback.on_updates(task, result)
        return result

    def _collect(self, task: TrainTask, clients: list[int], lost: Collection[int]) -> CohortResult:
        result = self.engine.collect(task, clients, lost)
        result.cohort, result.lost = clients, lost
        return result

    def _require_enough(self, task: TrainTask, result: CohortResult) -> None:
        """Raise :class:`FedblendError` for fewer good uploads than the experiment's ``min_uploads``."""
        if len(result.good) < self.experiment.min_uploads:
            missing = [{"client": client, "reason": "lost by the channel"} for client in sorted(result.lost)]
            reasons = _reasons([*result.refused, *missing]) or f"{len(result.cohort)} clients took part"
            raise FedblendError(
                f"round {task.round + 1}: {len(result.good)} good uploads of {len(result.cohort)}, but min_uploads is "
                f"{self.experiment.min_uploads} ({reasons}); {EARLIER}: remove the cause or lower min_uploads, and "
                "continue the run"
            )

    def _facts(self, result: CohortResult) -> dict[str, Any]:
        """Return what the round's record says of the uploads."""
        facts: dict[str, Any] = {"uploads": len(result.good), "cohort": result.cohort}
        losses = [(n, loss) for _, n, loss in result.good if loss is not None]
        if samples := sum(n for n, _ in losses):
            facts["train_loss"] = sum(n * loss for n, loss in losses) / samples
        if result.lost:
            facts["lost"] = sorted(result.lost)
        if result.refused:
            facts["refused"] = result.refused
        return facts

    def aggregate(self, task: TrainTask, result: CohortResult) -> tuple[Weights, Weights]:
        """Return the aggregate of a cohort's uploads: the next global weights, and the mean outputs by label."""
        weights, outputs, kind = dict(task.weights), dict(task.global_outputs), self.method.upload
        begun = self.setup.shared(weights)
        if not result.good:
            return weights, outputs
        aggregator = aggregator_of(self.setup, task.round, result)
        if not kind.is_model:
            return weights, aggregator.finish(result.partial, begun)
        # Rounded after the server's noise, which is sized for the exact sum.
        aggregate = aggregator.finish(aggregator.unrounded(result.partial), begun)
        if fault := form_fault(aggregate, begun):
            raise FedblendError(f"method.aggregator: '{aggregator.name}' returned what is no model: {fault}")
        # Who knows the experiment can compute a keyed stream: real sites could subtract keyed noise.
        keyed = stream(self.experiment.seed, "release", task.round)
        rng = self.engine.secret_rng() or keyed
        context = ReleaseContext(len(result.cohort), len(result.good), self.setup.training.lr_in(task.round), rng)
        released = self.experiment.protection.release(aggregate, begun, context)
        made = weights | {name: as_kept(name, tensor, weights[name]) for name, tensor in released.items()}
        return self.setup.tied(made), outputs

    def _after_aggregation(
        self, task: TrainTask, weights: Weights, server_state: Tensors, result: CohortResult
    ) -> tuple[Weights, Weights]:
        """Call ``after_aggregation`` of each client part in turn; return the weights and the server's state."""
        state = dict(server_state)
        if not result.good:
            return weights, state
        holding = int(np.count_nonzero(self.setup.population.sizes))
        extras = extras_sum(self.setup, task, result)
        for slot, part in client_parts(self.method).items():
            summary = CohortSummary(task.weights, strip_prefix(f"{slot}/", extras), len(result.good), holding)
            made = part.after_aggregation(weights, strip_prefix(f"{slot}/", state), summary)
            weights, kept = as_model_and_table(made, task.weights, slot, part)
            state = replaced(state, slot, kept)
        return weights, state

    def _kept(self, task: TrainTask, result: CohortResult, state: RunState) -> dict[int, ClientState]:
        """Return the clients' states after the round; those with own models keep the mean outputs they trained with."""
        kept = {}
        for client, new in result.client_states.items():
            table = replace(new, outputs=task.outputs_of(client) if new.model else {}).to_tensors()
            # Copies: a client's tensors may be views of all clients of a stack. A GPU has no room for all clients.
            kept[client] = ClientState.from_tensors({n: t.to("cpu", copy=True) for n, t in table.items()})
        return state.client_states | kept

    # Server step --------------------------------------------------------------------------------------------------

    def _refine(
        self, state: RunState, weights: Weights, begun: BegunRound, result: CohortResult | None
    ) -> tuple[Weights, RunState]:
        """Apply the server step to the aggregate; return the next weights, and the state with what the step keeps."""
        step = self.method.server_step
        if not step.active:
            return weights, state
        # Entries of an earlier round are of another model.
        is_old = self.method.sharing.after_training and state.shared_round != state.round
        with begun.costs.time("server"):
            context = ServerContext(
                **vars(model_spec(self.setup, self.engine.server_model())),
                round=state.round,
                lr=self.setup.training.lr_in(state.round),
                rng=stream(self.experiment.seed, "server", state.round),
                start=state.weights,
                query=lambda question: self._query(question, begun.costs, result),
                state=state.server_part("server_step"),
                prior=self.setup.prior,
                global_outputs=state.global_outputs,
                pool=None if is_old else self.sharing.pool_of(state),
            )
            made = step.refine(weights, context)
            weights, kept = as_model_and_table(made, state.weights, "server_step", step)
        return weights, replace(state, server_state=replaced(state.server_state, "server_step", kept))

    def _query(self, question: Tensors, costs: CostMeter, result: CohortResult | None) -> list[Payload]:
        """Send a server step's question to the clients whose uploads were good; drop answers that are not finite."""
        answers = []
        left_out = {one["client"] for one in result.refused} if result is not None else ()
        for client, answer in self.engine.query(question):
            if self.method.server_step.queries_clients:
                costs.count("down", "questions", bytes_of(question))
                costs.count("up", "answers", bytes_of(answer))
            if client not in left_out and finite_fault(answer) is None:
                answers.append(answer)
        return answers

    def _require_bounded(self, before: RunState, weights: Tensors, outputs: Tensors, server_state: Tensors) -> None:
        """Raise :class:`Diverged` if the aggregate, or what parts keep beside it, has no use for a next round."""
        changed = [t for n, t in weights.items() if t is not before.weights[n]]
        changed += [t for n, t in server_state.items() if t is not before.server_state.get(n)]
        if not squares_finite([*changed, *outputs.values()]):
            raise Diverged("the squares of the aggregate's numbers are not finite")

    def _require_finite(self, before: RunState, known: Tensors, weights: Tensors) -> None:
        """Raise :class:`FedblendError` if a tensor that is not ``known`` to be good holds NaN or infinity."""
        changed = {n: t for n, t in weights.items() if t is not known[n] and t.is_floating_point()}
        if all_finite([*changed.values()]) or not (fault := finite_fault(changed)):
            return
        method, protection = self.method, self.experiment.protection
        makers = [f"method.aggregator '{method.aggregator.name}'"]
        if type(protection).release is not Protection.release:
            makers.append(f"protection '{protection.name}'")
        for slot, part in client_parts(method).items():
            if type(part).after_aggregation is not ClientPart.after_aggregation:
                makers.append(f"method.{slot} '{part.name}'")
        if method.server_step.active:
            makers.append(f"method.server_step '{method.server_step.name}'")
        raise FedblendError(
            f"round {before.round + 1}: the server's model: {fault} after {' and '.join(makers)}; valid: smaller "
            "steps, or other parts of the method"
        )

    # Evaluation and record ----------------------------------------------------------------------------------------

    def _change(self, before: RunState, weights: Tensors, outputs: Tensors, facts: dict[str, Any]) -> dict[str, Any]:
        """Return how far a round moved the model, or the mean outputs, and whether the run has converged.

        Mix2FLD's rule (section II): |w - w'| / |w'| for models; of mean outputs, where clients send these, the largest
        such number of any label.
        A round without uploads does not count as converged, nor one in which clients do not train yet.
        """
        bound = self.experiment.convergence_tol
        if bound is None:
            return {}
        if self.method.upload.watches or self.method.upload.embeds:
            old, new = (
                next(iter(one.values()), torch.zeros(1, 1)).double() for one in (before.global_outputs, outputs)
            )
        else:
            old, new = (
                torch.cat([one[name].flatten().double() for name in self.spec.trained])[None]
                for one in (before.weights, weights)
            )
        change = float(((new - old).norm(dim=1) / old.norm(dim=1)).nan_to_num(nan=0.0, posinf=torch.inf).max())
        waits = self.method.upload.trains and not self.method.upload.trains_in(before.round)
        converged = change < bound and facts.get("uploads") != 0 and not waits
        return {"change": change if np.isfinite(change) else None, "converged": converged}

    def _record(self, state: RunState, costs: CostMeter, facts: dict[str, Any]) -> RoundRecord:
        """Return the round's record, with an evaluation where one is due."""
        record = RoundRecord(state.round, **facts)
        last = state.round >= self.experiment.rounds or record.converged
        if state.round % self.experiment.eval_every == 0 or last:
            with costs.time("evaluate"):
                self._evaluate(state, record)
        if costs.channel:
            record.channel = dict(costs.channel)
        if self.experiment.compute_seconds is not None and state.round:
            record.computing = self.experiment.compute_seconds
        record.bytes_up, record.bytes_down = dict(costs.bytes["up"]), dict(costs.bytes["down"])
        record.machine = {"seconds": {phase: round(seconds, 4) for phase, seconds in costs.seconds.items()}}
        if record.channel is not None and record.computing is None:
            # Real clients train at the same time; simulated ones train one after another.
            per_client = costs.seconds["train"] / max(1, len(record.cohort or ()))
            record.machine["computing"] = round(per_client + costs.seconds["server"] + costs.seconds["aggregate"], 4)
        return record

    def _evaluate(self, state: RunState, record: RoundRecord) -> None:
        """Evaluate the state's models, and set the record's fields."""
        weights, models = self._evaluated_weights(state), self._models_of_clients(state)
        for name, value in evaluate(self.engine, weights, self.setup, models).items():
            setattr(record, name, value)

    def _evaluated(self, state: RunState, record: RoundRecord) -> tuple[RunState, RoundRecord]:
        """Return the state and the record with an evaluation, if the record has none."""
        if record.evaluated:
            return state, record
        self._evaluate(state, record)
        return self.selection.note_best(state, record)

    def _evaluated_weights(self, state: RunState) -> Tensors:
        """Return the weights to evaluate: the server's, or those of the reference device after its training."""
        if not self.experiment.evaluates_device:
            return state.weights
        own = state.client_states.get(self.device)
        return (own and own.model) or state.weights

    def _models_of_clients(self, state: RunState) -> dict[int, Tensors] | None:
        """Return clients' own models, by client, if each client is tested with its own; else ``None``."""
        if not self.experiment.evaluates_each:
            return None
        field = self.method.personal.keeps or "model"
        models = {client: getattr(kept, field) for client, kept in state.client_states.items()}
        return {client: model for client, model in models.items() if model}

    # Checks before a run ------------------------------------------------------------------------------------------

    def _require_possible(self) -> None:
        """Raise :class:`FedblendError` for what could not work, before training; set ``selection`` and ``spec``."""
        setup, experiment, method = self.setup, self.experiment, self.method
        # Clients that hold samples do so in every round, also where more arrive.
        cohort, holding = experiment.train.cohort, int(np.count_nonzero(setup.population.sizes))
        if not holding:
            raise FedblendError(
                f"partition: none of its {len(setup.population)} clients hold samples; at least one must"
            )
        # Of real sites with data of their own, those that take part may be fewer.
        if cohort > holding and not setup.population.elsewhere:
            raise FedblendError(
                f"train.cohort: {cohort} clients a round, but only {holding} of {len(setup.population)} clients "
                f"hold samples; valid: 1 to {holding}"
            )
        reading = [getattr(one, "name", type(one).__name__) for one in self.callbacks if one.reads_uploads]
        if reading and method.aggregator.secure_aggregated:
            raise FedblendError(
                f"callbacks: {listed(reading)} reads each client's upload, which '{method.aggregator.name}' in "
                "method.aggregator hides from the server; valid: another aggregator, such as mean"
            )
        if experiment.evaluates_each:
            own_tests(setup)
        self.selection = Selection(setup)
        method.aggregator.require_possible(min(cohort, holding))
        self.spec = model_spec(setup, self.engine.server_model())
        method.server_step.require_possible(self.spec)
        setup.requests(setup.sizes(0))
        if method.objective.needs or method.sharing.after_training:
            method.sharing.require_possible(setup.sizes(0), experiment.policy.min_mean)


def _reasons(refused: Sequence[dict[str, Any]]) -> str:
    """Return why uploads were refused, each reason once with its clients."""
    reasons = by_reason((one["client"], one["reason"]) for one in refused)
    return "; ".join(f"client{'s' if len(who) > 1 else ''} {listed(who)}: {why}" for why, who in reasons.items())
