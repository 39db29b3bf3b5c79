"""The distributed engine: clients spread over processes, on one machine or on many."""

from __future__ import annotations

import multiprocessing
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from fedblend.aggregators import Sums
from fedblend.config import as_table, resolve
from fedblend.engines.base import Collected, Scores, Tensors, Trained, TrainTask
from fedblend.engines.loop import LoopEngine
from fedblend.engines.ranks import Ranks
from fedblend.errors import FedblendError
from fedblend.sharing.base import Payload, Pool
from fedblend.world import World

MakeInner = Callable[[World, dict[str, Any]], LoopEngine]
"""Makes the engine of one process from what rank 0 chose."""

LOOK_EVERY = 0.2
"""Seconds between two looks at whether all ranks still live while they meet."""

GOODBYE = 10.0
"""Seconds that ranks get to end after they were told to."""


class DistributedEngine:
    """Runs its own share of the clients on an engine of its own, and tells other ranks to run theirs.

    Only this process, rank 0, runs the round loop. Weighted sums are reduced over the ranks; where an aggregator
    needs every upload, they are gathered one by one.
    """

    def __init__(self, world: World, inner: LoopEngine, ranks: Ranks, choice: dict[str, Any], others: Others) -> None:
        self.world, self.inner, self.ranks, self.others = world, inner, ranks, others
        self._told: Pool | None = None
        with self._one_rank_may_fail():
            ranks.tell({"do": "begin", "experiment": as_table(world.experiment), "choice": choice})

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload]]:
        """Ask clients to share, each rank its part of them."""
        asked = list(clients)
        with self._one_rank_may_fail():
            self.ranks.tell({"do": "share", "round": round, "clients": asked}, dict(weights))
            found = dict(self.inner.share(round, weights, asked[:: self.ranks.size], sizes))
            for rank in range(1, self.ranks.size):
                words, tensors = self.ranks.hear(rank)
                for client in words["clients"]:
                    mine = f"{client}/"
                    found[client] = {n.removeprefix(mine): t for n, t in tensors.items() if n.startswith(mine)}
        yield from ((client, found[client]) for client in asked if client in found)

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[Trained]:
        """Train clients in this process; a round's cohort goes through :meth:`collect`."""
        return self.inner.train(task, clients)

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> Collected:
        """Train the clients, each rank its share, and bring together what the aggregator needs."""
        shares = balance([int(task.sizes[client]) for client in clients], self.ranks.size)
        groups = [[c for c, rank in zip(clients, shares, strict=True) if rank == r] for r in range(self.ranks.size)]
        new_pool = task.pool is not self._told
        with self._one_rank_may_fail():
            self.ranks.tell(
                {
                    "do": "collect",
                    "round": task.round,
                    "groups": groups,
                    "lost": sorted(lost),
                    "pool": (task.pool is not None) if new_pool else "as before",
                },
                _named("weights/", task.weights) | (_pool_tensors(task.pool) if new_pool else {}),
            )
            self._told = task.pool
            collected = self.inner.collect(task, groups[0], lost)
            partials = [collected.partial]
            for rank in range(1, self.ranks.size):
                words, tensors = self.ranks.hear(rank)
                collected.good += [tuple(one) for one in words["good"]]
                collected.refused += words["refused"]
                collected.sent += words["sent"]
                partials.append(_partial_of(words, tensors))
            collected.partial = self._joined(partials, collected, clients, task.weights)
        place = {client: i for i, client in enumerate(clients)}
        collected.good.sort(key=lambda one: place[one[0]])
        collected.refused.sort(key=lambda one: place[one["client"]])
        return collected

    def _joined(self, partials: list[Any], collected: Collected, clients: Sequence[int], like: Tensors) -> Any:
        """All ranks' sums as one, or all uploads in the order of the clients."""
        if isinstance(partials[0], Sums):
            return reduced(self.ranks, partials, like)
        place = {client: i for i, client in enumerate(clients)}
        uploads = [upload for partial in partials for upload in partial]
        order = sorted(range(len(uploads)), key=lambda i: place[collected.good[i][0]])
        return [uploads[i] for i in order]

    def score(self, weights: Tensors, held: bool = False) -> Scores:
        """Score samples, each rank its part of them."""
        with self._one_rank_may_fail():
            self.ranks.tell({"do": "score", "held": held}, dict(weights))
            parts = [_score_tensors(self.inner.score(weights, held, (0, self.ranks.size)))]
            parts += [self.ranks.hear(rank)[1] for rank in range(1, self.ranks.size)]
        whole = {name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}
        return Scores(whole["loss"], whole.get("right"), whole["samples"])

    def close(self) -> None:
        """Tell the other ranks to end."""
        if not self.others.failed():
            try:
                self.ranks.tell({"do": "end"})
            except RuntimeError:
                # Their connections are closed already, which ends them as well.
                self.others.stop()
        self.others.wait()
        self.ranks.leave()

    @contextmanager
    def _one_rank_may_fail(self) -> Iterator[None]:
        """Turn a closed connection into the message of the rank that closed it."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError) or not _is_about_connection(error):
                raise
            raise FedblendError(self.others.message()) from None


class Others:
    """The processes of the other ranks, where this process started them; torchrun's are its own."""

    def __init__(self) -> None:
        self.processes: list[tuple[Any, Connection]] = []

    def start(self, size: int, where: str) -> None:
        """Start ranks 1 to ``size`` - 1 on this machine."""
        context = multiprocessing.get_context("spawn")
        # Ctrl-C goes to the whole group; only rank 0, which can say goodbye, is to take notice.
        before = _ignore_interrupts()
        try:
            for rank in range(1, size):
                ours, theirs = context.Pipe(duplex=False)
                arguments = (rank, size, where, theirs, list(sys.path))
                process = context.Process(target=_serve_apart, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self.processes.append((process, ours))
        finally:
            if before is not None:
                signal.signal(signal.SIGINT, before)

    def meet(self, size: int, where: str) -> Ranks:
        """Wait until all have come. Raises :class:`FedblendError` if one ends before."""
        met: list[Ranks] = []
        faults: list[BaseException] = []

        def wait() -> None:
            try:
                met.append(Ranks(0, size, where))
            except BaseException as error:
                faults.append(error)

        # In a thread, since the meeting itself would wait for one that has died.
        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_EVERY)
            if self.failed():
                raise FedblendError(self.message())
        if faults:
            raise faults[0]
        return met[0]

    def failed(self) -> bool:
        """Whether one of them has ended."""
        return any(not process.is_alive() for process, _ in self.processes)

    def message(self) -> str:
        """What the rank that failed says, or how it ended."""
        for rank, (process, pipe) in enumerate(self.processes, 1):
            process.join(1.0)
            if pipe.poll(1.0 if not process.is_alive() else 0):
                try:
                    return str(pipe.recv_bytes().decode())
                except EOFError:
                    pass
            if process.exitcode not in (None, 0):
                how = f"was killed by signal {-process.exitcode}" if process.exitcode < 0 else "ended"
                return f"rank {rank} {how} (out of memory?); what was computed up to the last checkpoint is kept"
        return "another rank ended (its own output says why); what was computed up to the last checkpoint is kept"

    def stop(self) -> None:
        """End them at once."""
        for process, _ in self.processes:
            process.kill()

    def wait(self) -> None:
        """Wait for them to end, and end those that do not."""
        for process, pipe in self.processes:
            process.join(GOODBYE if process.is_alive() else None)
            if process.is_alive():
                process.kill()
            pipe.close()


def _ignore_interrupts() -> Any:
    try:
        return signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:
        # Not the main thread: it may not say so, and then no interrupt reaches it either.
        return None


def _serve_apart(rank: int, size: int, where: str, pipe: Connection, import_from: list[str]) -> None:
    """One of the processes that :class:`Others` starts."""
    from fedblend.engines import inner_engine

    sys.path += [folder for folder in import_from if folder not in sys.path]
    torch.set_num_threads(1)
    try:
        serve(Ranks(rank, size, where), inner_engine)
    except Exception as error:
        if isinstance(error, RuntimeError) and _is_about_connection(error):
            # Rank 0 has ended, and with it this one's work.
            return
        if not isinstance(error, FedblendError):
            # A fault in someone's part: its author needs the traceback.
            traceback.print_exc()
        pipe.send_bytes(describe(error, rank).encode())
        sys.exit(1)


def describe(error: Exception, rank: int) -> str:
    """An error of a rank in one line, with the notes that name client, round and batch."""
    if isinstance(error, FedblendError):
        return str(error)
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"rank {rank}: {type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


def serve_environment() -> None:
    """Follow the orders of the rank 0 that ``torchrun`` started, for all its runs, until it ends."""
    from fedblend.engines import inner_engine

    torch.set_num_threads(1)
    ranks = Ranks.of_environment()
    try:
        while True:
            serve(ranks, inner_engine)
    except RuntimeError as error:
        if not _is_about_connection(error):
            raise


def serve(ranks: Ranks, make_inner: MakeInner) -> None:
    """Follow rank 0's orders for one run, until it says that the run has ended."""
    words, _ = ranks.listen()
    world = World.of(resolve(words["experiment"]))
    inner = make_inner(world, words["choice"])
    pool: Pool | None = None
    while True:
        words, tensors = ranks.listen()
        if words["do"] == "end":
            return
        if words["do"] == "share":
            _share(world, inner, ranks, words, tensors)
        elif words["do"] == "score":
            ranks.report({}, _score_tensors(inner.score(tensors, words["held"], (ranks.rank, ranks.size))))
        else:
            if words["pool"] != "as before":
                pool = _pool_of(tensors) if words["pool"] else None
            _collect(world, inner, ranks, words, _under("weights/", tensors), pool)


def _share(world: World, inner: LoopEngine, ranks: Ranks, words: dict[str, Any], weights: Tensors) -> None:
    mine = words["clients"][ranks.rank :: ranks.size]
    made = dict(inner.share(words["round"], weights, mine, world.sizes(words["round"])))
    tensors = {f"{client}/{name}": t for client, payload in made.items() for name, t in payload.items()}
    ranks.report({"clients": list(made)}, tensors)


def _collect(
    world: World, inner: LoopEngine, ranks: Ranks, words: dict[str, Any], weights: Tensors, pool: Pool | None
) -> None:
    in_order = {name: weights[name] for name in world.model.state_dict()}
    task = TrainTask(words["round"], in_order, pool, world.sizes(words["round"]))
    collected = inner.collect(task, words["groups"][ranks.rank], set(words["lost"]))
    said: dict[str, Any] = {"good": collected.good, "refused": collected.refused, "sent": collected.sent}
    if isinstance(collected.partial, Sums):
        said |= {"sums": collected.partial.weight, "kinds": {n: str(k) for n, k in collected.partial.kinds.items()}}
        ranks.report(said)
        reduced(ranks, [collected.partial], in_order)
        return
    weighted = [weight for _, weight in collected.partial]
    tensors = {f"{i}/{name}": t for i, (upload, _) in enumerate(collected.partial) for name, t in upload.items()}
    ranks.report({**said, "weights": weighted}, tensors)


def _partial_of(words: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """What a rank reports of its part: the weight of its sums, which follow, or its uploads."""
    if "sums" in words:
        return Sums(words["sums"])
    return [(_under(f"{i}/", tensors), weight) for i, weight in enumerate(words["weights"])]


def reduced(ranks: Ranks, partials: list[Sums], like: Tensors) -> Sums:
    """The sums of all ranks at rank 0, whose list holds its own and the others' weights; others hand theirs in."""
    own = partials[0]
    flat = torch.cat(
        [
            own.tensors[name].flatten() if name in own.tensors else t.new_zeros(t.numel(), dtype=torch.float64)
            for name, t in like.items()
        ]
    )
    ranks.add_up(flat)
    cut = flat.split([t.numel() for t in like.values()])
    tensors = {name: values.view(t.shape) for (name, t), values in zip(like.items(), cut, strict=True)}
    weight = sum(partial.weight for partial in partials)
    return Sums(weight, tensors if weight else {}, {name: t.dtype for name, t in like.items()})


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


def free_address() -> str:
    """An address on this machine at which ranks can meet."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


def _is_about_connection(error: RuntimeError) -> bool:
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "peer", "store", "socket"))


def _score_tensors(scores: Scores) -> dict[str, torch.Tensor]:
    arrays = {"loss": scores.loss, "samples": scores.samples}
    if scores.right is not None:
        arrays["right"] = scores.right
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _pool_tensors(pool: Pool | None) -> dict[str, torch.Tensor]:
    return {} if pool is None else _named("pool/", pool.tensors) | {"owner": torch.from_numpy(pool.owner)}


def _pool_of(tensors: dict[str, torch.Tensor]) -> Pool:
    return Pool(_under("pool/", tensors), tensors["owner"].numpy())


def _named(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def _under(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
