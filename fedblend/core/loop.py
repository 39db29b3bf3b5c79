"""The round loop: the only one there is. It asks an engine to run client work and knows not where clients live.

sharing (once, or again when due):  client.share -> server.pool -> what every client may use
every round:  cohort -> downlink -> client.train -> protection -> uplink -> aggregate -> server step
              -> evaluate -> record
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch

from fedblend.core.engine import CohortResult, Engine, TrainTask
from fedblend.core.errors import FedblendError, by_reason, listed
from fedblend.core.evaluation import evaluate, require_own_tests
from fedblend.core.protection import ReleaseContext
from fedblend.core.random import stream
from fedblend.core.record import CostMeter
from fedblend.core.server_step import ServerContext, Tensors
from fedblend.core.setup import Setup, cohort_of, model_spec, reference_device
from fedblend.core.sharing import Payload, Pool, gather, joined, rows_of
from fedblend.core.trees import add_prefix, strip_prefix
from fedblend.core.upload import bytes_of

T = TypeVar("T")
Record = dict[str, Any]


@dataclass(frozen=True)
class RunState:
    """All that a run carries from round to round; plain data, so a checkpoint is a file.

    ``entries`` are all entries shared so far, ``shared_round`` the round in which they were last renewed,
    ``has_pool`` says which clients have downloaded them since, ``shared_sizes`` how many samples each client
    had when it last shared. ``server`` is what the server step keeps (AggEnhance's points), ``said`` what the server
    says beside a model (mean outputs by label). ``own`` is what clients know who go on from weights of their own:
    ``weights/...`` and ``said/...`` as far as they have heard it, by client.
    """

    round: int
    weights: dict[str, torch.Tensor]
    has_pool: np.ndarray
    shared_sizes: np.ndarray
    entries: Pool = field(default_factory=lambda: gather({}))
    shared_round: int = -1
    server: dict[str, torch.Tensor] = field(default_factory=dict)
    said: dict[str, torch.Tensor] = field(default_factory=dict)
    own: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


class RoundLoop:
    """A run's rounds, as a function of plain state: ``state, record = federation.round(state)``."""

    def __init__(self, setup: Setup, engine: Engine) -> None:
        self.setup, self.engine = setup, engine
        self.experiment = setup.experiment
        self.method = setup.experiment.method
        self._pool: tuple[Pool, Pool] | None = None
        # Clients that hold samples do so in every round, also where more arrive.
        cohort, holding = self.experiment.train.cohort, int(np.count_nonzero(setup.population.sizes))
        if not holding:
            raise FedblendError(
                f"partition: none of its {len(setup.population)} clients hold samples; at least one must"
            )
        if cohort > holding:
            raise FedblendError(
                f"train.cohort: {cohort} clients a round, but only {holding} of {len(setup.population)} clients "
                f"hold samples; valid: 1 to {holding}"
            )
        if self.experiment.evaluate_model == "each":
            require_own_tests(setup)
        self.method.aggregator.require_possible(cohort)
        self.method.server_step.require_possible(model_spec(setup, engine.server_model()))
        setup.requests(setup.sizes(0))
        self.device = reference_device(setup)
        if self.method.objective.needs:
            minimum = 1 if self.experiment.unsafe else self.experiment.policy.min_mean
            self.method.sharing.require_possible(setup.sizes(0), minimum)

    def start(self, weights: dict[str, torch.Tensor] | None = None) -> tuple[RunState, Record]:
        """The state before the first round, and the record of the model then (round 0).

        ``weights`` are those of another run that this one begins with (:mod:`fedblend.runs.warm_start`).
        """
        if weights is None and self.experiment.start is not None:
            raise FedblendError(f"start: '{self.experiment.start}': this is made of a run's own first model only")
        clients = len(self.setup.population)
        state = RunState(0, weights or self.setup.weights(), np.zeros(clients, bool), np.zeros(clients, np.int64))
        account = CostMeter()
        return state, self._record(state, account, {})

    def round(self, state: RunState) -> tuple[RunState, Record]:
        """One round: share if due, train a cohort, aggregate, refine, evaluate."""
        account = CostMeter()
        sizes = self.setup.sizes(state.round)
        state, shared, informed = self._share_if_due(state, sizes, account)
        pool = self._pool_of(state)
        if self.method.server_step.needs_pool and not len(pool) and not self.experiment.channel.loses:
            raise FedblendError(
                f"method.sharing: '{self.method.sharing.name}': nothing came of what clients could share before round "
                f"{state.round + 1}, so that the server step '{self.method.server_step.name}' has nothing to work on; "
                "let clients hold two labels each, and send more seeds or coordinated ones: inverse mixing pairs seeds "
                "of the same two labels"
            )
        if self.method.objective.needs and not len(pool):
            raise FedblendError(
                f"method.sharing: '{self.method.sharing.name}': nothing was shared before round {state.round + 1}, "
                f"so that '{self.method.objective.name}' has nothing to mix with; let clients make larger means "
                f"(samples_per_mean, split), or lower policy.min_mean: {self.experiment.policy.min_mean}"
            )
        facts: Record = {}
        weights, said, own = state.weights, state.said, state.own
        if self.method.upload.trains_in(state.round):
            cohort = cohort_of(self.setup, state.round)
            heard, state = self._download(state, cohort, pool, informed, account)
            task, part = self._task(state, cohort, heard, pool, sizes)
            got, facts = self._train(task, part, account)
            weights, said = self._aggregate(task, got, len(part), account)
            own = state.own | self._kept_by_clients(task, got)
        weights, kept = self._refine(replace(state, said=said), weights, pool, account)
        facts |= self._change(state, weights, said, facts)
        state = replace(state, round=state.round + 1, weights=weights, server=kept, said=said, own=own)
        return state, self._record(state, account, {**facts, **shared})

    def _task(
        self, state: RunState, cohort: np.ndarray, heard: np.ndarray, pool: Pool, sizes: np.ndarray
    ) -> tuple[TrainTask, list[int]]:
        """What clients know when they begin, the round's model or what they had before; and which take part.

        One that has not received what its objective mixes with sits the round out.
        """
        needs, said = self.method.objective.needs, add_prefix("said/", state.said)
        own, part = {}, []
        for client, hears in zip(cohort.tolist(), heard.tolist(), strict=True):
            if needs and not state.has_pool[client]:
                continue
            part.append(client)
            if self.method.stateful_clients or not hears:
                had = state.own.get(client) or add_prefix("weights/", self.setup.weights())
                own[client] = had | (said if hears else {})
        return TrainTask(state.round, state.weights, pool if needs else None, sizes, state.said, own), part

    def _kept_by_clients(self, task: TrainTask, got: CohortResult) -> dict[int, dict[str, torch.Tensor]]:
        """What the round's clients know from now on, where they may go on from it."""
        tables = {c: add_prefix("weights/", w) | add_prefix("said/", task.said_to(c)) for c, w in got.own.items()}
        # Copies: a client's may be a view of all clients of a stack, which would live as long as it.
        return {c: {name: t.clone() for name, t in table.items()} for c, table in tables.items()}

    def _refine(
        self, state: RunState, weights: dict[str, torch.Tensor], pool: Pool, account: CostMeter
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """What the server makes of the aggregate, and what it keeps for the next round."""
        step, setup = self.method.server_step, self.setup
        if not step.active:
            return weights, {}
        with account.time("server"):
            server = ServerContext(
                **vars(model_spec(setup, self.engine.server_model())),
                round=state.round,
                lr=self.experiment.train.lr_in(state.round),
                rng=stream(self.experiment.seed, "server", state.round),
                ask=lambda question: self._ask(question, account),
                state=state.server,
                prior=setup.prior,
                said=state.said,
                pool=pool,
            )
            return step.refine(weights, server)

    def _ask(self, question: Tensors, account: CostMeter) -> list[Payload]:
        """A server step's question to the clients whose uploads were good; answers that are not finite are dropped."""
        answers = []
        for _, answer in self.engine.ask(question):
            if self.method.server_step.queries_clients:
                account.count("down", "questions", bytes_of(question))
                account.count("up", "answers", bytes_of(answer))
            if self._fault_of_payload(answer) is None:
                answers.append(answer)
        return answers

    def _share_if_due(
        self, state: RunState, sizes: np.ndarray, account: CostMeter
    ) -> tuple[RunState, Record, np.ndarray]:
        """Ask the clients whose data are new to share, if it is time to (MAFL, Algorithm 1; section 3.4).

        Returns the state, what was asked and sent, and the clients that were given the round's model for it.
        """
        sharing, round = self.method.sharing, state.round
        nobody = np.empty(0, np.int64)
        if not sharing.active:
            return state, {}, nobody
        new = (sizes != state.shared_sizes) if not sharing.each_round else sizes > 0
        wanted = sharing.refresh is not None and new.sum() >= max(1, sharing.refresh * len(sizes))
        # What was lost on the way is sent again until it arrives.
        wanted |= self.experiment.channel.loses and bool((new & (state.shared_sizes == 0)).any())
        if not (round == 0 or sharing.each_round or wanted):
            return state, {}, nobody
        payloads: dict[int, Payload] = {}
        refused = []
        with account.time("share"):
            asked = np.flatnonzero(new & (np.arange(len(new)) != sharing.server))
            given = dict(self.engine.share(round, state.weights, asked.tolist(), sizes))
            bytes_given = np.array([bytes_of(payload) for payload in given.values()], np.int64) * sharing.leaves_client
            arrives = self._sent("up", "share-uplink", bytes_given, np.array([*given], np.int64), round, account)
            account.count("up", sharing.bytes_kind, int(bytes_given.sum()))
            lost = [client for client, came in zip(given, arrives.tolist(), strict=True) if not came]
            for client, payload in given.items():
                if client in lost:
                    continue
                fault = self._fault_of_payload(payload)
                if fault:
                    refused.append({"client": client, "reason": fault})
                    continue
                payloads[client] = payload
            if sharing.each_round:
                account.count("down", "weights", len(asked) * bytes_of(state.weights))
            kept = rows_of(state.entries, ~np.isin(state.entries.owner, asked))
            entries = joined(kept, gather(payloads))
        state = replace(
            state,
            entries=entries,
            shared_round=round,
            has_pool=np.zeros_like(state.has_pool),
            shared_sizes=np.where(new & ~np.isin(np.arange(len(sizes)), lost), sizes, state.shared_sizes),
        )
        facts: Record = {"shared": {"asked": len(asked), "sent": len(payloads), "entries": len(entries)}}
        if lost:
            facts["shared"]["lost"] = lost
        if refused:
            facts["shared"]["refused"] = refused
        return state, facts, asked if sharing.each_round else nobody

    def _fault_of_payload(self, payload: Payload) -> str | None:
        for name, tensor in payload.items():
            if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
                return f"'{name}' holds NaN or infinity"
        return None

    def _pool_of(self, state: RunState) -> Pool:
        """What the server makes of the entries; kept until they are others."""
        if self._pool is None or self._pool[0] is not state.entries:
            rng = stream(self.experiment.seed, "pool", max(0, state.shared_round))
            sharing, base = self.method.sharing, self.setup.base(state.shared_sizes)
            if sharing.secure_aggregated:
                made = sharing.pool_of_sums(state.entries, np.flatnonzero(state.shared_sizes), rng)
            elif base is None:
                made = sharing.pool(state.entries, rng)
            else:
                made = sharing.pool_beside(state.entries, base, rng)
            self._pool = (state.entries, made)
        return self._pool[1]

    def _download(
        self, state: RunState, cohort: np.ndarray, pool: Pool, informed: np.ndarray, account: CostMeter
    ) -> tuple[np.ndarray, RunState]:
        """Send what clients do not have yet: the model, what is said, the pool; returns which of them heard it."""
        with account.time("download"):
            sharing, method = self.method.sharing, self.method
            weights = 0 if method.stateful_clients else bytes_of(state.weights)
            said = bytes_of(state.said) if any(term.uses_outputs for term in method.terms) else 0
            pool_bytes = (
                bytes_of(pool.tensors) if sharing.active and sharing.leaves_client and not sharing.for_server else 0
            )
            fresh, without_model = ~state.has_pool[cohort], ~np.isin(cohort, informed)
            sizes = weights * without_model + said + pool_bytes * fresh
            heard = self._sent("down", "downlink", sizes, cohort, state.round, account)
            account.count("down", "weights", weights * int(without_model.sum()))
            account.count("down", method.upload.bytes_kind, said * len(cohort))
            account.count("down", sharing.bytes_kind, pool_bytes * int(fresh.sum()))
            has_pool = state.has_pool.copy()
            has_pool[cohort[heard]] = True
        return heard, replace(state, has_pool=has_pool)

    def _sent(
        self, direction: str, purpose: str, sizes: np.ndarray, clients: np.ndarray, round: int, account: CostMeter
    ) -> np.ndarray:
        """Which of some clients' transmissions of so many bytes arrive; the round lasts as long as the slowest."""
        sent = self.experiment.channel.transmit(direction, sizes, stream(self.experiment.seed, purpose, round), clients)
        account.wait(direction, float(sent.seconds.max(initial=0.0)))
        return sent.arrives

    def _train(self, task: TrainTask, clients: list[int], account: CostMeter) -> tuple[CohortResult, Record]:
        """Train clients, and keep of what arrives and is sound what aggregation needs."""
        size = bytes_of(self.method.upload.like(task.weights, self.setup.task))
        sizes = np.full(len(clients), size)
        arrives = self._sent("up", "uplink", sizes, np.array(clients, np.int64), task.round, account)
        lost = {client for client, came in zip(clients, arrives.tolist(), strict=True) if not came}
        with account.time("aggregate"):
            got = self.engine.collect(task, clients, lost)
        account.seconds["aggregate"] -= got.seconds
        account.seconds["train"] += got.seconds
        account.count("up", self.method.upload.bytes_kind, got.sent)
        for (direction, what), number in got.beside.items():
            account.count(direction, what, number)
        if len(got.good) < self.experiment.min_uploads:
            reasons = _in_one_line(got.refused) or "none arrived"
            raise FedblendError(
                f"round {task.round + 1}: {len(got.good)} good uploads of {len(clients)}, but min_uploads is "
                f"{self.experiment.min_uploads} ({reasons})"
            )
        facts: Record = {"uploads": len(got.good), "cohort": clients}
        if samples := sum(n for _, n, _ in got.good):
            facts["train_loss"] = sum(n * loss for _, n, loss in got.good) / samples
        if lost:
            facts["lost"] = sorted(lost)
        if got.refused:
            facts["refused"] = got.refused
        return got, facts

    def _aggregate(
        self, task: TrainTask, got: CohortResult, asked: int, account: CostMeter
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The next model, and what the server says beside one: the aggregate of uploads is one or the other."""
        weights, said, kind = dict(task.weights), dict(task.said), self.method.upload
        if not got.good:
            return weights, said
        with account.time("aggregate"):
            aggregator = kind.aggregator(self.method.aggregator)
            if not kind.is_model:
                return weights, aggregator.finish(got.partial, task.weights)
            # Rounded after the server's noise, which is sized for the sum: a rounded one may be further from another.
            made = aggregator.finish(aggregator.unrounded(got.partial), task.weights)
            # Whoever knows the experiment knows all its streams: real sites must not be able to take noise off again.
            keyed = stream(self.experiment.seed, "release", task.round)
            rng = np.random.default_rng() if self.engine.secret_noise else keyed
            drawn = ReleaseContext(asked, len(got.good), self.experiment.train.lr_in(task.round), rng)
            released = self.experiment.protection.release(made, task.weights, drawn)
            return {name: tensor.to(weights[name].dtype) for name, tensor in released.items()}, said

    def _judged(self, state: RunState) -> Tensors:
        """The weights that are evaluated: the server's, or those that the reference device has after its training."""
        if not self.experiment.evaluates_device:
            return state.weights
        return strip_prefix("weights/", state.own.get(self.device, add_prefix("weights/", state.weights)))

    def _own_models(self, state: RunState) -> dict[int, Tensors] | None:
        """The weights that clients have of their own, where each is judged by its own."""
        if self.experiment.evaluate_model != "each":
            return None
        return {client: strip_prefix("weights/", table) for client, table in state.own.items()}

    def _clock(self, state: RunState, account: CostMeter) -> Record:
        """Seconds of a round whose clients compute side by side: on the air, and in computing if that is fixed."""
        told: Record = {"channel": dict(account.channel)} if account.channel else {}
        if self.experiment.compute_seconds is not None and state.round:
            told["computing"] = self.experiment.compute_seconds
        return told

    def _change(self, state: RunState, weights: Tensors, said: Tensors, facts: Record) -> Record:
        """How far a round has moved what it is about, and whether that is little enough to stop.

        Mix2FLD's rule (section II): |w - w'| / |w'| for models; of mean outputs the largest such number of any label.
        A round of which nothing got through has moved nothing, and says nothing of convergence.
        """
        bound = self.experiment.convergence_tol
        if bound is None:
            return {}
        if self.method.upload.is_model:
            old, new = (
                torch.cat([t.flatten().double() for t in one.values()])[None] for one in (state.weights, weights)
            )
        else:
            old, new = (one.get("outputs", torch.zeros(1, 1)).double() for one in (state.said, said))
        change = float(((new - old).norm(dim=1) / old.norm(dim=1)).nan_to_num(nan=0.0, posinf=torch.inf).max())
        converged = change < bound and facts.get("uploads") != 0
        return {"change": change if np.isfinite(change) else None, "converged": converged}

    def _record(self, state: RunState, account: CostMeter, facts: Record) -> Record:
        """One line of metrics; fields that differ between machines stand under ``machine``."""
        record: Record = {"round": state.round}
        last = state.round >= self.experiment.rounds or facts.get("converged")
        if state.round % self.experiment.eval_every == 0 or last:
            with account.time("evaluate"):
                record |= evaluate(self.engine, self._judged(state), self.setup, self._own_models(state))
        record |= facts
        record |= self._clock(state, account)
        record["bytes_up"] = dict(account.bytes["up"])
        record["bytes_down"] = dict(account.bytes["down"])
        record["machine"] = {"seconds": {k: round(v, 4) for k, v in account.seconds.items()}}
        if "channel" in record and "computing" not in record:
            # Side by side at the clients, one after another here.
            alone = account.seconds["train"] / max(1, len(facts.get("cohort", ())))
            record["machine"]["computing"] = round(alone + account.seconds["server"] + account.seconds["aggregate"], 4)
        return record


def _in_one_line(refused: list[Record]) -> str:
    """Why uploads were refused; a reason that several clients share is told once."""
    reasons = by_reason((r["client"], r["reason"]) for r in refused)
    return "; ".join(f"client{'s' if len(who) > 1 else ''} {listed(who)}: {why}" for why, who in reasons.items())
