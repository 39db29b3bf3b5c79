"""The side of every rank but 0: it follows orders until the run has ended."""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

import torch

from fedblend.core.engine import Tensors, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.paths import import_from
from fedblend.core.setup import Setup
from fedblend.core.sharing import Pool
from fedblend.core.trees import add_prefix, for_clients
from fedblend.engines.autotune import inner_engine
from fedblend.engines.distributed.ranks import Ranks, is_about_connection, part
from fedblend.engines.distributed.serialization import (
    kept_uploads,
    payload_words,
    pool_of,
    reduced,
    score_tensors,
    task_of,
    upload_tensors,
)
from fedblend.engines.loop import LoopEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.setup import make_setup
from fedblend.methods.aggregators.mean import Sums


def serve_apart(rank: int, size: int, where: str, pipe: Connection, folders: list[str]) -> None:
    """One of the processes that :class:`Others` starts; it imports from where that one does."""
    import_from(folders)
    torch.set_num_threads(1)
    try:
        serve(Ranks(rank, size, where))
    except Exception as error:
        if isinstance(error, RuntimeError) and is_about_connection(error):
            # Rank 0 has ended, and with it this one's work.
            return
        if not isinstance(error, FedblendError):
            # A fault in someone's part: its author needs the traceback.
            traceback.print_exc()
        pipe.send_bytes(describe(error, rank).encode())
        sys.exit(1)
    finally:
        # Or its threads would still be at work when the process ends, and C++ would say so.
        part()


def describe(error: Exception, rank: int) -> str:
    """An error of a rank in one line, with the notes that name client, round and batch."""
    if isinstance(error, FedblendError):
        return str(error)
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"rank {rank}: {type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


def serve_environment() -> None:
    """Follow the orders of the rank 0 that ``torchrun`` started, for all its runs, until it ends."""
    torch.set_num_threads(1)
    ranks = Ranks.of_environment()
    try:
        while True:
            serve(ranks)
    except RuntimeError as error:
        if not is_about_connection(error):
            raise
    finally:
        # As above: its threads must not be at work when the process ends.
        part()


def serve(ranks: Ranks) -> None:
    """Follow rank 0's orders for one run, until it says that the run has ended."""
    words, _ = ranks.receive()
    setup = make_setup(resolve(words["experiment"]))
    # Rank 0 made its own engine, and so knows that the model stacks, before it began.
    inner = inner_engine(setup, words["choice"], tested=True)
    pool: Pool | None = None
    while True:
        words, tensors = ranks.receive()
        if words["do"] == "end":
            return
        if words["do"] == "share":
            _share(setup, inner, ranks, words, tensors)
        elif words["do"] == "query":
            ranks.send(*payload_words(dict(inner.query(tensors))))
        elif words["do"] == "score":
            ranks.send({}, score_tensors(inner.score(tensors, words["held"], (ranks.rank, ranks.size))))
        else:
            if words["pool"] != "as before":
                pool = pool_of(tensors) if words["pool"] else None
            task = task_of(words["round"], tensors, pool, setup)
            _collect(inner, ranks, words, task)


def _share(setup: Setup, inner: LoopEngine, ranks: Ranks, words: dict[str, Any], weights: Tensors) -> None:
    mine = words["clients"][ranks.rank :: ranks.size]
    made = dict(inner.share(words["round"], weights, mine, setup.sizes(words["round"])))
    ranks.send(*payload_words(made))


def _collect(inner: LoopEngine, ranks: Ranks, words: dict[str, Any], task: TrainTask) -> None:
    result = inner.collect(task, words["groups"][ranks.rank], set(words["lost"]))
    uploads, sums = kept_uploads(result), result.partial
    summary = {
        "good": result.good,
        "refused": result.refused,
        "sent": result.sent,
        "weight": sums.weight if isinstance(sums, Sums) else 0.0,
        "weights": [weight for _, weight in uploads],
        "extra_bytes": [[direction, kind, number] for (direction, kind), number in result.extra_bytes.items()],
    }
    states = for_clients("client/", result.client_states)
    ranks.send(summary, upload_tensors(uploads) | states | add_prefix("extras/", result.extras))
    if isinstance(sums, Sums):
        reduced(ranks, sums, 0.0, task.weights)
