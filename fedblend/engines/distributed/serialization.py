"""How pools, scores and sums are put into messages between ranks, and taken out again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedblend.core.aggregator import WeightedUpload
from fedblend.core.engine import CohortResult, Scores, Tensors, TrainTask
from fedblend.core.setup import Setup
from fedblend.core.sharing import Payload, Pool
from fedblend.core.trees import add_prefix, by_client, for_clients, in_order, strip_prefix
from fedblend.engines.distributed.ranks import Message, Ranks
from fedblend.methods.aggregators.mean import Sums


def kept_uploads(result: CohortResult) -> list[WeightedUpload]:
    """The uploads that a process kept for an aggregator that needs them all."""
    return [] if isinstance(result.partial, Sums) else list(result.partial)


def upload_tensors(uploads: Sequence[WeightedUpload]) -> dict[str, torch.Tensor]:
    """Uploads as tensors by place and name."""
    return {f"{i}/{name}": t for i, (upload, _) in enumerate(uploads) for name, t in upload.items()}


def uploads_of(words: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[WeightedUpload]:
    """The uploads that :func:`upload_tensors` wrote down."""
    return [(strip_prefix(f"{i}/", tensors), weight) for i, weight in enumerate(words["weights"])]


def task_tensors(task: TrainTask, with_pool: bool) -> dict[str, torch.Tensor]:
    """What clients begin a round with, as tensors by name; the pool only if it is asked for."""
    return (
        add_prefix("weights/", task.weights)
        | add_prefix("outputs/", task.global_outputs)
        | for_clients("client/", task.client_states)
        | add_prefix("server/", task.server_state)
        | (pool_tensors(task.pool) if with_pool else {})
    )


def task_of(round: int, tensors: Tensors, pool: Pool | None, setup: Setup) -> TrainTask:
    """The task that :func:`task_tensors` wrote, with models in the order of the setup's."""
    model = setup.model.state_dict()
    first = [f"{prefix}{name}" for prefix in ("weights/", "personal/") for name in model]
    return TrainTask(
        round,
        in_order(strip_prefix("weights/", tensors), model),
        pool,
        setup.sizes(round),
        strip_prefix("outputs/", tensors),
        {client: in_order(table, first) for client, table in by_client("client/", tensors).items()},
        strip_prefix("server/", tensors),
    )


def payload_words(payloads: Mapping[int, Payload]) -> Message:
    """What clients give, as a message."""
    return {"clients": list(payloads)}, for_clients("", payloads)


def payloads_of(words: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[int, Payload]:
    """What :func:`payload_words` wrote down."""
    return {client: strip_prefix(f"{client}/", tensors) for client in words["clients"]}


def reduced(ranks: Ranks, own: Sums, others: float, like: Tensors) -> Sums:
    """The sums of all ranks at rank 0, which knows the weight of the ``others``; they hand theirs in."""
    flat = torch.cat(
        [
            own.tensors[name].flatten() if name in own.tensors else t.new_zeros(t.numel(), dtype=torch.float64)
            for name, t in like.items()
        ]
    )
    ranks.add_up(flat)
    cut = flat.split([t.numel() for t in like.values()])
    tensors = {name: values.view(t.shape) for (name, t), values in zip(like.items(), cut, strict=True)}
    weight = own.weight + others
    return Sums(weight, tensors if weight else {}, {name: t.dtype for name, t in like.items()})


def score_tensors(scores: Scores) -> dict[str, torch.Tensor]:
    """Scores as tensors by name, to be joined with other ranks'."""
    arrays = {"loss": scores.loss, "samples": scores.samples}
    if scores.right is not None:
        arrays["right"] = scores.right
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def pool_tensors(pool: Pool | None) -> dict[str, torch.Tensor]:
    """A pool as tensors by name; nothing of no pool."""
    return {} if pool is None else add_prefix("pool/", pool.tensors) | {"owner": torch.from_numpy(pool.owner)}


def pool_of(tensors: dict[str, torch.Tensor]) -> Pool:
    """The pool that :func:`pool_tensors` wrote down."""
    return Pool(strip_prefix("pool/", tensors), tensors["owner"].numpy())
