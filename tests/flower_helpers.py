"""A federation in one process. Messages go through Flower's own serialisation to the real ClientApp and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from fedblend.core.errors import FedblendError
from fedblend.core.payload import PAYLOAD_KINDS
from fedblend.core.upload import Tensors, bytes_of
from fedblend.flower import client as at_site
from fedblend.flower import requests
from fedblend.flower.messages import pack, to_record, unpack

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
}
"""The closed form of each message to a site."""

WORD = ",".join(kind.name for kind in PAYLOAD_KINDS.values() if kind.through_model)
"""Kinds that leave a node without a site file only by a word."""


def fields_of(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields that a message of this kind has."""
    return {name: value for name, value in fields.items() if name in FORMS[kind].model_fields}


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


# Flower sets these in the processes that it starts; a message says who sends it.
TaskIdentity._run_id, TaskIdentity._node_id, TaskIdentity._task_id = 1, 1, 1


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
        self.sent: list[tuple[int, str, int, int]] = []
        self.spoil: Callable[[int, Message, Message], Message | None] = lambda client, message, reply: reply
        self.down: set[int] = set()

    def changing(self, kind: str, clients: Collection[int], change: Callable[[Tensors], Tensors]) -> Nodes:
        """The same nodes, of which some change the tensors in their replies of a kind."""

        def spoil(client: int, message: Message, reply: Message) -> Message:
            if client not in clients or message.metadata.message_type != kind:
                return reply
            fields, tensors = unpack(reply.content)
            return Message(pack(fields, to_record(change(tensors))), reply_to=message)

        self.spoil = spoil
        return self

    def client(self, node: int) -> Any:
        return self.contexts[node].node_config.get("partition-id")

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
        try:
            reply = self.app(through(message), context)
        except Exception as error:
            reply = Message(Error(0, str(error)), reply_to=message)
        found = self.spoil(who, message, reply)
        if found is None:
            return
        down, up = size(message), size(found)
        self.sent.append((who, message.metadata.message_type, down, up))
        found = through(found)
        found.metadata.__dict__["_reply_to_message_id"] = message.metadata.message_id
        self.ready[message.metadata.message_id] = found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        # The last first, as a federation's answers may come.
        return [self.ready.pop(i) for i in reversed(list(message_ids)) if i in self.ready]
