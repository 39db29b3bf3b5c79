"""A federation in one process, whose messages go through Flower's own serialisation to the real ClientApp and back.

Here are its experiments, its messages, and sites that lie.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import same

pytest.importorskip("flwr.serverapp", reason="Flower (extra 'flower') is not installed")

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.sharing import Pool, rows_of
from fedblend.core.state import RunState
from fedblend.core.trees import add_prefix, bytes_of
from fedblend.core.upload import Tensors
from fedblend.engines.loop_engine import LoopEngine
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.make_setup import make_setup
from fedblend.flower import client as at_site
from fedblend.flower import requests
from fedblend.flower.app_folder import FederationLimits
from fedblend.flower.messages import pack, to_record, unpack
from fedblend.flower.server import run
from fedblend.flower.site import describe_setup
from fedblend.runs.runner import FinishedRun

FORMS: dict[str, type[requests.Form]] = {
    "query.hello": requests.Hello,
    "query.share": requests.Share,
    "train": requests.Train,
    "query.ask": requests.Ask,
    "evaluate": requests.Score,
    "query.keys": requests.Keys,
    "query.shares": requests.Shares,
    "query.sign": requests.Unmask,
    "query.unmask": requests.Unmask,
    "query.loss": requests.Loss,
}
"""The closed form of each message to a site."""

WORD = ",".join(kind.name for kind in PAYLOAD_KINDS.values() if kind.through_model)
"""Kinds that leave a node without a site file only by a word."""

ALL = {"cohort": 4, "epochs": 1, "batch_size": 50, "lr": 0.1}
TWO = {**ALL, "cohort": 2}
POWER = {"name": "power-of-choice", "candidates": 3}
NOISE = {"name": "noise", "clip": 1.0, "multiplier": 1.0}
SECURE = {"name": "fedavg", "aggregator": "secure-mean"}
LINEAR = {"name": "mlp", "hidden": []}
TOLD: dict[str, Any] = {"begins": "round", "mark": None, "state": None, "pool": None, "keep": "0-0"}
"""What a client is told that trains from the round's model."""

HEADER = 128
"""Bytes before the numbers in each array of a message: the header of NumPy's file format."""


# Experiments -----------------------------------------------------------------------------------------------------


def experiment(method: Any = "fedavg", **changes: Any) -> Experiment:
    """Four clients of digits, three of them a round."""
    table = {
        "data": "digits",
        "partition": {"name": "classes", "clients": 4, "classes_per_client": 3},
        "model": {"name": "mlp", "hidden": [8, 7]},
        "train": {**ALL, "cohort": 3},
        "rounds": 2,
        "method": method,
        "unsafe": True,
        "fraction": 0.3,
    }
    return resolve({**table, **changes})


def one_round(method: Any = "fedavg", **changes: Any) -> Experiment:
    """The same with all clients in one round."""
    return experiment(method, **{"train": ALL, "rounds": 1, **changes})


def by_loop(asked: Experiment, shared: Pool | None = None) -> tuple[RunState, list[dict[str, Any]]]:
    """The run by the loop engine, whose clients share the entries ``shared`` where they are given."""
    setup = make_setup(asked)
    engine = LoopEngine(setup)
    if shared is not None:
        payloads = {int(k): rows_of(shared, shared.owner == k).tensors for k in np.unique(shared.owner)}
        engine.share = lambda *_: iter(payloads.items())
    federation = RoundLoop(setup, engine)
    state, record = federation.start()
    records = [record.as_dict()]
    while state.round < asked.rounds:
        state, record = federation.round(state)
        records.append(record.as_dict())
    return state, records


def federate(grid: Any, asked: Experiment, folder: Path, deadline: float = 0.4, min_sites: int = 2) -> FinishedRun:
    """Run an experiment with the sites behind a grid."""
    return run(grid, asked, folder, FederationLimits(min_sites, deadline))


def is_loops(finished: FinishedRun, asked: Experiment) -> None:
    """Assert that a run ends with the loop engine's weights."""
    assert same(finished.state.weights, by_loop(asked)[0].weights)


def refusals(finished: FinishedRun, round: int = 1) -> dict[int, str]:
    """Why uploads of a round were refused, by client."""
    return {one["client"]: one["reason"] for one in finished.directory.metrics()[round].get("refused", ())}


def weights_of(asked: Experiment) -> dict[str, torch.Tensor]:
    """The first weights of an experiment, as a message has them."""
    return add_prefix("weights/", make_setup(asked).weights())


# Messages --------------------------------------------------------------------------------------------------------


def order(kind: str, asked: Experiment, tensors: Tensors | None = None, **fields: Any) -> Message:
    """A server's request to client 0."""
    told = {"experiment": as_table(asked), "client": 0, "round": 0, **TOLD, "split": "holdout", **fields}
    told = {name: value for name, value in told.items() if name in FORMS[kind].model_fields}
    told |= {} if "setup" in told else {"setup": describe_setup(make_setup(asked))}
    return Message(pack(told, to_record(tensors or {})), 1000, kind)


def through(message: Message) -> Message:
    """Return a message as its receiver reads it: written as objects and read from their bytes."""
    objects = {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}
    return inflate_object_from_contents(message.object_id, objects)


def size(message: Message) -> int:
    """Return the bytes of the tensors in a message; 0 for an unreadable message."""
    try:
        return bytes_of(unpack(message.content)[1]) if message.has_content() else 0
    except FedblendError:
        return 0


def numbers_in(message: Message) -> int:
    """Bytes of the numbers in a message, from the shapes and types that its arrays state; their headers are checked."""
    total = 0
    for record in message.content.array_records.values() if message.has_content() else ():
        for array in record.values():
            size = math.prod(array.shape) * np.dtype(array.dtype).itemsize
            assert len(array.data) == size + HEADER
            total += size
    return total


def trained_in(message: Message) -> int | None:
    """The round of a request to train, counted from 0; ``None`` for other messages."""
    return unpack(message.content)[0]["round"] if message.metadata.message_type == "train" else None


# Flower sets these in the processes that it starts; a message says who sends it.
TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1

Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], RecordDict | None]
"""What a liar sends, from the fields and tensors of an honest reply; ``None``: nothing."""


class Nodes:
    """A grid whose nodes are contexts; ``spoil`` may change, drop or break a reply of a node."""

    def __init__(self, configs: Iterable[dict[str, Any]], run_id: int = 1, app: ClientApp = at_site.app) -> None:
        self.app = app
        # Unlike the partition, and not in its order.
        self.contexts = {
            1000 - 7 * i: Context(run_id, 1000 - 7 * i, config, RecordDict(), {}) for i, config in enumerate(configs)
        }
        self.ids = itertools.count()
        TaskIdentity._run_id = run_id
        self.ready: dict[str, Message] = {}
        self.kept: list[tuple[int, str, Message, Message]] = []  # Client, type, message, reply; each as it was received
        self.spoil: Callable[[int, Message, Message], Message | None] = lambda client, message, reply: reply
        self.down: set[int] = set()

    def spoiled(self, spoil: Callable[[int, Message, Message], Message | None]) -> Nodes:
        """The same nodes, whose replies are changed, dropped or broken once more."""
        before = self.spoil

        def both(client: int, message: Message, reply: Message) -> Message | None:
            found = before(client, message, reply)
            return found if found is None else spoil(client, message, found)

        self.spoil = both
        return self

    def changing(
        self, kind: str, clients: Collection[int], change: Callable[[dict[str, torch.Tensor]], Tensors]
    ) -> Nodes:
        """The same nodes, of which some change the tensors in their replies of a kind."""
        return self.lying(kind, clients, table_only(change))

    def lying(self, kind: str, clients: Collection[int], change: Change) -> Nodes:
        """The same nodes, of which some lie in their replies of a kind."""

        def lie(client: int, message: Message, reply: Message) -> Message | None:
            if client not in clients or message.metadata.message_type != kind:
                return reply
            made = change(*unpack(reply.content))
            return made if made is None else Message(made, reply_to=message)

        return self.spoiled(lie)

    def after(self, round: int, client: int | None, do: Callable[[], object]) -> Nodes:
        """The same nodes; ``do`` is called when a client (``None``: each of them) has trained in a round."""

        def trained(who: int, message: Message, reply: Message) -> Message:
            if trained_in(message) == round and client in (None, who):
                do()
            return reply

        return self.spoiled(trained)

    def silent(self, client: int, round: int | None = None) -> Nodes:
        """The same nodes, of which one never replies, or not to a request to train in a round."""
        return self.spoiled(
            lambda who, message, reply: None if who == client and round in (None, trained_in(message)) else reply
        )

    def without(self, *clients: int) -> Nodes:
        """The same nodes, of which some are not connected."""
        self.down = set(clients)
        return self

    def failing(self, client: int, code: int, reason: str) -> Nodes:
        """The same nodes, of which one answers requests to train with an error of Flower's."""

        def fail(who: int, message: Message, reply: Message) -> Message:
            fails = who == client and message.metadata.message_type == "train"
            return Message(Error(code, reason), reply_to=message) if fails else reply

        return self.spoiled(fail)

    def client(self, node: int) -> Any:
        return self.contexts[node].node_config.get("partition-id")

    def node(self, client: Any) -> int:
        """The node of a client."""
        return next(node for node in self.contexts if self.client(node) == client)

    def restart(self, client: int) -> None:
        """Begin a site's app anew: nothing is left in its memory, and its node has another number."""
        old = self.node(client)
        context = self.contexts.pop(old)
        context.state = RecordDict()
        self.contexts[old + 5000] = context
        at_site.engine_of.cache_clear()

    def get_node_ids(self) -> list[int]:
        return [node for node in self.contexts if self.client(node) not in self.down]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(str(next(self.ids)))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._answer(message.metadata.dst_node_id, message)
        return ids

    def _answer(self, node: int, message: Message) -> None:
        context, who = self.contexts[node], self.client(node)
        received = through(message)
        try:
            reply = self.app(received, context)
        except Exception as error:
            reply = Message(Error(0, str(error)), reply_to=message)
        found = self.spoil(who, message, reply)
        if found is None:
            return
        found = through(found)
        found.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        self.kept.append((who, message.metadata.message_type, received, found))
        self.ready[message.metadata.message_id] = found

    @property
    def sent(self) -> list[tuple[int, str, int, int]]:
        """Client, type, and bytes of tensors down and up of each message with a reply."""
        return [(client, kind, size(message), size(reply)) for client, kind, message, reply in self.kept]

    def exchanged(self) -> list[int]:
        """Bytes that were sent down and up, without first queries of nodes and evaluations, which are not counted."""
        counted = [one for one in self.kept if one[1] not in ("query.hello", "evaluate")]
        return [sum(numbers_in(one[place]) for one in counted) for place in (2, 3)]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def reply(self, message: Message) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """The fields and tensors of the reply to one message."""
        (reply,) = self.send_and_receive([message])
        return unpack(reply.content)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        # The last first, as a federation's answers may come.
        return [self.ready.pop(i) for i in reversed(list(message_ids)) if i in self.ready]


def nodes(number: int = 4, **config: Any) -> Nodes:
    """Nodes without site files, from which each kind of payload may leave."""
    return Nodes({"partition-id": client, "allow": WORD, **config} for client in range(number))


def spoiling(client: int, kind: str, change: Change) -> Nodes:
    """Four nodes, one of which lies in its replies of a kind."""
    return nodes().lying(kind, {client}, change)


def fields_only(**changes: Any) -> Change:
    """A change of a reply's fields."""
    return lambda fields, tensors: pack({**fields, **changes}, to_record(tensors))


def tensors_only(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Change:
    """A change of each of a reply's tensors."""
    return lambda fields, tensors: pack(fields, to_record({n: change(n, t) for n, t in tensors.items()}))


def table_only(change: Callable[[dict[str, torch.Tensor]], Tensors]) -> Change:
    """A change of all tensors of a reply together."""
    return lambda fields, tensors: pack(fields, to_record(change(tensors)))


def refuses(fields: Any, tensors: Any) -> RecordDict:
    """A refusal in place of a payload."""
    return pack({"fault": "no"})
