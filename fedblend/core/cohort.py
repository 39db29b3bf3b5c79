"""The round loop's steps at clients: who takes part, what they receive, and what is collected of them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from fedblend.core.callbacks import Callback
from fedblend.core.context import ModelSpec
from fedblend.core.engine import CohortResult, Engine, TrainTask, aggregator_of, exchanged, first_client_state
from fedblend.core.errors import FedblendError, by_reason, listed
from fedblend.core.protection import changes, moved
from fedblend.core.record import RoundLog
from fedblend.core.setup import Experiment, Setup, cohort_of, work_of
from fedblend.core.sharing import Pool
from fedblend.core.state import ClientState, RunState
from fedblend.core.trees import add_prefix, by_client, bytes_of, for_clients, strip_prefix

EARLIER = "earlier rounds are kept"
"""In each message about a round that stops the run."""

FIRST = "first"
"""Slot of the server's state with the first weights of a warm start, if clients may begin with them."""

SELECTION = "selection"
"""Slot of the server's state with what the selection keeps."""

LATE = "late"
"""Slot of the server's state with the uploads that are awaited, by client."""

LOSS_BYTES = 8
"""Bytes of a loss: a float64."""


@dataclass(frozen=True)
class BegunRound:
    """A round before its training: sharing and downlink are done."""

    state: RunState
    """The state, with what was shared and downloaded in this round."""
    task: TrainTask
    """What the engine needs to train clients."""
    cohort: list[int]
    """Clients that take part."""
    drawn: np.ndarray
    """Clients that were chosen, int64; some of these may take no part, because they lack the pool."""


class Cohorts:
    """The cohorts of a run."""

    def __init__(
        self, setup: Setup, engine: Engine, spec: ModelSpec, log: RoundLog, callbacks: Sequence[Callback]
    ) -> None:
        self.setup, self.engine, self.spec, self.log, self.callbacks = setup, engine, spec, log, callbacks
        self.experiment: Experiment = setup.experiment
        self.method = setup.method
        slow = self.experiment.slow
        self._delays = slow is not None and slow.late == "next-round"
        first = first_client_state(self.method, setup.training, spec, setup.model.state_dict())
        self._keeps = bool(first)
        """Whether clients keep anything before their first round."""

    def choose(self, state: RunState) -> tuple[np.ndarray, np.ndarray]:
        """Return the clients of a round, in order, and those that received its model and sent their loss under it."""
        asked: list[int] = []

        def losses(candidates: np.ndarray) -> np.ndarray:
            found = self._ask_losses(state, candidates)
            asked.extend(found)
            return np.array([found.get(client, np.nan) for client in candidates.tolist()])

        busy = awaited(state) if self._delays else ()
        cohort = cohort_of(self.setup, state.round, state.server_part(SELECTION), losses, busy)
        return cohort, np.array(asked, np.int64)

    def _ask_losses(self, state: RunState, candidates: np.ndarray) -> dict[int, float]:
        """Send the round's model to clients; return the losses under it that arrive, by client.

        Notes the record's field ``asked``.
        """
        setup, log, round = self.setup, self.log, state.round
        with log.time("select"):
            model = np.full(len(candidates), bytes_of(setup.shared(state.weights)))
            reached = candidates[setup.transmit("down", "loss-downlink", model, candidates, round, log)]
            log.count("down", "weights", int(model.sum()))
            replies = self.engine.losses(round, state.weights, reached.tolist(), setup.sizes(round))
            found = {client: loss for client, loss in replies.items() if not isinstance(loss, str)}
            sent = np.full(len(found), LOSS_BYTES)
            arrives = setup.transmit("up", "loss-uplink", sent, np.array([*found], np.int64), round, log)
            log.count("up", "local-loss", int(sent.sum()))
        arrived = {client: found[client] for client, came in zip(found, arrives.tolist(), strict=True) if came}
        refused = [{"client": c, "reason": reason} for c, reason in replies.items() if isinstance(reason, str)]
        log.note(asked={"clients": len(candidates), "losses": len(arrived)} | ({"refused": refused} if refused else {}))
        return arrived

    def begin(self, state: RunState, drawn: np.ndarray, pool: Pool, has_model: np.ndarray) -> BegunRound:
        """Send the clients ``drawn`` what they need; ``has_model`` are those that have the round's model already."""
        cohort: list[int] = []
        states: dict[int, ClientState] = {}
        broadcast = exchanged(self.method, state.server_state)
        if self.method.upload.trains_in(state.round):
            received, state = self._download(state, drawn, pool, has_model, bytes_of(broadcast))
            for client, did_receive in zip(drawn.tolist(), received.tolist(), strict=True):
                # Without the pool that the objective mixes with, a client takes no part.
                if self.method.objective.needs and not state.has_pool[client]:
                    continue
                cohort.append(client)
                if kept := self.kept_by(state, client, did_receive):
                    states[client] = kept
        task = TrainTask(
            state.round,
            state.weights,
            pool if self.method.objective.needs else None,
            self.setup.sizes(state.round),
            state.global_outputs,
            states,
            broadcast,
            keeps_uploads=any(callback.reads_uploads for callback in self.callbacks) or self._delays,
        )
        return BegunRound(state, task, cohort, drawn)

    def _download(
        self, state: RunState, cohort: np.ndarray, pool: Pool, has_model: np.ndarray, extras: int
    ) -> tuple[np.ndarray, RunState]:
        """Send the model, mean outputs, ``extras`` bytes of parts' server state and the pool to clients that lack them.

        Returns which clients received all of it, bool [cohort], and the state.
        """
        with self.log.time("download"):
            sharing, method, log = self.method.sharing, self.method, self.log
            weights = 0 if method.stateful_clients else bytes_of(self.setup.shared(state.weights))
            outputs = bytes_of(state.global_outputs) if any(term.outputs_kind for term in method.terms) else 0
            goes_to_clients = sharing.plan.to == "clients" and method.objective.needs
            pool_bytes = bytes_of(pool.tensors) if goes_to_clients else 0
            fresh, without_model = ~state.has_pool[cohort], ~np.isin(cohort, has_model)
            sizes = weights * without_model + outputs + extras + pool_bytes * fresh
            received = self.setup.transmit("down", "downlink", sizes, cohort, state.round, log)
            log.count("down", "weights", weights * int(without_model.sum()))
            log.count("down", method.upload.bytes_kind, outputs * len(cohort))
            log.count("down", "extras", extras * len(cohort))
            log.count("down", sharing.bytes_kind, pool_bytes * int(fresh.sum()))
            has_pool = state.has_pool.copy()
            has_pool[cohort[received]] = True
        return received, replace(state, has_pool=has_pool)

    def kept_by(self, state: RunState, client: int, did_receive: bool) -> ClientState:
        """Return a client's state at the start of a round; ``did_receive``: whether the round's model reached it.

        A client that keeps its own model, or did not receive the round's model, starts from the last one that it had.
        """
        kept = state.client_states.get(client)
        if kept is None and self._keeps:
            kept = first_client_state(self.method, self.setup.training, self.spec, state.weights)
        kept = kept or ClientState()
        if did_receive and not self.method.stateful_clients:
            return replace(kept, model={}, outputs={})
        model = kept.model or state.server_part(FIRST) or self.setup.weights()
        return replace(kept, model=model, outputs=(did_receive and state.global_outputs) or kept.outputs)

    def collect(self, begun: BegunRound) -> CohortResult:
        """Train the cohort; return what aggregation needs of the good uploads.

        Raises :class:`FedblendError` for fewer good uploads than the experiment's ``min_uploads``.
        """
        task, clients, log = begun.task, begun.cohort, self.log
        for callback in self.callbacks:
            callback.on_round_begin(begun.state, np.array(clients, np.int64))
        like = self.method.upload.like(self.setup.shared(task.weights), self.setup.task)
        size = self.experiment.protection.bytes_on_air(like) + bytes_of(
            exchanged(self.method, task.server_state, up=True)
        )
        sizes = np.full(len(clients), size)
        arrives = self.setup.transmit("up", "uplink", sizes, np.array(clients, np.int64), task.round, log)
        lost = {client for client, came in zip(clients, arrives.tolist(), strict=True) if not came}
        with log.time("aggregate"):
            result = self.train(task, clients, lost)
            if self._delays:
                result = delivered(self.setup, begun.state, task, result)
        log.computing = max((work.seconds for work in result.work.values()), default=0.0)
        log.seconds["aggregate"] -= result.seconds
        log.seconds["train"] += result.seconds
        log.count("up", self.method.upload.bytes_kind, result.sent)
        for (direction, kind), number in result.extra_bytes.items():
            log.count(direction, kind, number)
        self.require_enough(task, result)
        for callback in self.callbacks:
            callback.on_updates(task, result)
        return result

    def train(self, task: TrainTask, clients: list[int], lost: Collection[int]) -> CohortResult:
        """Have the engine train clients; the uploads of those that are ``lost``, or never in time, do not arrive."""
        work = {client: work_of(self.setup, task.round, client, int(task.sizes[client])) for client in clients}
        result = self.engine.collect(task, clients, {*lost, *(c for c, one in work.items() if one.delay is None)})
        result.cohort, result.lost, result.work = clients, lost, work
        return result

    def require_enough(self, task: TrainTask, result: CohortResult) -> None:
        """Raise :class:`FedblendError` for fewer good uploads than the experiment's ``min_uploads``."""
        if len(result.good) < self.experiment.min_uploads:
            missing = [{"client": client, "reason": "lost by the channel"} for client in sorted(result.lost)]
            late = [client for client, work in result.work.items() if work.delay != 0]
            missing += [{"client": client, "reason": "missed the deadline (slow)"} for client in late]
            reasons = _reasons([*result.refused, *missing]) or f"{len(result.cohort)} clients took part"
            raise FedblendError(
                f"round {task.round + 1}: {len(result.good)} good uploads of {len(result.cohort)}, but min_uploads is "
                f"{self.experiment.min_uploads} ({reasons}); {EARLIER}: remove the cause or lower min_uploads, and "
                "continue the run"
            )


def facts_of(result: CohortResult) -> dict[str, Any]:
    """Return what the round's record has of the uploads."""
    losses = [(n, loss) for _, n, loss in result.good if loss is not None]
    samples = sum(n for n, _ in losses)
    shares = [(n, result.measured[client]) for client, n, _ in result.good if client in result.measured]
    total = sum(n for n, _ in shares)
    names = dict.fromkeys(name for _, by_name in shares for name in by_name)
    return {
        "uploads": len(result.good),
        "cohort": result.cohort,
        "train_loss": sum(n * loss for n, loss in losses) / samples if samples else None,
        "measured": {name: sum(n * one.get(name, 0.0) for n, one in shares) / total for name in names} or None,
        "lost": sorted(result.lost) or None,
        "late": [client for client, work in result.work.items() if work.is_late] or None,
        "stale": result.stale or None,
        "refused": result.refused or None,
    }


def _reasons(refused: Sequence[dict[str, Any]]) -> str:
    """Return why uploads were refused, each reason once with its clients."""
    reasons = by_reason((one["client"], one["reason"]) for one in refused)
    return "; ".join(f"client{'s' if len(who) > 1 else ''} {listed(who)}: {why}" for why, who in reasons.items())


def awaited(state: RunState) -> dict[int, dict[str, torch.Tensor]]:
    """The late uploads that have not arrived, by client: ``due``, int64 [3], is the round in which one arrives, that in
    which it was made, and the client's samples; ``change/NAME`` is how far the client moved the model."""
    return by_client("", state.server_part(LATE))


def delivered(setup: Setup, state: RunState, task: TrainTask, result: CohortResult) -> CohortResult:
    """The result without the uploads that are late, and with earlier ones that arrive in this round.

    An upload that was made s rounds ago counts as w + (1 + s)^-a (w_k - w_then), with a the option ``staleness``: the
    client's change is added to the current model, weighted down (FedBuff, Nguyen et al. 2022, section 5: a = 1/2).
    Integer tensors are the current model's.
    """
    waiting, begun = awaited(state), setup.shared(task.weights)
    late = {client: delay for client, work in result.work.items() if (delay := work.delay)}
    arriving = {client: waiting.pop(client) for client in [*waiting] if int(waiting[client]["due"][0]) <= task.round}
    good = {client: (samples, loss) for client, samples, loss in result.good}
    uploads = dict(result.uploads)
    for client in late.keys() & good.keys():
        due = torch.tensor([task.round + late[client], task.round, good.pop(client)[0]])
        waiting[client] = {"due": due, **add_prefix("change/", changes(uploads.pop(client), begun))}
    for client, table in arriving.items():
        _, made, samples = table["due"].tolist()
        factor = (1 + task.round - made) ** -setup.experiment.slow.staleness
        good[client] = (samples, None)
        change = strip_prefix("change/", table)
        uploads[client] = moved(begun, begun, {name: factor * tensor for name, tensor in change.items()})
    if not (late or arriving):
        return result
    aggregator = aggregator_of(setup, task.round)
    return replace(
        result,
        good=[(client, *good[client]) for client in sorted(good)],
        uploads=uploads,
        stale=sorted(arriving),
        partial=aggregator.partial((uploads[c], aggregator.weigh(c, good[c][0])) for c in sorted(good)),
        awaited=for_clients("", waiting),
    )
