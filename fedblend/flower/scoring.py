"""Evaluation at the sites: on samples that clients hold out, or of weights that only a client has."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.engine import Scores, Tensors
from fedblend.core.errors import FedblendError, legible
from fedblend.core.setup import Setup
from fedblend.core.trees import add_prefix
from fedblend.flower.messages import round_of_mark, to_record
from fedblend.flower.sites import ClientRequest, Sites

log = logging.getLogger("flwr")

LARGEST = float(np.finfo(np.float32).max)
"""Upper bound of a loss or a metric, so that sums over samples are finite: sites compute in float32."""


def score_own(sites: Sites, client: int, kept: str, samples: int) -> Scores:
    """Score the weights that a client kept under the mark ``kept``, on the experiment's ``samples`` test samples.

    Raises :class:`FedblendError` if the site sends no valid scores.
    """
    request = ClientRequest({"own": kept, "split": "test"})
    reply = sites.exchange("evaluate", round_of_mark(kept), {client: request})[client]
    loss, right = reply.tensors.get("loss", torch.empty(0)), reply.tensors.get("right")
    # A device that diverged has a loss of NaN, as in the loop engine.
    valid = loss.shape == (samples,) and loss.dtype == torch.float32
    valid = valid and (right is None or (right.shape == loss.shape and right.dtype == torch.bool))
    if reply.fault is not None or not valid:
        why = reply.fault or "its scores are not of this experiment's test samples"
        raise FedblendError(f"evaluate_model: the model of client {client} could not be evaluated: {why}")
    return Scores(loss.numpy(), None if right is None else right.numpy().astype(bool), np.arange(samples))


def score_at_sites(
    sites: Sites,
    setup: Setup,
    weights: Tensors,
    split: Literal["holdout", "validation"],
    round: int,
    own: Mapping[int, Mapping[str, str]] | None = None,
) -> Scores:
    """Score weights of a round, counted from 0, on the samples that clients hold out, or keep for validation.

    Sites send the number of right samples, where there are classes, and the metrics that their files allow: no outputs
    and no results of single samples. ``own`` are by client the fields that name what a client's own model consists of,
    in place of these weights. Clients without a valid reply are left out, with a warning. Raises
    :class:`FedblendError` if no client remains.
    """
    field = "holdout" if split == "holdout" else "validation.clients"
    population, counts, own = setup.population, setup.task.kind == "classification", own or {}
    names = [metric.label for metric in setup.experiment.metrics]
    offsets = population.held_offsets if split == "holdout" else population.validation_offsets
    number = np.zeros(len(population), np.int64) if offsets is None else np.diff(offsets)
    record = to_record(add_prefix("weights/", weights))
    fields: dict[str, Any] = {"own": None, "split": split, "personal": None}
    clients = np.flatnonzero(number).tolist()
    requests = {client: ClientRequest(fields | dict(own.get(client, {})), (record,)) for client in clients}
    replies = sites.exchange("evaluate", round, requests)
    right: dict[int, Any] = {}
    at_clients: dict[int, dict[str, float]] = {}
    samples: dict[int, int] = {}
    why = "no client has such samples"
    for client, reply in replies.items():
        kept, count, stated = int(number[client]), reply.fields.get("right"), reply.fields.get("samples")
        metrics = metrics_in(reply.fields.get("metrics"), names)
        # Without classes a site counts no right samples, and its loss is all that it sends.
        fits = type(count) is int and 0 <= count <= kept if counts else count is None and bool(metrics)
        if not fits or reply.fault is not None or stated != kept:
            why = reply.fault or legible(f"it sent {count!r} right of {stated!r} samples, and has {kept} of them")
            log.warning("fedblend: client %s sent no valid scores: %s", client, why)
            continue
        samples[client], at_clients[client] = kept, metrics
        right |= {client: count} if counts else {}
    if not samples:
        raise FedblendError(f"{field}: no client sent valid scores; the last one: {why}")
    # One entry a client: a site may state any number of samples.
    owner, numbers = np.array(list(samples), np.int64), np.array(list(samples.values()), np.int64)
    number_right = np.array(list(right.values()), np.int64) if right else None
    no_loss = np.full(len(owner), np.nan, np.float32)
    return Scores(no_loss, number_right, owner=owner, at_clients=at_clients, numbers=numbers)


def metrics_in(sent: Any, names: Sequence[str]) -> dict[str, float]:
    """The finite numbers of the expected names in a site's reply."""
    if not isinstance(sent, Mapping):
        return {}
    numbers = {name: sent.get(name) for name in ("loss", *names)}
    return {name: float(v) for name, v in numbers.items() if isinstance(v, (int, float)) and -LARGEST < v < LARGEST}
