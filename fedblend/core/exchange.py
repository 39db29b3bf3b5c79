"""The round loop's steps of sharing: who is due, what arrives, and the pool that the server makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedblend.core.context import ModelSpec
from fedblend.core.engine import Engine
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.record import RoundLog
from fedblend.core.setup import Experiment, Setup
from fedblend.core.sharing import Payload, Pool, Shares, gather, joined, rows_of
from fedblend.core.state import RunState
from fedblend.core.trees import Tensors, bytes_of
from fedblend.core.upload import finite_fault


class Exchange:
    """A run's sharing. A ``cohort`` is that of the round, for a sharing of the cohort only."""

    def __init__(self, setup: Setup, engine: Engine, spec: ModelSpec, log: RoundLog) -> None:
        self.setup, self.engine, self.spec, self.log = setup, engine, spec, log
        self.experiment: Experiment = setup.experiment
        self.method, self.plan = setup.method, setup.method.sharing.plan
        self._pool: tuple[Pool, Pool] | None = None
        self._sent: tuple[Pool, Pool] | None = None

    def share_if_due(
        self, state: RunState, sizes: np.ndarray, cohort: np.ndarray | Sequence[int] = ()
    ) -> tuple[RunState, np.ndarray]:
        """Have the clients with new data share, if sharing is due (MAFL, Algorithm 1; section 3.4).

        All clients share where it depends on the model, ``state.weights``. Returns the state, and the clients that
        received the model for it; notes the record's field ``shared``.
        """
        nobody = np.empty(0, np.int64)
        if not self.plan.active or self.plan.who == "server" or (due := self._clients_due(state, sizes)) is None:
            return state, nobody
        with self.log.time("share"):
            shares = self._collect_shares(state.round, state.weights, due, sizes, cohort)
            state = self._store_shares(state, shares, due, sizes)
        self.log.note(shared=shares.facts(len(state.entries)))
        return state, shares.asked[shares.reached] if self.plan.sees_model else nobody

    def _clients_due(self, state: RunState, sizes: np.ndarray) -> np.ndarray | None:
        """Which clients have data that they have not shared, bool [clients]; ``None`` where no sharing is due."""
        sharing = self.method.sharing
        new = (sizes != state.shared_sizes) if not self.plan.sees_model else sizes > 0
        wanted = sharing.refresh is not None and new.sum() >= max(1, sharing.refresh * len(sizes))
        # A first payload that was lost is sent again until it arrives.
        wanted |= self.experiment.channel.loses and bool((new & (state.shared_sizes == 0)).any())
        due = sharing.shares_in(state.round, self.experiment.rounds) or (wanted and not self.plan.after_training)
        return new if due else None

    def _collect_shares(
        self, round: int, weights: Tensors, due: np.ndarray, sizes: np.ndarray, cohort: np.ndarray | Sequence[int]
    ) -> Shares:
        """Ask the clients that are ``due`` for their payloads; count the bytes, and check what arrives."""
        sharing = self.method.sharing
        asked = np.flatnonzero(due & (np.arange(len(due)) != sharing.server))
        if self.plan.who == "cohort":
            asked = np.intersect1d(asked, cohort)
        reached = np.ones(len(asked), bool)
        if self.plan.sees_model:
            model = np.full(len(asked), bytes_of(self.setup.shared(weights)))
            reached = self.setup.transmit("down", "share-downlink", model, asked, round, self.log)
            self.log.count("down", "weights", int(model.sum()))
        replies = dict(self.engine.share(round, weights, asked[reached].tolist(), sizes))
        given = {client: reply for client, reply in replies.items() if not isinstance(reply, str)}
        refused = [{"client": c, "reason": reply} for c, reply in replies.items() if isinstance(reply, str)]
        sizes_given = np.array([bytes_of(payload) for payload in given.values()], np.int64) * self.plan.leaves
        arrives = self.setup.transmit("up", "share-uplink", sizes_given, np.array([*given], np.int64), round, self.log)
        self.log.count("up", sharing.bytes_kind, int(sizes_given.sum()))
        lost = asked[~reached].tolist()
        lost += [client for client, came in zip(given, arrives.tolist(), strict=True) if not came]
        payloads: dict[int, Payload] = {}
        for client, payload in given.items():
            if client in lost:
                continue
            if fault := finite_fault(payload) or sharing.fault(payload, int(sizes[client]), self.spec):
                refused.append({"client": client, "reason": fault})
            else:
                payloads[client] = payload
        return Shares(asked, reached, payloads, sorted(lost), refused)

    def _store_shares(self, state: RunState, shares: Shares, due: np.ndarray, sizes: np.ndarray) -> RunState:
        """Replace the entries of the clients that were asked; no client has the new pool yet.

        A client whose payload is lost keeps its earlier entries, except those that depend on an earlier model.
        """
        replaced = shares.asked if self.plan.sees_model else np.setdiff1d(shares.asked, shares.lost)
        is_kept = ~np.isin(state.entries.owner, replaced) & (self.plan.who != "cohort")
        has_shared = due & ~np.isin(np.arange(len(sizes)), shares.lost)
        return replace(
            state,
            entries=joined(rows_of(state.entries, is_kept), gather(shares.payloads)),
            shared_round=state.round,
            has_pool=np.zeros_like(state.has_pool),
            shared_sizes=np.where(has_shared, sizes, state.shared_sizes),
        )

    def pool_of(self, state: RunState) -> Pool:
        """Return the pool that the server makes of all entries; cached until entries change."""
        if self._pool is None or self._pool[0] is not state.entries:
            rng = stream(self.experiment.seed, "pool", max(0, state.shared_round))
            pool = self.setup.pool(self.spec, state.entries, state.shared_sizes, rng)
            self._pool = (state.entries, pool)
        return self._pool[1]

    def pool_for_clients(self, state: RunState) -> Pool:
        """Return the part of the pool that clients may receive; cached until the pool changes.

        Raises :class:`FedblendError` if the pool lacks what the objective or the server step needs.
        """
        pool = self.pool_of(state)
        if self._sent is None or self._sent[0] is not pool:
            self._sent = (pool, self.setup.pool_for_clients(pool))
        sent, round = self._sent[1], state.round
        sharing, step, objective = self.method.sharing, self.method.server_step, self.method.objective
        if step.needs_pool and not len(pool) and not self.experiment.channel.loses:
            raise self._nothing_shared(f"the server step '{step.name}' has nothing to work on", round)
        if objective.needs and not len(sent):
            raise self._nothing_shared(f"'{objective.name}' has nothing to mix with", round)
        for field, part in (("objective", objective), ("server_step", step)):
            if len(pool) and (lacking := sorted({*part.needs} - {*pool.tensors})):
                raise FedblendError(
                    f"method.sharing: '{sharing.name}' shares {', '.join(pool.tensors)}, but method.{field} "
                    f"'{part.name}' needs {', '.join(lacking)}; valid: a sharing of these, such as means (x, y) or "
                    "channel-statistics (mean, std)"
                )
        return sent

    def pool_for_step(self, state: RunState) -> Pool | None:
        """Return the pool for the server step; ``None`` where its entries are of an earlier round's model."""
        is_old = self.plan.after_training and state.shared_round != state.round
        return None if is_old else self.pool_of(state)

    def _nothing_shared(self, effect: str, round: int) -> FedblendError:
        """The error for an empty pool, with its ``effect`` and what would fill it."""
        sharing, channel = self.method.sharing, self.experiment.channel
        advice = sharing.if_empty.format(min_mean=self.experiment.policy.min_mean)
        if channel.loses:
            advice = f"the channel '{channel.name}' may have lost all of it; take one that loses less, or {advice}"
        return FedblendError(
            f"method.sharing: '{sharing.name}': nothing was shared before round {round + 1}, so that {effect}; {advice}"
        )
