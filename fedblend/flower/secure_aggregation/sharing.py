"""Means that the server of a federation sees only summed: one sum under masks for each group of clients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedblend.core.sharing import Payload
from fedblend.core.upload import fault_of
from fedblend.flower.messages import Tensors
from fedblend.flower.secure_aggregation.masks import MEANS, about_sum
from fedblend.flower.secure_aggregation.server import MaskedSum, TooFew
from fedblend.flower.sites import Order, Sites
from fedblend.methods.sharing.secure_means import SecureMeans

log = logging.getLogger("flwr")


@dataclass
class Summed:
    """What groups of clients have shared; ``faults`` says why clients are in no sum.

    ``payloads`` hold each group's sum in the place of the first of its clients, and zeros in those of the others, so
    that they sum to what the clients shared. ``up`` and ``down`` count the bytes of keys and shares.
    """

    payloads: dict[int, Payload] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)
    up: int = 0
    down: int = 0


def shared_sums(
    sites: Sites, round: int, sharing: SecureMeans, clients: Sequence[int], rng: np.random.Generator, like: Tensors
) -> Summed:
    """Have ``clients`` share under masks, one group of theirs after another; ``like`` is the form of what one shares.

    A group of which too few stay has no sum. Raises :class:`FedblendError` where a wrong share of a secret comes.
    """
    made, asked = Summed(), np.sort(np.array(clients, np.int64))
    group = sharing.groups(asked, rng)
    for number in range(int(group.max(initial=-1)) + 1):
        members = asked[group == number].tolist()
        masks = MaskedSum(sites, round, sharing.threshold(len(members)), of=MEANS, about=about_sum(sites.about, round))
        try:
            total, there = _sum_of(masks, members, like)
            made.payloads |= {client: _zeros(like) for client in there} | {there[0]: _parts(total, like)}
        except TooFew as error:
            made.faults |= dict.fromkeys(members, f"its group has no sum: {error}")
        made.faults |= masks.faults
        made.up, made.down = made.up + masks.up, made.down + masks.down
    made.payloads = dict(sorted(made.payloads.items()))
    return made


def _sum_of(masks: MaskedSum, members: list[int], like: Tensors) -> tuple[torch.Tensor, list[int]]:
    """The sum of what the members of a group share, int32 [numbers], and which of them are in it."""
    orders = {client: Order({}, (masks.table_for(client),)) for client in masks.begin(members)}
    form = {"masked": torch.empty(sum(t.numel() for t in like.values()), dtype=torch.int32)}
    vectors: dict[int, torch.Tensor] = {}
    for client, reply in masks.sites.exchange("query.share", masks.round, orders).items():
        nothing = "it has too few samples for a mean" if reply.words.get("nothing") else None
        fault = reply.fault or nothing or fault_of(reply.tensors, form)
        if fault:
            masks.faults[client] = fault
        else:
            vectors[client] = reply.tensors["masked"]
    return masks.sum(vectors), sorted(vectors)


def _parts(numbers: torch.Tensor, like: Tensors) -> Payload:
    """Numbers as the tensors that they were, in order of name."""
    names = sorted(like)
    parts = numbers.split([like[name].numel() for name in names])
    return {name: part.reshape(like[name].shape) for name, part in zip(names, parts, strict=True)}


def _zeros(like: Tensors) -> Payload:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}
