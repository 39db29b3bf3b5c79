"""Evaluation at the sites: on samples that clients hold out, or of weights that only a client has."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from fedblend.core.dataset import Population
from fedblend.core.engine import Scores, Tensors
from fedblend.core.errors import FedblendError, legible
from fedblend.core.trees import add_prefix
from fedblend.flower.messages import to_record
from fedblend.flower.sites import ClientRequest, Sites

log = logging.getLogger("flwr")


def score_own(sites: Sites, client: int, kept: str, samples: int) -> Scores:
    """Score the weights that a client kept in round ``kept``, on the experiment's ``samples`` test samples.

    Raises :class:`FedblendError` if the site sends no valid scores.
    """
    reply = sites.exchange("evaluate", int(kept), {client: ClientRequest({"own": kept, "held": False})})[client]
    loss, right = reply.tensors.get("loss", torch.empty(0)), reply.tensors.get("right")
    valid = loss.shape == (samples,) and (right is None or right.shape == loss.shape)
    if reply.fault is not None or not valid:
        why = reply.fault or "its scores are not of this experiment's test samples"
        raise FedblendError(f"evaluate_model: the model of client {client} could not be evaluated: {why}")
    return Scores(loss.numpy(), None if right is None else right.numpy().astype(bool), np.arange(samples))


def score_held(
    sites: Sites, population: Population, weights: Tensors, own: Mapping[int, Mapping[str, str]] | None = None
) -> Scores:
    """Score weights on the test samples that clients hold out, as the numbers of right samples that sites send.

    ``own`` are by client the fields that name what a client's own model consists of, in place of these weights.
    Clients without a valid reply are left out, with a warning. Raises :class:`FedblendError` if no client remains.
    """
    clients = np.unique(population.owners(held=True)).tolist()
    record, own = to_record(add_prefix("weights/", weights)), own or {}
    fields: dict[str, Any] = {"own": None, "held": True, "personal": None}
    requests = {client: ClientRequest(fields | dict(own.get(client, {})), (record,)) for client in clients}
    replies = sites.exchange("evaluate", 0, requests)
    right: dict[int, np.ndarray] = {}
    why = "no samples are held out"
    for client, reply in replies.items():
        held, count, stated = len(population.held(client)), reply.fields.get("right"), reply.fields.get("samples")
        if reply.fault is None and stated == held and type(count) is int and 0 <= count <= held:
            right[client] = np.arange(held) < count
            continue
        why = reply.fault or legible(f"it sent {count!r} right of {stated!r} samples, and holds out {held}")
        log.warning("fedblend: client %s sent no valid scores: %s", client, why)
    if not right:
        raise FedblendError(f"holdout: no client sent valid scores; the last one: {why}")
    owner = np.repeat(list(right), [len(flags) for flags in right.values()])
    flags = np.concatenate(list(right.values()))
    return Scores(np.full(len(flags), np.nan, np.float32), flags, owner=owner)
