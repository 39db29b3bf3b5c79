"""The round loop: the only one there is. It asks an engine to run client work and knows not where clients live.

sharing (once, or again when due):  client.share -> server.pool -> what every client may use
every round:  cohort -> downlink -> client.train -> protection -> uplink -> aggregate -> server step
              -> evaluate -> record
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fedblend.aggregators.base import Upload
from fedblend.engines import Engine, TrainTask
from fedblend.errors import FedblendError, by_reason, listed
from fedblend.evaluation import evaluate
from fedblend.protection import Round
from fedblend.random import stream
from fedblend.server_steps import Server
from fedblend.server_steps.base import Tensors
from fedblend.sharing.base import Payload, Pool, gather, rows_of
from fedblend.uploads import bytes_of
from fedblend.world import World, known_of

T = TypeVar("T")
Record = dict[str, Any]


@dataclass(frozen=True)
class State:
    """All that a run carries from round to round; plain data, so a checkpoint is a file.

    ``entries`` are all entries shared so far, ``shared_round`` the round in which they were last renewed,
    ``holders`` says which clients have downloaded them since, ``shared_sizes`` how many samples each client
    had when it last shared. ``server`` is what the server step keeps (AggEnhance's points).
    """

    round: int
    weights: dict[str, torch.Tensor]
    holders: np.ndarray
    shared_sizes: np.ndarray
    entries: Pool = field(default_factory=lambda: gather({}))
    shared_round: int = -1
    server: dict[str, torch.Tensor] = field(default_factory=dict)


class Account:
    """What one round costs: seconds by phase, bytes by direction and kind."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, dict[str, int]] = {"up": defaultdict(int), "down": defaultdict(int)}

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the time spent inside to ``phase``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start

    def count(self, direction: str, kind: str, number: int) -> None:
        """Count bytes sent "up" or "down"."""
        if number:
            self.bytes[direction][kind] += int(number)


class Federation:
    """A run's rounds, as a function of plain state: ``state, record = federation.round(state)``."""

    def __init__(self, world: World, engine: Engine) -> None:
        self.world, self.engine = world, engine
        self.experiment = world.experiment
        self.method = world.experiment.method
        self._pool: tuple[Pool, Pool] | None = None
        # Clients that hold samples do so in every round, also where more arrive.
        self._holding = np.flatnonzero(world.population.sizes)
        cohort, holding = self.experiment.train.cohort, len(self._holding)
        if not holding:
            raise FedblendError(
                f"partition: none of its {len(world.population)} clients hold samples; at least one must"
            )
        if cohort > holding:
            raise FedblendError(
                f"train.cohort: {cohort} clients a round, but only {holding} of {len(world.population)} clients "
                f"hold samples; valid: 1 to {holding}"
            )
        self.method.aggregator.require_possible(cohort)
        self.method.server_step.require_possible(known_of(world, engine.server_model()))
        if self.method.objective.needs:
            minimum = 1 if self.experiment.unsafe else self.experiment.policy.min_mean
            self.method.sharing.require_possible(world.sizes(0), minimum)

    def start(self) -> tuple[State, Record]:
        """The state before the first round, and the record of the untrained model (round 0)."""
        clients = len(self.world.population)
        state = State(0, self.world.weights(), np.zeros(clients, bool), np.zeros(clients, np.int64))
        account = Account()
        return state, self._record(state, account, {})

    def round(self, state: State) -> tuple[State, Record]:
        """One round: share if due, train a cohort, aggregate, refine, evaluate."""
        account = Account()
        sizes = self.world.sizes(state.round)
        state, shared, informed = self._share_if_due(state, sizes, account)
        pool = self._pool_of(state)
        if self.method.objective.needs and not len(pool):
            raise FedblendError(
                f"method.sharing: '{self.method.sharing.name}': nothing was shared before round {state.round + 1}, "
                f"so that '{self.method.objective.name}' has nothing to mix with; let clients make larger means "
                f"(samples_per_mean, split), or lower policy.min_mean: {self.experiment.policy.min_mean}"
            )
        cohort = self._cohort(state.round)
        cohort, state = self._download(state, cohort, pool, informed, account)
        task = TrainTask(state.round, state.weights, pool if self.method.objective.needs else None, sizes)
        weights, facts, uploads = self._train(task, cohort, account)
        weights, kept = self._refine(state, weights, uploads, account)
        state = replace(state, round=state.round + 1, weights=weights, server=kept)
        return state, self._record(state, account, {**facts, **shared})

    def _refine(
        self, state: State, weights: dict[str, torch.Tensor], uploads: Sequence[Upload], account: Account
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What the server makes of the aggregate, and what it keeps for the next round."""
        step, world = self.method.server_step, self.world
        if not step.active:
            return weights, {}
        with account.time("server"):
            server = Server(
                **vars(known_of(world, self.engine.server_model())),
                round=state.round,
                lr=self.experiment.train.lr_in(state.round),
                rng=stream(self.experiment.seed, "server", state.round),
                uploads=uploads,
                ask=lambda question: self._ask(question, account),
                state=state.server,
                prior=world.prior,
            )
            return step.refine(weights, server)

    def _ask(self, question: Tensors, account: Account) -> list[Payload]:
        """A server step's question to the clients whose uploads were good; answers that are not finite are dropped."""
        answers = []
        for _, answer in self.engine.ask(question):
            account.count("down", "questions", bytes_of(question))
            account.count("up", "answers", bytes_of(answer))
            if self._fault_of_payload(answer) is None:
                answers.append(answer)
        return answers

    def _share_if_due(self, state: State, sizes: np.ndarray, account: Account) -> tuple[State, Record, np.ndarray]:
        """Ask the clients whose data are new to share, if it is time to (MAFL, Algorithm 1; section 3.4).

        Returns the state, what was asked and sent, and the clients that were given the round's model for it.
        """
        sharing, round = self.method.sharing, state.round
        nobody = np.empty(0, np.int64)
        if not sharing.active:
            return state, {}, nobody
        new = (sizes != state.shared_sizes) if not sharing.each_round else sizes > 0
        wanted = sharing.refresh is not None and new.sum() >= max(1, sharing.refresh * len(sizes))
        if not (round == 0 or sharing.each_round or wanted):
            return state, {}, nobody
        payloads: dict[int, Payload] = {}
        refused = []
        with account.time("share"):
            asked = np.flatnonzero(new)
            for client, payload in self.engine.share(round, state.weights, asked.tolist(), sizes):
                fault = self._fault_of_payload(payload)
                if fault:
                    refused.append({"client": client, "reason": fault})
                    continue
                payloads[client] = payload
                if sharing.travels:
                    account.count("up", sharing.bytes_kind, bytes_of(payload))
            if sharing.each_round:
                account.count("down", "weights", len(asked) * bytes_of(state.weights))
            kept = rows_of(state.entries, ~np.isin(state.entries.owner, asked))
            entries = _in_order(kept, gather(payloads))
        state = replace(
            state,
            entries=entries,
            shared_round=round,
            holders=np.zeros_like(state.holders),
            shared_sizes=np.where(new, sizes, state.shared_sizes),
        )
        facts: Record = {"shared": {"asked": len(asked), "sent": len(payloads), "entries": len(entries)}}
        if refused:
            facts["shared"]["refused"] = refused
        return state, facts, asked if sharing.each_round else nobody

    def _fault_of_payload(self, payload: Payload) -> str | None:
        for name, tensor in payload.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f"'{name}' holds NaN or infinity"
        return None

    def _pool_of(self, state: State) -> Pool:
        """What the server makes of the entries; kept until they are others."""
        if self._pool is None or self._pool[0] is not state.entries:
            rng = stream(self.experiment.seed, "pool", max(0, state.shared_round))
            self._pool = (state.entries, self.method.sharing.pool(state.entries, rng))
        return self._pool[1]

    def _cohort(self, round: int) -> np.ndarray:
        """The clients of a round: uniform without replacement among those that hold samples, in order."""
        rng = stream(self.experiment.seed, "cohort", round)
        return np.sort(rng.choice(self._holding, self.experiment.train.cohort, replace=False, shuffle=False))

    def _download(
        self, state: State, cohort: np.ndarray, pool: Pool, informed: np.ndarray, account: Account
    ) -> tuple[np.ndarray, State]:
        """Send the model and the pool to those that do not have them yet; returns who received them."""
        with account.time("download"):
            sharing = self.method.sharing
            weights = bytes_of(state.weights)
            pool_bytes = bytes_of(pool.tensors) if sharing.active and sharing.travels else 0
            fresh, without_model = ~state.holders[cohort], ~np.isin(cohort, informed)
            rng = stream(self.experiment.seed, "downlink", state.round)
            arrives = self.experiment.channel.delivers("down", weights * without_model + pool_bytes * fresh, rng)
            account.count("down", "weights", weights * int(without_model.sum()))
            account.count("down", sharing.bytes_kind, pool_bytes * int(fresh.sum()))
            holders = state.holders.copy()
            holders[cohort[arrives]] = True
        return cohort[arrives], replace(state, holders=holders)

    def _train(
        self, task: TrainTask, cohort: np.ndarray, account: Account
    ) -> tuple[dict[str, torch.Tensor], Record, Sequence[Upload]]:
        """Train the cohort and aggregate what arrives and is sound; uploads come along if the server step asks."""
        uplink = stream(self.experiment.seed, "uplink", task.round)
        arrives = self.experiment.channel.delivers("up", np.full(len(cohort), bytes_of(task.weights)), uplink)
        lost = set(cohort[~arrives].tolist())

        with account.time("aggregate"):
            got = self.engine.collect(task, cohort.tolist(), lost)
        account.seconds["aggregate"] -= got.seconds
        account.seconds["train"] += got.seconds
        account.count("up", "weights", got.sent)
        if len(got.good) < self.experiment.min_uploads:
            reasons = _in_one_line(got.refused) or "none arrived"
            raise FedblendError(
                f"round {task.round + 1}: {len(got.good)} good uploads of {len(cohort)}, but min_uploads is "
                f"{self.experiment.min_uploads} ({reasons})"
            )
        with account.time("aggregate"):
            weights = self.method.aggregator.finish(got.partial, task.weights)
            rng = stream(self.experiment.seed, "release", task.round)
            drawn = Round(len(cohort), len(got.good), self.experiment.train.lr_in(task.round), rng)
            weights = self.experiment.protection.release(weights, task.weights, drawn)
        samples = sum(n for _, n, _ in got.good)
        facts: Record = {
            "train_loss": sum(n * loss for _, n, loss in got.good) / samples,
            "uploads": len(got.good),
            "cohort": cohort.tolist(),
        }
        if got.refused:
            facts["refused"] = got.refused
        return weights, facts, got.uploads

    def _record(self, state: State, account: Account, facts: Record) -> Record:
        """One line of metrics; fields that differ between machines stand under ``machine``."""
        record: Record = {"round": state.round}
        if state.round % self.experiment.eval_every == 0 or state.round >= self.experiment.rounds:
            with account.time("evaluate"):
                record |= evaluate(self.engine, state.weights, self.world)
        record |= facts
        record["bytes_up"] = dict(account.bytes["up"])
        record["bytes_down"] = dict(account.bytes["down"])
        record["machine"] = {"seconds": {k: round(v, 4) for k, v in account.seconds.items()}}
        return record


def _in_one_line(refused: list[Record]) -> str:
    """Why uploads were refused; a reason that several clients share is told once."""
    reasons = by_reason((r["client"], r["reason"]) for r in refused)
    return "; ".join(f"client{'s' if len(who) > 1 else ''} {listed(who)}: {why}" for why, who in reasons.items())


def _in_order(kept: Pool, new: Pool) -> Pool:
    """Entries kept and entries renewed, in order of client."""
    if not len(kept) or not len(new):
        return new if len(new) else kept
    both = Pool(
        {name: torch.cat([kept.tensors[name], new.tensors[name]]) for name in new.tensors},
        np.concatenate([kept.owner, new.owner]),
    )
    return rows_of(both, np.argsort(both.owner, kind="stable"))
