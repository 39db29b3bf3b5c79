"""The round loop's steps at the server: the aggregate, and what the server makes of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from fedblend.core.cohort import LATE, SELECTION, BegunRound, facts_of
from fedblend.core.context import CohortSummary, ModelSpec
from fedblend.core.engine import CohortResult, Engine, TrainTask, aggregator_of, client_parts, extras_sum
from fedblend.core.errors import FedblendError
from fedblend.core.extremes import Diverged
from fedblend.core.objective import ClientPart
from fedblend.core.protection import Protection, ReleaseContext
from fedblend.core.random import stream
from fedblend.core.record import RoundLog
from fedblend.core.selection import Selection
from fedblend.core.server_step import ServerContext
from fedblend.core.setup import Experiment, Setup, model_spec
from fedblend.core.sharing import Payload, Pool
from fedblend.core.state import ClientState, RunState, replaced
from fedblend.core.trees import Tensors, bytes_of, strip_prefix
from fedblend.core.upload import all_finite, as_kept, as_model_and_table, finite_fault, form_fault, squares_finite

Weights = dict[str, torch.Tensor]


class Server:
    """A run's server."""

    def __init__(self, setup: Setup, engine: Engine, spec: ModelSpec, log: RoundLog) -> None:
        self.setup, self.engine, self.spec, self.log = setup, engine, spec, log
        self.experiment: Experiment = setup.experiment
        self.method = setup.method
        self.parts = {
            slot: part
            for slot, part in client_parts(self.method).items()
            if type(part).after_aggregation is not ClientPart.after_aggregation
        }
        """Parts that work at the server, too, by slot."""

    def aggregate(self, begun: BegunRound, result: CohortResult, bounded: bool = True) -> RunState:
        """Return the state with the aggregate of a cohort's uploads, and with what clients and their parts keep.

        Raises :class:`Diverged` where it must be ``bounded``, and is not.
        """
        before, task = begun.state, begun.task
        self.log.note(**facts_of(result))
        with self.log.time("aggregate"):
            weights, outputs = self.mean(task, result)
        server_state = dict(before.server_state)
        if result.good and self.parts:
            weights, server_state = self._after_aggregation(task, weights, server_state, result)
        if bounded:
            _require_bounded(before, weights, outputs, server_state)
        else:
            self._require_finite(before, before.weights, weights)
        # Not checked with the aggregate: a loss may be of any size, and late uploads are checked when they arrive.
        selection = self.experiment.selection
        if type(selection).after_round is not Selection.after_round:
            selected = selection.after_round(before.server_part(SELECTION), result.good)
            server_state = replaced(server_state, SELECTION, selected)
        if result.awaited is not None:
            server_state = replaced(server_state, LATE, result.awaited)
        return replace(
            before,
            weights=weights,
            global_outputs=outputs,
            server_state=server_state,
            client_states=before.client_states | self._kept(task, result),
        )

    def mean(self, task: TrainTask, result: CohortResult) -> tuple[Weights, Weights]:
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
        """Call ``after_aggregation`` of each part in turn; return the weights and the server's state."""
        state = dict(server_state)
        holding = int(np.count_nonzero(self.setup.population.sizes))
        extras = extras_sum(self.setup, task, result)
        for slot, part in self.parts.items():
            summary = CohortSummary(task.weights, strip_prefix(f"{slot}/", extras), len(result.good), holding)
            before = strip_prefix(f"{slot}/", state)
            made = part.after_aggregation(weights, before, summary)
            weights, kept = as_model_and_table(made, task.weights, slot, part)
            # Sums of what clients send are float64; clients send tensors of the types of this table.
            kept |= {n: kept[n].to(old.dtype) for n, old in before.items() if n in kept and old.is_floating_point()}
            state = replaced(state, slot, kept)
        return self.setup.tied(weights), state

    def _kept(self, task: TrainTask, result: CohortResult) -> dict[int, ClientState]:
        """Return clients' states after the round; those with own models keep the mean outputs they trained with."""
        kept = {}
        for client, new in result.client_states.items():
            table = replace(new, outputs=task.outputs_of(client) if new.model else {}).to_tensors()
            # Copies: a client's tensors may be views of all clients of a stack. A GPU has no room for all clients.
            kept[client] = ClientState.from_tensors({n: t.to("cpu", copy=True) for n, t in table.items()})
        return kept

    def step(self, state: RunState, begun: BegunRound, result: CohortResult | None, pool: Pool | None) -> RunState:
        """Apply the server step to the aggregate; return the state after the round.

        ``pool`` is ``None`` where its entries are of another model.
        """
        step, before = self.method.server_step, begun.state
        if step.active and (result is None or result.good):
            with self.log.time("server"):
                context = ServerContext(
                    **vars(model_spec(self.setup, self.engine.server_model())),
                    round=state.round,
                    lr=self.setup.training.lr_in(state.round),
                    rng=stream(self.experiment.seed, "server", state.round),
                    start=before.weights,
                    query=lambda question: self._query(question, result),
                    measure=self.log.measure,
                    state=state.server_part("server_step"),
                    prior=self.setup.prior,
                    global_outputs=state.global_outputs,
                    pool=pool,
                )
                made = step.refine(state.weights, context)
                weights, kept = as_model_and_table(made, before.weights, "server_step", step)
            weights = self.setup.tied(weights)
            self._require_finite(before, state.weights, weights)
            state = replace(state, weights=weights, server_state=replaced(state.server_state, "server_step", kept))
        return replace(state, round=before.round + 1, ended_by="")

    def _query(self, question: Tensors, result: CohortResult | None) -> list[Payload]:
        """Send a server step's question to the clients whose uploads were good; drop answers that are not finite."""
        answers = []
        left_out = {one["client"] for one in result.refused} if result is not None else ()
        for client, answer in self.engine.query(question):
            if self.method.server_step.works_on == "answers":
                self.log.count("down", "questions", bytes_of(question))
                self.log.count("up", "answers", bytes_of(answer))
            if client not in left_out and finite_fault(answer) is None:
                answers.append(answer)
        return answers

    def _require_finite(self, before: RunState, known: Tensors, weights: Tensors) -> None:
        """Raise :class:`FedblendError` if a tensor that is not ``known`` to be good holds NaN or infinity."""
        changed = {n: t for n, t in weights.items() if t is not known[n] and t.is_floating_point()}
        if all_finite([*changed.values()]) or not (fault := finite_fault(changed)):
            return
        method, protection = self.method, self.experiment.protection
        makers = [f"method.aggregator '{method.aggregator.name}'"]
        if type(protection).release is not Protection.release:
            makers.append(f"protection '{protection.name}'")
        makers += [f"method.{slot} '{part.name}'" for slot, part in self.parts.items()]
        if method.server_step.active:
            makers.append(f"method.server_step '{method.server_step.name}'")
        raise FedblendError(
            f"round {before.round + 1}: the server's model: {fault} after {' and '.join(makers)}; valid: smaller "
            "steps, or other parts of the method"
        )


def _require_bounded(before: RunState, weights: Tensors, outputs: Tensors, server_state: Tensors) -> None:
    """Raise :class:`Diverged` if the aggregate, or what parts keep beside it, has no use for a next round."""
    changed = [t for n, t in weights.items() if t is not before.weights[n]]
    changed += [t for n, t in server_state.items() if t is not before.server_state.get(n)]
    if not squares_finite([*changed, *outputs.values()]):
        raise Diverged("the squares of the aggregate's numbers are not finite")
