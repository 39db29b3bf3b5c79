"""How well a model does where only sites can tell: on samples that they hold out, or with weights that one keeps."""

from __future__ import annotations

import logging

import numpy as np
import torch

from fedblend.core.dataset import Population
from fedblend.core.engine import Scores, Tensors
from fedblend.core.errors import FedblendError, legible
from fedblend.core.trees import add_prefix
from fedblend.flower.messages import arrays
from fedblend.flower.sites import Order, Sites

log = logging.getLogger("flwr")


def score_own(sites: Sites, client: int, kept: str, samples: int) -> Scores:
    """Scores of the experiment's test samples, so many, by the weights of round ``kept`` that a client has of its own.

    Raises :class:`FedblendError` if its site does not tell them.
    """
    reply = sites.exchange("evaluate", int(kept), {client: Order({"own": kept, "held": False})})[client]
    loss, right = reply.tensors.get("loss", torch.empty(0)), reply.tensors.get("right")
    alike = loss.shape == (samples,) and (right is None or right.shape == loss.shape)
    if reply.fault is not None or not alike:
        why = reply.fault or "its scores are not of this experiment's test samples"
        raise FedblendError(f"evaluate_model: the model of client {client} could not be evaluated: {why}")
    return Scores(loss.numpy(), None if right is None else right.numpy().astype(bool), np.arange(samples))


def score_held(sites: Sites, population: Population, weights: Tensors) -> Scores:
    """How many of each client's own test samples are right, as the counts that the sites tell; others are left out.

    Raises :class:`FedblendError` if none of them tells any.
    """
    clients = np.unique(population.owners(held=True)).tolist()
    order = Order({"own": None, "held": True}, (arrays(add_prefix("weights/", weights)),))
    replies = sites.exchange("evaluate", 0, dict.fromkeys(clients, order))
    right: dict[int, np.ndarray] = {}
    why = "no samples are held out"
    for client, reply in replies.items():
        held, count = len(population.held(client)), reply.words.get("right")
        if reply.fault is None and reply.words.get("samples") == held and type(count) is int and 0 <= count <= held:
            right[client] = np.arange(held) < count
            continue
        why = reply.fault or legible(f"it tells of {count!r} right of {reply.words.get('samples')!r}, and holds {held}")
        log.warning("fedblend: client %s does not say how well the model does: %s", client, why)
    if not right:
        raise FedblendError(f"holdout: no client says how well the model does; the last one: {why}")
    owner = np.repeat(list(right), [len(flags) for flags in right.values()])
    flags = np.concatenate(list(right.values()))
    return Scores(np.full(len(flags), np.nan, np.float32), flags, owner=owner)
