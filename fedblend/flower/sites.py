"""The sites of a federation: which node is which client, and one exchange of messages with some of them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from flwr.app import ArrayRecord, Message

from fedblend.core.errors import FedblendError, legible, listed
from fedblend.flower.messages import pack, unpack

POLL = (0.05, 1.0)
"""Seconds between two looks for answers: at first, and at most; Flower's own loop looks every 3."""

JOIN = 0.5
"""Seconds between two looks at which nodes are connected, while too few are."""

GREETING = 60.0
"""Seconds that a node has to say which client it is, within the deadline."""

RIVAL = 20.0
"""Seconds that a node has to answer where another one says that it is its client."""

GREETINGS = 3
"""How often a node that does not answer is asked."""

MOST = 10**8
"""Samples that a site can say that it holds."""

HELLO = "query.hello"

FAILURES = {
    5: "its site is no longer connected",
    7: "its SuperNode does not trust this app (--trusted-entities)",
    8: "its app was killed, or no longer answers its SuperNode",
}
"""What some of Flower's error codes mean here; their own words are about messages."""

EXPIRED = (3, 4)
"""Flower's error codes for a message whose time, the deadline, is over, or its answer's: as good as no answer."""

log = logging.getLogger("flwr")

Refusal = str


class Wire(Protocol):
    """What is used of Flower's Grid."""

    def get_node_ids(self) -> Iterable[int]:
        """The nodes that are connected."""
        ...

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages; gives their ids in order, ``None`` for one that could not be sent."""
        ...

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """The answers to these messages that have come."""
        ...


@dataclass(frozen=True)
class Order:
    """What one client is told: words, and tables of tensors."""

    words: Mapping[str, Any]
    tables: tuple[ArrayRecord, ...] = ()


@dataclass(frozen=True)
class Reply:
    """What a client answered, or why there is no answer (``fault``)."""

    words: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fault: Refusal | None = None


class Sites:
    """The nodes of a federation by the client that each of them is.

    Node ids are random and change when a node of an open federation restarts; a node is asked for its client once.
    ``about`` goes with every message,
    since a process at a site knows nothing of those before it: the experiment, and what :func:`about_setup` tells.
    ``deadline`` is how many seconds any one exchange may take, ``fewest`` the sites without which none begins.
    ``apart`` is the client that is the server, where that has data of its own: nobody waits for a site of it.
    """

    def __init__(
        self,
        wire: Wire,
        clients: int,
        fewest: int,
        deadline: float,
        about: dict[str, Any],
        apart: int | None = None,
    ) -> None:
        if not 1 <= fewest <= clients:
            raise FedblendError(f"min_sites: {fewest}: the experiment has {clients} clients; valid: 1 to {clients}")
        if not deadline > 0:
            raise FedblendError(f"deadline: {deadline} is not valid: a number of seconds above 0")
        self.wire, self.clients, self.fewest, self.deadline, self.apart = wire, clients, fewest, deadline, apart
        self.nodes: dict[int, int] = {}
        self.facts: dict[int, dict[str, Any]] = {}
        self._asked: set[int] = set()
        self._silent: Counter[int] = Counter()
        self._rivals: dict[int, int] = {}
        self.about = about

    def meet(self, wanted: int | None = None) -> None:
        """Wait until ``wanted`` sites are connected (default: the fewest), or the deadline has passed.

        Raises :class:`FedblendError` if fewer than the fewest are connected then.
        """
        wanted, end = wanted or self.fewest, time.monotonic() + self.deadline
        self._look()
        while self._there() < wanted and time.monotonic() < end:
            time.sleep(min(JOIN, self.deadline / 4))
            self._look()
        if self._there() < self.fewest:
            missing = [client for client in range(self.clients) if client not in (*self.nodes, self.apart)]
            raise FedblendError(
                f"min_sites: {self.fewest}, but only {self._there()} of {self.clients} sites are connected after "
                f"{self.deadline:g} seconds (deadline); missing: {listed(missing)}. Start their SuperNodes, and go on "
                "by running the same command again"
            )

    def exchange(self, kind: str, round: int, orders: Mapping[int, Order]) -> dict[int, Reply]:
        """Send each client its order and wait for the answers until the deadline; one reply a client, in their order.

        Raises :class:`FedblendError` if too few sites are connected to begin.
        """
        self.meet()
        to_nodes, absent = {}, {}
        for client, order in orders.items():
            if client in self.nodes:
                words = {**self.about, "round": round, "client": client, **order.words}
                to_nodes[self.nodes[client]] = Order(words, order.tables)
            else:
                absent[client] = Reply(fault="its site is not connected")
        replies = self._send(kind, round, to_nodes, self.deadline)
        return {client: absent.get(client) or replies[self.nodes[client]] for client in orders}

    def _there(self) -> int:
        """How many sites are connected."""
        return len(self.nodes.keys() - {self.apart})

    def _look(self) -> None:
        """Note which nodes are there, and ask those that are new which client they are."""
        there = set(self.wire.get_node_ids())
        gone = {client for client, node in self.nodes.items() if node not in there}
        self.nodes = {client: node for client, node in self.nodes.items() if client not in gone}
        # Who said to be a client that another node was then is asked again once that one is gone.
        self._asked = {node for node in self._asked & there if self._rivals.get(node) not in gone}
        new = sorted(there - self._asked)
        if not new:
            return
        self._asked |= set(new)
        replies = self._send(HELLO, 0, dict.fromkeys(new, Order(self.about)), min(self.deadline, GREETING))
        for node, reply in replies.items():
            self._enter(node, reply)

    def _enter(self, node: int, reply: Reply) -> None:
        client = reply.words.get("client")
        if reply.fault is not None:
            if not reply.words and self._silent[node] < GREETINGS - 1:
                # Perhaps its machine is busy: it is asked again at the next look.
                self._silent[node] += 1
                self._asked.discard(node)
            log.warning("fedblend: node %s takes no part: %s", node, reply.fault)
        elif not (_is_number(reply.words.get("samples")) and _is_number(reply.words.get("holds_out"))):
            log.warning("fedblend: node %s takes no part: it says that it holds a number of samples that is none", node)
        elif type(client) is not int or not 0 <= client < self.clients:
            log.warning("fedblend: node %s says partition-id %r; valid: 0 to %s", node, client, self.clients - 1)
        else:
            if client in self.nodes:
                before = self.nodes[client]
                if self._answers(client):
                    log.warning("fedblend: node %s says that it is client %s, as node %s is", node, client, before)
                    self._rivals[node] = client
                    return
                # A site that was restarted has a new node; the old one is listed until its heartbeat is missed.
                log.warning("fedblend: client %s is now node %s, in place of %s", client, node, before)
            self.nodes[client] = node
            self.facts[client] = reply.words

    def _answers(self, client: int) -> bool:
        """Whether the node that a client was until now still says that it is this client."""
        node = self.nodes[client]
        reply = self._send(HELLO, 0, {node: Order(self.about)}, min(self.deadline, RIVAL))[node]
        return reply.fault is None and reply.words.get("client") == client

    def _send(self, kind: str, round: int, orders: Mapping[int, Order], seconds: float) -> dict[int, Reply]:
        """One reply for each node; what has not come after so many seconds has a fault that says so."""
        if not orders:
            return {}
        messages = [
            Message(pack(order.words, *order.tables), node, kind, ttl=seconds, group_id=str(round))
            for node, order in orders.items()
        ]
        ids = list(self.wire.push_messages(messages))
        # Flower answers with nothing where all messages together are too large for it.
        ids += [None] * (len(messages) - len(ids))  # type: ignore[list-item]
        waiting = {id: node for id, node in zip(ids, orders, strict=True) if id}
        replies = {node: Reply(fault="the message could not be sent") for node in orders}
        replies |= {node: Reply(fault=f"no answer within {seconds:g} seconds (deadline)") for node in waiting.values()}
        for answer in answers(self.wire.pull_messages, waiting, seconds):
            node = waiting.pop(answer.metadata.reply_to_message_id)
            if not (answer.has_error() and answer.error.code in EXPIRED):
                replies[node] = read(answer)
        return replies


def _is_number(samples: Any) -> bool:
    """Whether a number of samples can be one; ``None`` where a site has none of its own."""
    return samples is None or (type(samples) is int and 0 <= samples <= MOST)


def answers(pull: Callable[[list[str]], Iterable[Message]], waiting: Mapping[str, int], seconds: float) -> Any:
    """Answers to the messages that are waited for, as they come; none after so many seconds."""
    end, pause = time.monotonic() + seconds, POLL[0]
    while waiting:
        for answer in list(pull(list(waiting))):
            if answer.metadata.reply_to_message_id in waiting:
                pause = POLL[0]
                yield answer
        if time.monotonic() > end:
            return
        if waiting:
            time.sleep(pause)
            pause = min(1.5 * pause, POLL[1])


def read(answer: Message) -> Reply:
    """An answer as a reply: a site's refusal, a failure in its app and a message that is none all have a fault."""
    if answer.has_error() and answer.error.code in FAILURES:
        return Reply(fault=FAILURES[answer.error.code])
    if answer.has_error():
        return Reply(fault=read_error(answer))
    try:
        words, tensors = unpack(answer.content)
    except FedblendError as error:
        return Reply(fault=legible(f"it sent {error}"))
    fault = words.get("fault")
    return Reply(words, tensors, None if fault is None else legible(fault))


def read_error(answer: Message) -> str:
    """Why an app failed, in one line."""
    reason = (answer.error.reason or "").strip().splitlines()
    return f"its app failed (code {answer.error.code}): {legible(reason[-1]) if reason else 'no reason given'}"
