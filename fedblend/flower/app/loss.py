"""The loss of a method on one batch, for a training loop of the user's own."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from flwr.app import Context as FlowerContext
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, Objective, Plain, StepPlan
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.engines.loop import EagerNet
from fedblend.flower.app.inputs import Inputs
from fedblend.flower.app.words import WORDS
from fedblend.flower.client_task import Memory
from fedblend.methods.objectives.output_cache import OutputCache

POOL = "fedblend-pool"
"""What the other clients shared, in a client's memory."""


class BlendedLoss:
    """The objective and the terms that the server's :class:`Strategy` chose, as a function of batches.

    Made anew in each round, after the round's weights are in the model and before its first step, since FedProx's
    distance is from the weights that the model has then. Random choices (which mean, which partner, which operations)
    are those of the round and the client, drawn batch after batch.
    """

    def __init__(
        self, model: nn.Module, inputs: Inputs, words: dict[str, Any], pool: dict[str, torch.Tensor], client: int
    ) -> None:
        self.net = EagerNet(model)
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.device = next(iter(self.params.values())).device
        self.terms = [build("term", table) for table in words["terms"]]
        chosen: Objective = build("objective", words["objective"])
        self.entries = len(next(iter(pool.values()))) if pool else 0
        # As in fedblend's own engines: who has nothing to mix with trains plainly.
        self.objective = Plain() if chosen.needs and not self.entries else chosen
        first, count = words["own"]
        self.own = (np.arange(self.entries) >= first) & (np.arange(self.entries) < first + count)
        self.round = int(words["round"])
        self.rng = stream(int(words["seed"]), "objective", self.round, client)
        start = {name: p.detach().clone() for name, p in self.params.items()} if self.terms else {}
        there = {name: tensor.to(self.device) for name, tensor in pool.items()}
        self.context = Context(inputs.task, inputs.scale.to(self.device), there, start)

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The scalar loss of inputs x [B, ...] and targets y [B] (classes) or [B, q] (numbers), ready for backward."""
        batch = Batch(x, y)
        plan = StepPlan(np.array([len(y)]), len(y), self.round, self.own, self.entries)
        rows = self.objective.draw(self.rng, plan)
        drawn = {name: torch.from_numpy(values)[0].to(self.device) for name, values in rows.items()}
        net = OutputCache(self.net, x)
        loss = self.objective.loss(net, batch, drawn, self.context)
        for term in self.terms:
            loss = loss + term.loss(self.params, net, batch, self.context)
        return loss


def blended_loss(context: FlowerContext, model: nn.Module, inputs: Inputs) -> BlendedLoss:
    """The round's loss, in a training function around which :func:`blend_mod` stands.

    Raises :class:`FedblendError` where no strategy of fedblend's has said what it is.
    """
    if WORDS not in context.state.config_records:
        raise FedblendError(
            "blended_loss: no fedblend.flower.Strategy has spoken; use one at the server, and at the client "
            "ClientApp(mods=[fedblend.flower.blend_mod])"
        )
    words = json.loads(str(context.state.config_records[WORDS][WORDS]))
    pool = Memory(context).recall(POOL, words["pool"]) if words["pool"] is not None else {}
    if pool is None:
        raise FedblendError("blended_loss: what the other clients shared is gone; blend_mod should have refused")
    return BlendedLoss(model, inputs, words, pool, number_of(context))


def number_of(context: FlowerContext) -> int:
    """What a client's random numbers are keyed by: its partition, or where it has none its node."""
    number = context.node_config.get("partition-id", context.node_id)
    return number if type(number) is int else context.node_id
