"""At a client: the mod around the user's training function, and the answer to the request to share."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable

from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import build
from fedblend.core.sharing import ClientData, Payload
from fedblend.flower.app.fitting import of_sharing
from fedblend.flower.app.inputs import Inputs
from fedblend.flower.app.loss import POOL, number_of
from fedblend.flower.app.words import SHARE, WORDS, put, take, tensors_of
from fedblend.flower.audit import Audit
from fedblend.flower.client import refuse
from fedblend.flower.client_task import Memory
from fedblend.flower.messages import arrays
from fedblend.flower.replay_guard import Once
from fedblend.flower.site import RefusedByPolicy, Site, site_of
from fedblend.flower.work import hides

Samples = Callable[[Context], tuple[torch.Tensor, torch.Tensor]]
"""Gives a client's samples: inputs x float32 [n, ...] as its model takes them, and targets y."""


def blend_mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """A Flower mod: keep what a :class:`Strategy` says for :func:`blended_loss`, and hold the site's policy.

    The training function gets the message without it, as the wrapped strategy made it. Where the SuperNode was started
    with ``site="..."``, the site file's `allow`, `rounds`, `protection` and `audit` hold for the model in the reply. A
    round's model leaves once.
    Messages without fedblend's words pass. Raises :class:`FedblendError` (Flower then answers with an error).
    """
    # A mod of the whole app stands around its queries and tests too.
    if message.metadata.message_type.partition(".")[0] != MessageType.TRAIN:
        return call_next(message, context)
    words, tensors = take(message.content)
    if words is None:
        return call_next(message, context)
    memory = Memory(context)
    if tensors:
        memory.keep(POOL, words["pool"], tensors)
    elif words["pool"] is not None and memory.recall(POOL, words["pool"]) is None:
        raise FedblendError("what the other clients shared is not here any more; the strategy sends it again")
    context.state[WORDS] = ConfigRecord({WORDS: json.dumps(words)})
    site, run, round = policy_of(context), str(context.run_id), int(words["round"])
    record = Audit(site.audit)
    try:
        refuse(site, "weights", record)
        once = Once(memory, record, run, round, number_of(context), "weights")
        once.require("upload", True)
        starts = [tensors_of(table) for table in message.content.array_records.values()]
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        content = protected(site, starts, reply.content)
    except RefusedByPolicy as refusal:
        record.refused(run, round, number_of(context), "weights", str(refusal))
        raise
    left = {f"{place}/{n}": t for place, table in content.array_records.items() for n, t in tensors_of(table).items()}
    record.sent(run, round, number_of(context), "weights", left, True)
    once.done("upload")
    return Message(content, reply_to=message)


def protected(site: Site, starts: list[dict[str, torch.Tensor]], content: RecordDict) -> RecordDict:
    """A reply's content with the site's protection on its model. Raises :class:`RefusedByPolicy`."""
    if site.protection is None:
        return content
    if getattr(site.protection, "on", "weights") == "gradients":
        raise RefusedByPolicy('protection.on = "gradients" needs the learning rate, which only your own loop knows')
    models = list(content.array_records.items())
    if len(starts) != 1 or len(models) != 1 or set(starts[0]) != set(models[0][1]):
        raise RefusedByPolicy(
            "protection works on one model in and one of the same tensors out; this app sends something else"
        )
    ((name, table),) = models
    changed = site.protection.protect(tensors_of(table), starts[0], 1.0, np.random.default_rng())
    made = RecordDict(dict(content.items()))
    made[name] = arrays(changed)
    return made


def add_sharing(app: ClientApp, inputs: Inputs, samples: Samples) -> None:
    """Let an app's clients share means of their samples when a :class:`Strategy` asks for them (FedMix, NaiveMix).

    A query of its own, not a mod: Flower calls mods only around functions that are registered.
    """

    @app.query(SHARE)
    def share(message: Message, context: Context) -> Message:
        words, _ = take(message.content)
        site = policy_of(context)
        record, run, client = Audit(site.audit), str(context.run_id), number_of(context)
        sharing = build("sharing", (words or {}).get("sharing"))
        try:
            # The server is not trusted to have looked.
            if why := of_sharing(sharing):
                raise RefusedByPolicy(f"this app shares nothing of that kind: {why}")
            refuse(site, sharing.bytes_kind, None)
            once = Once(Memory(context), record, run, 0, client, sharing.bytes_kind)
            once.require("sharing", False)
        except RefusedByPolicy as refusal:
            record.refused(run, 0, client, sharing.bytes_kind, str(refusal))
            raise
        payload = _shared(sharing, words or {}, inputs, samples(context), max(site.min_mean, 2), client)
        if payload:
            record.sent(run, 0, client, sharing.bytes_kind, payload, False)
            once.done("sharing")
        return Message(put(RecordDict(), {}, arrays(payload) if payload else None), reply_to=message)


def _shared(
    sharing: Any,
    words: dict[str, Any],
    inputs: Inputs,
    held: tuple[torch.Tensor, torch.Tensor],
    minimum: int,
    client: int,
) -> Payload | None:
    x, y = held
    if tuple(x.shape[1:]) != inputs.shape or not x.is_floating_point() or len(x) != len(y):
        raise FedblendError(
            f"samples: {x.dtype} of shape {list(x.shape)} and {len(y)} targets are not valid: inputs as the model "
            f"takes them, floats [n, {', '.join(map(str, inputs.shape))}], and as many targets"
        )
    rng = np.random.default_rng() if hides(sharing) else stream(int(words["seed"]), "share", 0, client)
    minimum = max(minimum, int(words["min_mean"]))
    local = ClientData(x.float().cpu(), y.cpu(), inputs.task, inputs.scale, _no_hidden, rng, minimum)
    payload: Payload | None = sharing.share(local)
    return payload


def _no_hidden(x: torch.Tensor, layer: int) -> torch.Tensor:
    raise FedblendError("hidden states are not shared by an app of your own")


def policy_of(context: Context) -> Site:
    """The site file that the SuperNode was started with, or what a site without one allows: no single samples."""
    return site_of(context.node_config) if "site" in context.node_config else Site()
