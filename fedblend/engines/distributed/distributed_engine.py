"""The distributed engine: a cohort's clients spread over processes, on one machine or on several."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fedblend.core.aggregator import WeightedUpload
from fedblend.core.dataset import ClientSplit, Split
from fedblend.core.engine import ClientUpdate, CohortResult, Scores, Tensors, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.sharing import Payload, Pool
from fedblend.core.state import from_tensors
from fedblend.core.trees import by_client, in_order, strip_prefix, without
from fedblend.engines.distributed.processes import RankProcesses
from fedblend.engines.distributed.ranks import Ranks, is_about_connection
from fedblend.engines.distributed.serialization import (
    kept_uploads,
    payloads_from,
    reduce_sums,
    score_tensors,
    task_tensors,
    upload_like,
    uploads_from,
)
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import as_table
from fedblend.methods.aggregators.mean import Sums


class DistributedEngine:
    """Runs one share of the clients on an inner engine, and sends commands to other ranks for the other shares.

    Only this process, rank 0, runs the round loop. Weighted sums are reduced over the ranks. For an aggregator that
    needs every upload, rank 0 gathers the uploads.
    """

    def __init__(
        self, setup: Setup, inner: LoopEngine, ranks: Ranks, plan: dict[str, Any], processes: RankProcesses
    ) -> None:
        self.setup, self.inner, self.ranks, self.processes = setup, inner, ranks, processes
        self._sent_pool: Pool | None = None
        self._sent_frozen = not setup.frozen
        self._exchanging = False
        """Whether an exchange with other ranks has begun and not ended."""
        with self._report_failed_rank():
            ranks.broadcast({"command": "begin", "experiment": as_table(setup.experiment), "plan": plan})

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload]]:
        """Yield the clients' shared payloads; each rank computes its part."""
        sharing = list(clients)
        with self._report_failed_rank():
            self.ranks.broadcast({"command": "share", "round": round, "clients": sharing}, self._unfrozen(weights))
            payloads = dict(self.inner.share(round, weights, sharing[:: self.ranks.size], sizes))
            for rank in range(1, self.ranks.size):
                payloads |= payloads_from(*self.ranks.recv_from(rank))
        yield from ((client, payloads[client]) for client in sharing if client in payloads)

    def losses(self, round: int, weights: Tensors, clients: Sequence[int], sizes: np.ndarray) -> dict[int, float | str]:
        """Return the clients' losses, in their order; each rank computes its part."""
        with self._report_failed_rank():
            fields = {"command": "losses", "round": round, "clients": list(clients)}
            self.ranks.broadcast(fields, self._unfrozen(weights))
            found = self.inner.losses(round, weights, clients[:: self.ranks.size], sizes)
            for rank in range(1, self.ranks.size):
                found |= {client: loss for client, loss in self.ranks.recv_from(rank)[0]["losses"]}
        return {client: found[client] for client in clients}

    def _unfrozen(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """Return what other ranks lack of a model: they receive the frozen tensors once, before all else."""
        if not self._sent_frozen:
            self.ranks.broadcast({"command": "frozen"}, {name: weights[name] for name in self.setup.frozen})
            self._sent_frozen = True
        return without(weights, self.setup.frozen)

    def train(self, task: TrainTask, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        """Training clients in this process; a round's cohort goes through :meth:`collect`."""
        return self.inner.train(task, clients)

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> CohortResult:
        """Training the clients, each rank its share, and combine the results in the order of the clients."""
        shares = balance([int(task.sizes[client]) for client in clients], self.ranks.size)
        groups = [[c for c, rank in zip(clients, shares, strict=True) if rank == r] for r in range(self.ranks.size)]
        new_pool = task.pool is not self._sent_pool
        with self._report_failed_rank():
            sent = replace(task, weights=self._unfrozen(task.weights))
            self.ranks.broadcast(
                {
                    "command": "collect",
                    "round": task.round,
                    "groups": groups,
                    "lost": sorted(lost),
                    "pool": (task.pool is not None) if new_pool else "unchanged",
                    "keeps_uploads": task.keeps_uploads,
                },
                task_tensors(sent, new_pool),
            )
            self._sent_pool = task.pool
            result = self.inner.collect(task, groups[0], lost)
            uploads, weight = kept_uploads(result), 0.0
            for rank in range(1, self.ranks.size):
                fields, tensors = self.ranks.recv_from(rank)
                result.good += [tuple(one) for one in fields["good"]]
                result.measured |= {client: shares for client, shares in fields["measured"]}
                result.refused += fields["refused"]
                result.invalid += fields["invalid"]
                result.sent += fields["sent"]
                received = ((self.inner.to_device(upload), n) for upload, n in uploads_from(fields, tensors))
                uploads += [(in_order(upload, task.weights), n) for upload, n in received]
                weight += fields["weight"]
                result.client_states |= from_tensors(tensors)
                kept = {c: in_order(t, task.weights) for c, t in by_client("kept/", tensors).items()}
                # A new table: this rank answers a server step's questions for its own clients only.
                result.uploads = result.uploads | kept
                result.sum_extras(strip_prefix("extras/", tensors))
                received_extras = by_client("each_extras/", tensors)
                result.each_extras |= {c: self.inner.to_device(extras) for c, extras in received_extras.items()}
                for direction, kind, number in fields["extra_bytes"]:
                    total = result.extra_bytes.get((direction, kind), 0) + number
                    result.extra_bytes[direction, kind] = total
            if isinstance(result.partial, Sums):
                like = self.inner.to_device(upload_like(self.setup, task))
                result.partial = reduce_sums(self.ranks, result.partial, weight, like)
        return _sorted(result, uploads, clients)

    def query(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Send the server step's question to the clients, each rank to its own; yield replies in client order."""
        with self._report_failed_rank():
            self.ranks.broadcast({"command": "query"}, dict(question))
            payloads = dict(self.inner.query(question))
            for rank in range(1, self.ranks.size):
                payloads |= payloads_from(*self.ranks.recv_from(rank))
        yield from sorted(payloads.items(), key=lambda one: one[0])

    def score(self, weights: Tensors, split: Split = "test") -> Scores:
        """Score samples; each rank scores its part."""
        with self._report_failed_rank():
            self.ranks.broadcast({"command": "score", "split": split}, self._unfrozen(weights))
            parts = [score_tensors(self.inner.score(weights, split, (0, self.ranks.size)))]
            parts += [self.ranks.recv_from(rank)[1] for rank in range(1, self.ranks.size)]
        whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        right = whole["right"].numpy() if "right" in whole else None
        return Scores(whole["loss"].numpy(), right, whole["samples"].numpy(), outputs=whole.get("outputs"))

    def score_each(self, weights: Tensors, models: Mapping[int, Tensors], split: ClientSplit) -> Scores:
        """Score each client's own samples with its own model, in this process."""
        return self.inner.score_each(weights, models, split)

    def server_model(self) -> nn.Module:
        """Return a module in evaluation mode, for functional calls with any weights by the server step."""
        return self.inner.server_model()

    def secret_rng(self) -> None:
        """Return ``None``: noise is drawn from the keyed stream, so that a run can be repeated."""

    def close(self) -> None:
        """End the other ranks; kill those that still wait in an interrupted exchange, since they receive no command."""
        if self._exchanging:
            self.processes.stop()
        elif not self.processes.failed():
            try:
                self.ranks.broadcast({"command": "end"})
            except RuntimeError:
                # A closed connection also ends the other ranks.
                self.processes.stop()
        self.processes.wait()
        self.ranks.leave()

    @contextmanager
    def _report_failed_rank(self) -> Iterator[None]:
        """Run one exchange; a closed connection raises :class:`FedblendError` with the failed rank's message."""
        self._exchanging = True
        try:
            yield
            self._exchanging = False
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not is_about_connection(error):
                raise
            raise FedblendError(self.processes.message()) from None


def _sorted(result: CohortResult, uploads: list[WeightedUpload], clients: Sequence[int]) -> CohortResult:
    """Return the results of all ranks, in the order of the clients."""
    position = {client: i for i, client in enumerate(clients)}
    order = sorted(range(len(result.good)), key=lambda i: position[result.good[i][0]])
    result.good = [result.good[i] for i in order]
    result.uploads = {client: result.uploads[client] for client, _, _ in result.good if client in result.uploads}
    result.refused.sort(key=lambda one: position[one["client"]])
    if not isinstance(result.partial, Sums):
        result.partial = [uploads[i] for i in order]
    return result


def balance(work: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each piece of work: longest first, each to the rank with the least work (Graham's rule).

    >>> balance([5, 3, 3, 1], 2)
    [0, 1, 1, 0]
    """
    load = [0] * ranks
    assigned = [0] * len(work)
    for i in sorted(range(len(work)), key=lambda i: -work[i]):
        assigned[i] = min(range(ranks), key=lambda r: load[r])
        load[assigned[i]] += work[i]
    return assigned
