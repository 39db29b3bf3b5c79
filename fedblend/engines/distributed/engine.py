"""The distributed engine: clients spread over processes, on one machine or on many."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from fedblend.core.aggregator import WeightedUpload
from fedblend.core.engine import ClientUpdate, CohortResult, Scores, Tensors, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.sharing import Payload, Pool
from fedblend.core.trees import by_client, in_order, strip_prefix
from fedblend.engines.distributed.processes import RankProcesses
from fedblend.engines.distributed.ranks import Ranks, is_about_connection
from fedblend.engines.distributed.serialization import (
    kept_uploads,
    payloads_of,
    reduced,
    score_tensors,
    task_tensors,
    uploads_of,
)
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.config import as_table
from fedblend.methods.aggregators.mean import Sums


class DistributedEngine:
    """Runs its own share of the clients on an engine of its own, and tells other ranks to run theirs.

    Only this process, rank 0, runs the round loop. Weighted sums are reduced over the ranks; where an aggregator
    needs every upload, they are gathered one by one.
    """

    secret_noise = False

    def __init__(
        self, setup: Setup, inner: LoopEngine, ranks: Ranks, choice: dict[str, Any], processes: RankProcesses
    ) -> None:
        self.setup, self.inner, self.ranks, self.processes = setup, inner, ranks, processes
        self._sent_pool: Pool | None = None
        self._exchanging = False
        with self._one_rank_may_fail():
            ranks.broadcast({"do": "begin", "experiment": as_table(setup.experiment), "choice": choice})

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload]]:
        """Ask clients to share, each rank its part of them."""
        asked = list(clients)
        with self._one_rank_may_fail():
            self.ranks.broadcast({"do": "share", "round": round, "clients": asked}, dict(weights))
            found = dict(self.inner.share(round, weights, asked[:: self.ranks.size], sizes))
            for rank in range(1, self.ranks.size):
                found |= payloads_of(*self.ranks.recv_from(rank))
        yield from ((client, found[client]) for client in asked if client in found)

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[ClientUpdate]:
        """Train clients in this process; a round's cohort goes through :meth:`collect`."""
        return self.inner.train(task, clients)

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> CohortResult:
        """Train the clients, each rank its share, and bring together what the aggregator needs."""
        shares = balance([int(task.sizes[client]) for client in clients], self.ranks.size)
        groups = [[c for c, rank in zip(clients, shares, strict=True) if rank == r] for r in range(self.ranks.size)]
        new_pool = task.pool is not self._sent_pool
        with self._one_rank_may_fail():
            self.ranks.broadcast(
                {
                    "do": "collect",
                    "round": task.round,
                    "groups": groups,
                    "lost": sorted(lost),
                    "pool": (task.pool is not None) if new_pool else "as before",
                },
                task_tensors(task, new_pool),
            )
            self._sent_pool = task.pool
            result = self.inner.collect(task, groups[0], lost)
            uploads, weight = kept_uploads(result), 0.0
            for rank in range(1, self.ranks.size):
                words, tensors = self.ranks.recv_from(rank)
                result.good += [tuple(one) for one in words["good"]]
                result.refused += words["refused"]
                result.sent += words["sent"]
                uploads += [(in_order(upload, task.weights), n) for upload, n in uploads_of(words, tensors)]
                weight += words["weight"]
                result.client_states |= by_client("client/", tensors)
                result.add_extras(strip_prefix("extras/", tensors))
                for direction, kind, number in words["extra_bytes"]:
                    before = result.extra_bytes.get((direction, kind), 0)
                    result.extra_bytes[direction, kind] = before + number
            if isinstance(result.partial, Sums):
                result.partial = reduced(self.ranks, result.partial, weight, task.weights)
        return _sorted(result, uploads, clients)

    def query(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Put the server step's question to the clients, each rank to its own; answers in order of client."""
        with self._one_rank_may_fail():
            self.ranks.broadcast({"do": "query"}, dict(question))
            found = dict(self.inner.query(question))
            for rank in range(1, self.ranks.size):
                found |= payloads_of(*self.ranks.recv_from(rank))
        yield from sorted(found.items(), key=lambda one: one[0])

    def score(self, weights: Tensors, held: bool = False) -> Scores:
        """Score samples, each rank its part of them."""
        with self._one_rank_may_fail():
            self.ranks.broadcast({"do": "score", "held": held}, dict(weights))
            parts = [score_tensors(self.inner.score(weights, held, (0, self.ranks.size)))]
            parts += [self.ranks.recv_from(rank)[1] for rank in range(1, self.ranks.size)]
        whole = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
        return Scores(whole["loss"], whole.get("right"), whole["samples"])

    def server_model(self) -> nn.Module:
        """A module for functional calls with any weights, in evaluation mode, for the server step."""
        return self.inner.server_model()

    def close(self) -> None:
        """Tell the other ranks to end; where an exchange was broken off, they wait to be heard, and would not hear."""
        if self._exchanging:
            self.processes.stop()
        elif not self.processes.failed():
            try:
                self.ranks.broadcast({"do": "end"})
            except RuntimeError:
                # Their connections are closed already, which ends them as well.
                self.processes.stop()
        self.processes.wait()
        self.ranks.leave()

    @contextmanager
    def _one_rank_may_fail(self) -> Iterator[None]:
        """One exchange: turn a closed connection into the message of the rank that closed it."""
        self._exchanging = True
        try:
            yield
            self._exchanging = False
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not is_about_connection(error):
                raise
            raise FedblendError(self.processes.message()) from None


def _sorted(result: CohortResult, uploads: list[WeightedUpload], clients: Sequence[int]) -> CohortResult:
    """What all ranks gave, in the order in which the clients were asked for."""
    place = {client: i for i, client in enumerate(clients)}
    order = sorted(range(len(result.good)), key=lambda i: place[result.good[i][0]])
    result.good = [result.good[i] for i in order]
    result.refused.sort(key=lambda one: place[one["client"]])
    if not isinstance(result.partial, Sums):
        result.partial = [uploads[i] for i in order]
    return result


def balance(work: Sequence[int], ranks: int) -> list[int]:
    """The rank of each piece of work: longest first, each to the rank that has least (Graham's rule).

    >>> balance([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    load = [0] * ranks
    chosen = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        chosen[i] = min(range(ranks), key=lambda r: load[r])
        load[chosen[i]] += work[i]
    return chosen
