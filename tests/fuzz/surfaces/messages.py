"""Messages of a federation: a server's to the app of a site, and a site's replies to the app of the server."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import json
from pathlib import Path
from random import Random
from typing import Any

import mutations
import numpy as np
import torch

from surfaces.base import TINY, Case, Outcome, call

ASKED: dict[str, dict[str, Any]] = {
    **{name: {"name": name} for name in ("fedavg", "fedmix", "fd", "aggenhance-secure", "scaffold")},
    "mix2fld": {"name": "mix2fld", "sharing": {"samples": 40}, "server_step": {"steps": 1}},
    "masked": {"name": "fedmix", "aggregator": "secure-mean"},
}
"""Methods whose messages are changed."""


def _run(method: str, folder: Path, grid: Any, min_sites: int, deadline: float) -> None:
    from fedblend.experiment.config import resolve
    from fedblend.flower.app_folder import FederationLimits
    from fedblend.flower.server import run

    # A site reads no file that a server names.
    table = {**TINY, "data": "digits", "fraction": 0.1, "method": ASKED[method]}
    table["train"] = {**TINY["train"], "cohort": 3}
    run(grid, resolve(table), folder / "run", FederationLimits(min_sites, deadline))


@functools.cache
def _messages(name: str, folder: Path) -> list[tuple[str, int, Any, dict[str, Any], dict[str, torch.Tensor]]]:
    """What the server sends in a run of this method: kind, client, state of the client before, fields and tensors."""
    from flower_helpers import Nodes

    from fedblend.flower.messages import unpack

    folder.mkdir(parents=True, exist_ok=True)
    grid = Nodes({"partition-id": client} for client in range(3))
    kept: list[Any] = []
    answer = grid.app

    def listening(message: Any, context: Any) -> Any:
        state = copy.deepcopy(context.state)
        kept.append((message.metadata.message_type, grid.client(context.node_id), state, *unpack(message.content)))
        return answer(message, context)

    grid.app = listening  # type: ignore[assignment]
    _run(name, folder, grid, 3, 20)
    return kept


def _changed_content(rng: Random, fields: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """A message's content with changed fields, tensors or records."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    from fedblend.flower.messages import pack, to_record

    kind = rng.randrange(8)
    if kind <= 3 or not tensors:
        changed = mutations.plain(mutations.of_table(rng, fields), toml=False)
        try:
            text = json.dumps(changed)
        except (ValueError, RecursionError):
            text = "[" * 100_000
        text = mutations.of_text(rng, text) if rng.random() < 0.1 else text
        content = RecordDict({"fields": ConfigRecord({"fields": text})})
        if tensors:
            content["tensors0"] = to_record(tensors)
        return content
    content, made = pack(fields), {}
    if kind <= 5:
        for name, array in mutations.of_arrays(rng, {name: tensor.numpy() for name, tensor in tensors.items()}).items():
            with contextlib.suppress(TypeError, ValueError):
                made[name] = Array(np.ascontiguousarray(array).reshape(array.shape))
    else:
        bad, stored = rng.choice(list(tensors)), io.BytesIO()
        np.save(stored, tensors[bad].numpy())
        changed = mutations.of_bytes(rng, stored.getvalue())
        made = {name: Array(tensor.numpy()) for name, tensor in tensors.items()}
        made[bad] = Array("float32", tuple(tensors[bad].shape), "numpy.ndarray", changed)
    content["tensors0"] = ArrayRecord(made)
    return content


def site_messages(rng: Random, folder: Path, real: Path) -> Case:
    """A changed message of a server to the app of a site."""
    from flwr.app import Context, Message

    from fedblend.flower.client import app
    from fedblend.flower.messages import unpack

    name = rng.choice([*ASKED])
    kind, client, state, fields, tensors = rng.choice(_messages(name, real.parent / "messages" / name))
    content, config = _changed_content(rng, fields, tensors), {"partition-id": client}
    if rng.random() < 0.2:
        config[rng.choice(("partition-id", "site", "allow"))] = rng.choice((*mutations.TEXTS[:8], 10**12, -1, 1.5))

    def run() -> Outcome:
        message = Message(content, 1, kind, group_id="0")
        message.metadata.__dict__["_message_id"] = "1"
        reply = app(message, Context(1, 1, config, copy.deepcopy(state), {}))
        if not reply.has_content():
            raise RuntimeError(f"the site's app replied with an error: {reply.error.reason}")
        fault = unpack(reply.content)[0].get("fault")
        return Outcome() if fault is None else Outcome(f"fedblend: error: {fault}", 2)

    return Case(f"a site is sent a changed {kind} of {name}", run)


def server_messages(rng: Random, folder: Path, real: Path) -> Case:
    """A changed reply of a site to the app of the server."""
    from flower_helpers import Nodes
    from flwr.app import Message

    from fedblend.flower.messages import unpack

    name, victim, number, seen = rng.choice([*ASKED]), rng.randrange(3), rng.randrange(3), [0]
    grid = Nodes({"partition-id": client} for client in range(3))

    def spoil(who: int, message: Any, reply: Any) -> Any:
        if who != victim or not reply.has_content():
            return reply
        seen[0] += 1
        if seen[0] - 1 != number and rng.random() < 0.7:
            return reply
        return Message(_changed_content(rng, *unpack(reply.content)), reply_to=message)

    grid.spoil = spoil
    return call(f"a server is sent changed replies in {name}", lambda: _run(name, folder, grid, 2, 2))
