"""Tasks, pools, uploads, scores and sums as messages between ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from fedblend.core.aggregator import WeightedUpload
from fedblend.core.engine import CohortResult, Scores, Tensors, TrainTask
from fedblend.core.setup import Setup
from fedblend.core.sharing import Payload, Pool
from fedblend.core.state import from_tensors, to_tensors
from fedblend.core.trees import add_prefix, for_clients, in_order, strip_prefix
from fedblend.engines.distributed.ranks import Message, Ranks
from fedblend.methods.aggregators.mean import Sums


def kept_uploads(result: CohortResult) -> list[WeightedUpload]:
    """Return the uploads of a rank, for an aggregator that needs every upload; empty where it needs only sums."""
    return [] if isinstance(result.partial, Sums) else list(result.partial)


def upload_tensors(uploads: Sequence[WeightedUpload]) -> dict[str, torch.Tensor]:
    """Return the uploads' tensors, named by position and name."""
    return {f"{i}/{name}": t for i, (upload, _) in enumerate(uploads) for name, t in upload.items()}


def uploads_from(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[WeightedUpload]:
    """Return the uploads of :func:`upload_tensors`; the fields hold their weights."""
    return [(strip_prefix(f"{i}/", tensors), weight) for i, weight in enumerate(fields["weights"])]


def task_tensors(task: TrainTask, with_pool: bool) -> dict[str, torch.Tensor]:
    """Return a task's tensors by name; the pool only ``with_pool``."""
    return (
        add_prefix("weights/", task.weights)
        | add_prefix("outputs/", task.global_outputs)
        | to_tensors(task.client_states)
        | add_prefix("server/", task.server_state)
        | (pool_tensors(task.pool) if with_pool else {})
    )


def task_from(round: int, tensors: Tensors, pool: Pool | None, setup: Setup) -> TrainTask:
    """Return the task of :func:`task_tensors`, with models in the order of the setup's model."""
    model = setup.model.state_dict()
    return TrainTask(
        round,
        in_order(strip_prefix("weights/", tensors), model),
        pool,
        setup.sizes(round),
        strip_prefix("outputs/", tensors),
        {client: kept.ordered(model) for client, kept in from_tensors(tensors).items()},
        strip_prefix("server/", tensors),
    )


def payload_message(payloads: Mapping[int, Payload]) -> Message:
    """Return clients' payloads as a message."""
    return {"clients": list(payloads)}, for_clients("", payloads)


def payloads_from(fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> dict[int, Payload]:
    """Return the payloads of :func:`payload_message`, by client."""
    return {client: strip_prefix(f"{client}/", tensors) for client in fields["clients"]}


def upload_like(setup: Setup, task: TrainTask) -> Tensors:
    """Return tensors with the names, shapes and types of a round's uploads."""
    return setup.method.upload.like(setup.shared(task.weights), setup.task)


def reduce_sums(ranks: Ranks, own: Sums, other_weight: float, like: Tensors) -> Sums:
    """Sum the weighted uploads of all ranks; only rank 0 gets the result.

    ``own`` are this rank's sums, ``other_weight`` the total weight of the other ranks (used at rank 0 only), and
    ``like`` tensors with the uploads' names, shapes, types and device.
    """
    if not like:
        return Sums(own.weight + other_weight, {}, {})
    flat = torch.cat(
        [
            own.tensors[name].flatten() if name in own.tensors else t.new_zeros(t.numel(), dtype=torch.float64)
            for name, t in like.items()
        ]
    )
    ranks.sum_to_rank_0(flat)
    pieces = flat.split([t.numel() for t in like.values()])
    tensors = {name: values.view(t.shape) for (name, t), values in zip(like.items(), pieces, strict=True)}
    weight = own.weight + other_weight
    return Sums(weight, tensors if weight else {}, {name: t.dtype for name, t in like.items()})


def score_tensors(scores: Scores) -> dict[str, torch.Tensor]:
    """Return scores as tensors by name."""
    arrays = {"loss": scores.loss, "samples": scores.samples}
    if scores.right is not None:
        arrays["right"] = scores.right
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}
    return tensors if scores.outputs is None else tensors | {"outputs": scores.outputs}


def pool_tensors(pool: Pool | None) -> dict[str, torch.Tensor]:
    """Return a pool as tensors by name; empty without a pool."""
    return {} if pool is None else add_prefix("pool/", pool.tensors) | {"owner": torch.from_numpy(pool.owner)}


def pool_from(tensors: dict[str, torch.Tensor]) -> Pool:
    """Return the pool of :func:`pool_tensors`."""
    return Pool(strip_prefix("pool/", tensors), tensors["owner"].numpy())
