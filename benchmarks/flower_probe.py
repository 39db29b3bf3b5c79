"""Notes where a message's time goes, in the processes that Flower starts for fedblend's apps.

flower.py puts a ``sitecustomize`` that imports this on the path of a federation; nothing is changed but that functions
are timed. Each ClientApp writes one line for its message, each ServerApp one for every exchange, to a file of its own
in the folder ``FEDBLEND_PROBE``. All times are seconds of the machine's own clock.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent / "tests"))

from flower_rogue import WhenImported

FOLDER = "FEDBLEND_PROBE"


class Spans:
    """Seconds by what they went to."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def of(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[what] += time.perf_counter() - start

    def watch(self, place: Any, name: str, what: str) -> None:
        """Time every call of a function where ``place`` looks it up."""
        inner = getattr(place, name)

        @functools.wraps(inner)
        def timed(*words: Any, **more: Any) -> Any:
            with self.of(what):
                return inner(*words, **more)

        setattr(place, name, timed)


def watch_work(spans: Spans) -> None:
    """Time a site's own work: training, making its world, and its messages' records."""
    from fedblend.flower import client, work

    spans.watch(work, "train", "training")
    spans.watch(client, "engine_of", "preparing")
    for name in ("unpack", "pack", "to_record"):
        spans.watch(client, name, "serialisation")


def born() -> float:
    """When this process began, as the clock of the machine has it."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def write(line: dict[str, Any]) -> None:
    """One line in this process's file."""
    with open(Path(os.environ[FOLDER]) / f"{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")


def at_site(run_clientapp: Any) -> None:
    """Note a ClientApp's one message."""
    spans, told = Spans(), {"role": "site", "born": born()}
    WhenImported("fedblend.flower.client", lambda _: watch_work(spans))
    pull, push = run_clientapp.pull_task_input, run_clientapp.push_message

    def pulled(*words: Any) -> Any:
        told["pull"] = time.time()
        made = pull(*words)
        told["pulled"] = time.time()
        message = made[0]
        fields = json.loads(str(message.content.config_records["fields"]["fields"]))
        told.update(kind=message.metadata.message_type, round=fields.get("round"), client=fields.get("client"))
        return made

    def pushed(*words: Any) -> None:
        told["push"] = time.time()
        push(*words)
        told["pushed"] = time.time()
        write(told | {"spans": spans.seconds})

    run_clientapp.pull_task_input, run_clientapp.push_message = pulled, pushed


def at_server(sites: Any) -> None:
    """Note a ServerApp's exchanges: when messages were made and sent, and when each answer was there."""
    exchange, send = sites.Sites.exchange, sites.Sites._send

    def exchanged(self: Any, kind: str, round: int, orders: Any) -> Any:
        self.told = {"role": "server", "kind": kind, "round": round, "answers": {}}
        replies = exchange(self, kind, round, orders)
        clients = {node: client for client, node in self.nodes.items()}
        self.told["answers"] = {clients.get(node, -1): times for node, times in self.told["answers"].items()}
        write(self.told)
        return replies

    def sent(self: Any, kind: str, round: int, orders: Any, seconds: float) -> Any:
        told = getattr(self, "told", {"answers": {}}) if kind != sites.HELLO else {"answers": {}}
        told["begin"] = time.time()
        grid, self.grid = self.grid, Wire(self.grid, told)
        try:
            return send(self, kind, round, orders, seconds)
        finally:
            self.grid = grid

    sites.Sites.exchange, sites.Sites._send = exchanged, sent


class Wire:
    """The grid, with notes of when it was used."""

    def __init__(self, wire: Any, told: dict[str, Any]) -> None:
        self.get_node_ids, self.wire, self.told = wire.get_node_ids, wire, told

    def push_messages(self, messages: Any) -> Any:
        self.told["push"] = time.time()
        ids = list(self.wire.push_messages(messages))
        self.told["pushed"] = time.time()
        return ids

    def pull_messages(self, ids: Any) -> Any:
        start = time.time()
        found = list(self.wire.pull_messages(ids))
        for answer in found:
            self.told["answers"][answer.metadata.src_node_id] = (start, time.time())
        return found


APPS: dict[str, tuple[str, Callable[[Any], None]]] = {
    "flwr-clientapp": ("flwr.supernode.runtime.run_clientapp", at_site),
    "flwr-serverapp": ("fedblend.flower.sites", at_server),
}

for word in sys.orig_argv[:3]:
    if Path(word).name in APPS and FOLDER in os.environ:
        WhenImported(*APPS[Path(word).name])
        break
