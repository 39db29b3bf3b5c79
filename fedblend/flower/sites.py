"""The sites of a federation as the server sees them: which node is which client, and exchanges of messages."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import httpx
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from fedblend.core.errors import FedblendError, brief, by_reason, legible, listed
from fedblend.data.partitions.prepare import divided
from fedblend.flower.messages import VERSION, pack, unpack
from fedblend.flower.secure_aggregation.masks import hello_text, is_signed

POLL_S = (0.05, 1.0)
"""Shortest and longest pause between two polls for replies, in seconds; Flower's own loop polls every 3 seconds."""

CONNECT_POLL_S = 0.5  # Seconds between two looks at the connected nodes while too few are connected
HELLO_S = 60.0  # Most seconds that a new node has to reply with its client's number

HELLO_ATTEMPTS = 3
"""How often a new node that does not reply receives the first query. Each later connection gets half the time."""

PATIENCE = 3  # Exchanges in a row without a client's reply after which it is left out of 1 round, then of 2, 4, 8,
MAX_SAMPLES = 10**8  # Largest number of samples that a site may state
MOST_WORDS = 100_000  # Most characters of a reply's fields; a good reply has some hundreds
HELLO = "query.hello"

PEERS = "peers.toml"
"""File in the server's folder with the public key and name of each client: `0 = "ecdsa-sha2-nistp384 AAAA NAME"`."""

FAILURES = {
    5: "its site is no longer connected",
    7: "its SuperNode does not trust this app (--trusted-entities)",
    8: "its app was killed, or no longer answers its SuperNode",
}
"""Reasons for some of Flower's error codes; Flower's own texts are about messages, not about sites."""

EXPIRED = (3, 4)  # Flower's error codes for a message, or a reply, whose time is over. They count as no reply

log = logging.getLogger("flwr")


@dataclass(frozen=True)
class ClientRequest:
    """The fields and records of tensors that one client receives."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    records: tuple[ArrayRecord, ...] = ()


@dataclass(frozen=True)
class Reply:
    """A client's reply."""

    fields: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fault: str | None = None  # Why the reply cannot be used, or why there is none
    is_late: bool = False  # Whether there was no reply before the deadline


class Sites:
    """The nodes of a federation, by client.

    Node ids are random. They change when a node of an open federation restarts; each new node receives one query for
    its client's number.

    ``setup_fields`` are part of every message, because a process at a site keeps nothing of earlier messages: the
    experiment and the result of :func:`~fedblend.flower.site.describe_setup`. ``min_sites`` is the fewest connected
    sites with which an exchange begins, ``deadline`` the seconds that one exchange may take. ``server_client`` is the
    client that the server itself is, where the server has data of its own; no site is expected for it. ``peers``
    returns lines with the public keys of clients: only a node that signs with its client's key takes part.
    """

    def __init__(
        self,
        grid: Grid,
        clients: int,
        min_sites: int,
        deadline: float,
        setup_fields: dict[str, Any],
        server_client: int | None = None,
        peers: Callable[[], Mapping[int, str]] = dict,
    ) -> None:
        self.expected = set(range(clients)) - {server_client}
        """Clients whose sites take part; only these count as connected or missing."""
        if not 1 <= min_sites <= (most := len(self.expected)):
            itself = "" if server_client is None else f", of which client {server_client} is the server"
            has = f"{clients} clients{itself}"
            raise FedblendError(f"min_sites: {min_sites}: the experiment has {has}; valid: 1 to {most}")
        if not 0 < deadline < math.inf:
            raise FedblendError(f"deadline: {deadline} is not valid: a number of seconds above 0")
        self.grid, self.clients, self.min_sites, self.deadline = grid, clients, min_sites, deadline
        self.setup_fields, self.server_client, self.peers = setup_fields, server_client, peers
        self.nodes: dict[int, int] = {}  # Node of each connected client
        self.hello_fields: dict[int, dict[str, Any]] = {}  # Fields of each client's reply to the first query
        self.excluded: dict[int, str] = {}
        """Clients that have broken a protocol in this run, with the reason; they receive nothing more."""
        self._late: Counter[int] = Counter()  # Exchanges in a row without a reply, by client
        self._resting: dict[int, int] = {}  # Round from which a client that did not reply is sent messages again
        self._queried, self._failed_hellos = set[int](), Counter[int]()
        self._refusals: dict[int, tuple[int | None, str]] = {}
        """Clients of nodes that take no part, where they state it, and why."""
        self._looks, self._times_refused = 0, Counter[int]()
        self._again: dict[int, int] = {}
        """By node that was refused, the look at the nodes at which it is queried again: its site may be corrected."""
        self._duplicates: dict[int, int] = {}  # Nodes that claim a client that another node is, with that client

    def wait_until_connected(self, sites: int | None = None) -> None:
        """Wait until ``sites`` sites are connected (default: ``min_sites``), or until the deadline.

        Ends at once where a node of each missing client takes no part: these nodes are not queried again. Logs which
        clients are missing. Raises :class:`FedblendError` if fewer than ``min_sites`` are connected then.
        """
        wanted, end = sites or self.min_sites, time.monotonic() + self.deadline
        logged: set[int] | None = None
        self._update_nodes()
        while self._connected() < wanted and self._awaited() and time.monotonic() < end:
            if (missing := self.expected - self.nodes.keys()) != logged:
                text = "fedblend: %s of %s sites are connected; the run waits %g seconds (deadline) at most; missing: "
                log.info(text + listed(sorted(missing)), self._connected(), len(self.expected), self.deadline)
                logged = missing
            time.sleep(min(CONNECT_POLL_S, self.deadline / 4))
            self._update_nodes()
        if self._connected() < self.min_sites:
            absent = listed(sorted(self.expected - self.nodes.keys()))
            why = f" Reasons: {reasons}." if (reasons := self._reasons()) else ""
            when, remedy = "and all others take no part", "Correct this at these sites, restart their SuperNodes"
            if self._awaited():
                when = f"after {self.deadline:g} seconds (deadline)"
                remedy = "Start their SuperNodes, or give a longer --deadline"
            raise FedblendError(
                f"min_sites: {self.min_sites}, but only {self._connected()} of {len(self.expected)} sites are "
                f"connected {when}; missing: {absent}.{why} {remedy}, and continue with the same command"
            )

    def expect(self, clients: Iterable[int]) -> None:
        """Expect the sites of these clients only; no more than these are waited for."""
        self.expected = set(clients)
        self.min_sites = min(self.min_sites, len(self.expected))

    def exchange(self, kind: str, round: int, requests: Mapping[int, ClientRequest]) -> dict[int, Reply]:
        """Send each client its request and wait for the replies until the deadline.

        Returns one reply a client, in the order of ``requests``. Raises :class:`FedblendError` if too few sites are
        connected to begin.
        """
        self.wait_until_connected()
        to_nodes, absent = {}, {}
        for client, request in requests.items():
            if client in self.excluded:
                absent[client] = Reply(fault=self.excluded[client])
            elif round < (resumes := self._resting.get(client, 0)):
                why = f"no answer {self._late[client]} times in a row; it takes part again from round {resumes + 1}"
                absent[client] = Reply(fault=why)
            elif client in self.nodes:
                fields = {**self.setup_fields, "round": round, "client": client, **request.fields}
                to_nodes[self.nodes[client]] = ClientRequest(fields, request.records)
            else:
                absent[client] = Reply(fault="its site is not connected")
        replies = self._send(kind, round, to_nodes, self.deadline)
        for client in requests.keys() - absent.keys():
            self._late[client] = self._late[client] + 1 if replies[self.nodes[client]].is_late else 0
            if (more := self._late[client] - PATIENCE) >= 0:
                self._resting[client] = round + 1 + 2**more
                text = "fedblend: client %s has not answered %s times in a row, and takes no part until round %s"
                log.warning(text, client, self._late[client], self._resting[client] + 1)
        return {client: absent.get(client) or replies[self.nodes[client]] for client in requests}

    def exclude(self, client: int, why: str) -> None:
        """Send a client nothing more in this run, and warn."""
        if client not in self.excluded:
            log.warning("fedblend: client %s is %s", client, why)
            self.excluded[client] = why

    def _awaited(self) -> set[int]:
        """Return the missing clients of which no connected node has stated that it takes no part."""
        refused = {client for node, (client, _) in self._refusals.items() if node in self._queried}
        return self.expected - self.nodes.keys() - refused

    def _reasons(self) -> str:
        absent = [(c, node, why) for node, (c, why) in self._refusals.items() if c not in self.nodes]
        absent.sort(key=lambda one: (one[0] is None, one[0] or 0, one[1]))
        stated = [(f"node {node}" if c is None else f"client {c}", why) for c, node, why in absent]
        return "; ".join(f"{listed(who)}: {why}" for why, who in list(by_reason(stated).items())[:3])

    def _connected(self) -> int:
        return len(self.nodes.keys() & self.expected)

    def _update_nodes(self) -> None:
        connected = set(self.grid.get_node_ids())
        gone = {client for client, node in self.nodes.items() if node not in connected}
        self.nodes = {client: node for client, node in self.nodes.items() if client not in gone}
        self._looks += 1
        due = {node for node, look in self._again.items() if look <= self._looks}
        self._again = {node: look for node, look in self._again.items() if node not in due}
        # A node that claimed another node's client is queried again once that other node is gone.
        self._queried = {node for node in self._queried & connected - due if self._duplicates.get(node) not in gone}
        new = sorted(connected - self._queried)
        if not new:
            return
        self._queried |= set(new)
        failed = max(0, min(self._failed_hellos[node] for node in new) + 1 - HELLO_ATTEMPTS)
        seconds = min(self.deadline, HELLO_S * max(0.5**failed, 1 / 60))
        log.info("fedblend: new nodes: %s; each has %g seconds to reply with its client", len(new), seconds)
        clients = [*self.expected, *([] if self.server_client is None else [self.server_client])]
        fields = {**self.setup_fields, "version": VERSION, "clients": clients}
        requests = dict.fromkeys(new, ClientRequest(fields))
        for node, reply in self._send(HELLO, 0, requests, seconds).items():
            self._add_node(node, reply)

    def _add_node(self, node: int, reply: Reply) -> None:
        client = reply.fields.get("client")
        if (fault := self._fault_of_site(node, reply) or reply.fault) is not None:
            self._note_refusal(node, reply.fields, fault)
        elif not states_its_samples(reply.fields, self.setup_fields["experiment"]):
            log.warning("fedblend: node %s takes no part: its numbers of samples are not valid", node)
        elif type(client) is not int or not 0 <= client < self.clients:
            log.warning("fedblend: node %s has partition-id %s; valid: 0 to %s", node, brief(client), self.clients - 1)
        elif client in self.nodes:
            # A restarted site of an open federation has a new node, and waits until the SuperLink misses the old one's
            # heartbeat. Who answers slowly keeps its place.
            text = "fedblend: node %s claims to be client %s, but node %s is, as long as it is connected"
            log.warning(text, node, client, self.nodes[client])
            self._duplicates[node] = client
        else:
            self._refusals.pop(node, None)
            self._again.pop(node, None)
            self.nodes[client], self.hello_fields[client] = node, reply.fields

    def _note_refusal(self, node: int, fields: dict[str, Any], fault: str) -> None:
        client = fields.get("client")
        now = client if type(client) is int and 0 <= client < self.clients else None, fault
        before, self._refusals[node] = self._refusals.get(node), now
        if not fields:
            self._failed_hellos[node] += 1
            if (attempt := self._failed_hellos[node]) < HELLO_ATTEMPTS:
                # The node's machine may be busy: the next look at the nodes queries it again.
                self._queried.discard(node)
                text = "fedblend: node %s will be queried again: %s (attempt %s of %s)"
                log.warning(text, node, fault, attempt, HELLO_ATTEMPTS)
                return
        else:
            self._times_refused[node] += 1
            self._again[node] = self._looks + 2 ** self._times_refused[node]
            if now == before:
                return
        known = "" if now[0] is None else f" (client {now[0]})"
        log.warning("fedblend: node %s%s takes no part: %s", node, known, fault)

    def _fault_of_site(self, node: int, reply: Reply) -> str | None:
        """Return why a node that replied is of another version, or not of the site whose number it states."""
        fields = reply.fields
        if not fields:
            return None
        if (version := fields.get("version")) != VERSION:
            has = brief(version) if version else "a version that does not state itself (0.2 or older)"
            return f"its site has {has}, and the server {VERSION}; valid: the same at all"
        # Read anew, because a site may have another key since the run began.
        client, peers = fields.get("client"), self.peers()
        if not peers or type(client) is not int:
            return None
        text, signed = hello_text(self.setup_fields["run"], node, client), b""
        with contextlib.suppress(ValueError):
            signed = bytes.fromhex(str(fields.get("signed")))
        if is_signed(peers.get(client, ""), text, signed):
            return None
        wrong = f"its key is not that of client {client} in {PEERS}; valid: the number and the key of this site"
        # What keeps a site from reading its key is its fault, which any other node may claim.
        return wrong if signed or not reply.fault else f"it says, unsigned: {reply.fault}"

    def _send(self, kind: str, round: int, requests: Mapping[int, ClientRequest], seconds: float) -> dict[int, Reply]:
        """Send each node its request; a reply that does not arrive in ``seconds`` is a reply with a fault."""
        if not requests:
            return {}
        messages = [
            Message(pack(request.fields, *request.records), node, kind, ttl=seconds, group_id=str(round))
            for node, request in requests.items()
        ]
        # Flower returns None for a message that could not be sent, and no ids where all together are too large for it.
        ids = list(self.grid.push_messages(messages))
        ids += [None] * (len(messages) - len(ids))  # type: ignore[list-item]
        waiting = {id: node for id, node in zip(ids, requests, strict=True) if id}
        replies = {node: Reply(fault="the message could not be sent") for node in requests}
        # A first query may have less time than the deadline.
        late = f"no answer within {seconds:g} seconds{' (deadline)' if seconds >= self.deadline else ''}"
        replies |= {node: Reply(fault=late, is_late=True) for node in waiting.values()}
        for id, message in pull_replies(self.grid.pull_messages, waiting, seconds):
            node = waiting.pop(id)
            if isinstance(message, Exception):
                replies[node] = Reply(fault=f"it sent what cannot be read: {type(message).__name__}")
            elif not (message.has_error() and message.error.code in EXPIRED):
                replies[node] = read_reply(message)
        return replies


def is_sample_count(samples: Any) -> TypeGuard[int]:
    """Whether a stated number of samples is valid."""
    return type(samples) is int and 0 <= samples <= MAX_SAMPLES


def states_its_samples(fields: Mapping[str, Any], experiment: Mapping[str, Any]) -> bool:
    """Whether a site states valid numbers of samples: none, without data of its own, or all three.

    Of all its samples a site holds out, and keeps for validation, exactly the experiment's shares.
    """
    numbers = [fields.get(name) for name in ("samples", "holds_out", "validates")]
    if numbers == [None] * 3:
        return True
    counts = [number for number in numbers if is_sample_count(number)]
    shares = experiment["holdout"], experiment["validation"]["clients"]
    return len(counts) == 3 and tuple(counts) == divided(sum(counts), *shares)


def pull_replies(
    pull: Callable[[list[str]], Iterable[Message]], waiting: Mapping[str, int], seconds: float
) -> Iterator[tuple[str, Message | Exception]]:
    """Yield ids of the messages in ``waiting`` with their replies as they arrive, for at most ``seconds``.

    The caller removes each yielded id from ``waiting``. Replies are pulled one by one: Flower parses what a site sent,
    and an error amid several would lose those of honest sites. Errors of the connection to the SuperLink, and of the
    SuperLink itself, are raised.
    """
    end, pause = time.monotonic() + seconds, POLL_S[0]
    while waiting:
        for id in list(waiting):
            try:
                replies: list[Message | Exception] = list(pull([id]))
            except (OSError, httpx.HTTPError):
                raise
            except Exception as error:  # the sender chooses which
                replies = [error]
            for reply in replies[:1]:
                pause = POLL_S[0]
                yield id, reply
        if time.monotonic() > end:
            return
        if waiting:
            time.sleep(pause)
            pause = min(1.5 * pause, POLL_S[1])


def read_reply(message: Message) -> Reply:
    """Return a message as a reply; a site's refusal, a failed app and an unreadable message give a fault."""
    if message.has_error():
        return Reply(fault=FAILURES.get(message.error.code) or error_text(message))
    try:
        length = sum(len(str(value)) for record in message.content.config_records.values() for value in record.values())
        if length > MOST_WORDS:
            raise FedblendError(f"{length:,} characters beside its tensors; valid: {MOST_WORDS:,} at most")
        fields, tensors = unpack(message.content)
    except FedblendError as error:
        return Reply(fault=legible(f"it sent {error}"))
    fault = fields.get("fault")
    return Reply(fields, tensors, None if fault is None else legible(fault))


def error_text(message: Message) -> str:
    """Return why an app failed, in one line."""
    reason = (message.error.reason or "").strip().splitlines()
    return f"its app failed (code {message.error.code}): {legible(reason[-1]) if reason else 'no reason given'}"


def summarize_faults(faults: Mapping[int, str]) -> str:
    """Return the faults of clients in one line, clients with the same fault together."""
    reasons = by_reason(faults.items())
    return "; ".join(f"client{'s' if len(who) > 1 else ''} {listed(who)}: {why}" for why, who in reasons.items())
