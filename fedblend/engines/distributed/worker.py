"""The worker loop of every rank except 0: it executes rank 0's commands until the run ends."""

from __future__ import annotations

import sys
import traceback
import warnings
from dataclasses import replace
from typing import Any

import torch

from fedblend.core.engine import Tensors, TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.core.sharing import Pool
from fedblend.core.state import to_tensors
from fedblend.core.trees import add_prefix, for_clients
from fedblend.engines.autotune import inner_engine
from fedblend.engines.distributed.pipes import Parent
from fedblend.engines.distributed.ranks import Ranks, disconnect, is_about_connection
from fedblend.engines.distributed.serialization import (
    kept_uploads,
    payload_message,
    pool_from,
    reduce_sums,
    score_tensors,
    task_from,
    upload_like,
    upload_tensors,
)
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.methods.aggregators.mean import Sums


def serve_process(parent: Parent, rank: int, size: int, address: str, setup: Setup | None = None) -> None:
    """Run the process of one rank, started by :class:`fedblend.engines.distributed.processes.RankProcesses`.

    A copy of rank 0's process has its ``setup``. An error goes to rank 0 as one line.
    """
    parent.listen(lambda message: None)
    # Rank 0 has given the same warnings.
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        ranks = Ranks(rank, size, address)
        serve(ranks, ranks.receive()[0], setup)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_about_connection(error):
            # Rank 0 has ended, so this rank has nothing left to do.
            return
        if not isinstance(error, FedblendError):
            # An error in the code of a part: its author needs the traceback.
            traceback.print_exc()
        parent.send({"error": error_line(error, rank)})
        sys.exit(1)
    finally:
        disconnect()


def error_line(error: Exception, rank: int) -> str:
    """Return a rank's error as one line, with the notes that name client, round and batch."""
    if isinstance(error, FedblendError):
        return str(error)
    notes = "; ".join(getattr(error, "__notes__", []))
    return f"rank {rank}: {type(error).__name__}: {error}" + (f" ({notes})" if notes else "")


def serve_environment() -> None:
    """Execute the commands of ``torchrun``'s rank 0 for all its runs; raise :class:`FedblendError` if it fails."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ranks = Ranks.from_environment()
    try:
        while (begun := ranks.receive()[0])["command"] != "leave":
            serve(ranks, begun)
    except RuntimeError as error:
        if not is_about_connection(error):
            raise
        raise FedblendError("rank 0 ended (see its own output)") from None


def serve(ranks: Ranks, begun: dict[str, Any], setup: Setup | None = None) -> None:
    """Execute rank 0's commands for one run, from its first message to the command ``end``."""
    setup = setup or make_setup(resolve(begun["experiment"]))
    # Rank 0 has checked that the model can be stacked.
    inner = inner_engine(setup, begun["plan"], tested=True)
    pool: Pool | None = None
    frozen: Tensors = {}
    while True:
        fields, tensors = ranks.receive()
        if fields["command"] == "end":
            return
        if fields["command"] == "frozen":
            frozen = tensors
        elif fields["command"] == "share":
            _share(setup, inner, ranks, fields, {**frozen, **tensors})
        elif fields["command"] == "losses":
            own, sizes = fields["clients"][ranks.rank :: ranks.size], setup.sizes(fields["round"])
            found = inner.losses(fields["round"], {**frozen, **tensors}, own, sizes)
            ranks.send({"losses": list(found.items())}, {})
        elif fields["command"] == "query":
            ranks.send(*payload_message(dict(inner.query(tensors))))
        elif fields["command"] == "score":
            ranks.send({}, score_tensors(inner.score({**frozen, **tensors}, fields["split"], (ranks.rank, ranks.size))))
        else:
            if fields["pool"] != "unchanged":
                pool = pool_from(tensors) if fields["pool"] else None
            tensors |= add_prefix("weights/", frozen)
            task = replace(task_from(fields["round"], tensors, pool, setup), keeps_uploads=fields["keeps_uploads"])
            _collect(setup, inner, ranks, fields, task)


def _share(setup: Setup, inner: LoopEngine, ranks: Ranks, fields: dict[str, Any], weights: Tensors) -> None:
    own_clients = fields["clients"][ranks.rank :: ranks.size]
    payloads = dict(inner.share(fields["round"], weights, own_clients, setup.sizes(fields["round"])))
    ranks.send(*payload_message(payloads))


def _collect(setup: Setup, inner: LoopEngine, ranks: Ranks, fields: dict[str, Any], task: TrainTask) -> None:
    result = inner.collect(task, fields["groups"][ranks.rank], set(fields["lost"]))
    uploads, sums = kept_uploads(result), result.partial
    summary = {
        "good": result.good,
        "measured": list(result.measured.items()),
        "refused": result.refused,
        "invalid": result.invalid,
        "sent": result.sent,
        "weight": sums.weight if isinstance(sums, Sums) else 0.0,
        "weights": [weight for _, weight in uploads],
        "extra_bytes": [[direction, kind, number] for (direction, kind), number in result.extra_bytes.items()],
    }
    extras = add_prefix("extras/", result.extras) | for_clients("each_extras/", result.each_extras)
    kept = for_clients("kept/", result.uploads) if task.keeps_uploads else {}
    ranks.send(summary, upload_tensors(uploads) | to_tensors(result.client_states) | extras | kept)
    if isinstance(sums, Sums):
        reduce_sums(ranks, sums, 0.0, inner.to_device(upload_like(setup, task)))
