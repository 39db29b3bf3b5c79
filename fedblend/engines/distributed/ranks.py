"""The processes (ranks) of one run, and their messages: JSON fields and tensors."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from fedblend.core.trees import for_file

Message = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""Fields that JSON can represent, and tensors by name."""

TIMEOUT = datetime.timedelta(days=7)
"""Practically no timeout: a dead rank is detected by its closed connection, a dead machine by the system's probes."""

PROBES = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
"""Seconds until a silent connection is probed, seconds between probes, and unanswered probes that close it."""

_joined: list[Ranks] = []
"""The ranks that ``torchrun`` started; empty before they connect."""


def disconnect() -> None:
    """Close this process's connections with other ranks, if there are any.

    Otherwise their threads run on when the process ends, and C++ may abort it.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_here() -> int:
    """Return the rank that ``torchrun`` gave this process; 0 in a process of its own."""
    return int(os.environ.get("RANK", "0")) if started_by_torchrun() else 0


def started_by_torchrun() -> bool:
    """Whether ``torchrun`` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


class Ranks:
    """The processes of one run: rank 0 sends commands, and the other ranks execute them.

    ``address`` is the URL at which all ``size`` ranks connect.
    """

    def __init__(self, rank: int, size: int, address: str) -> None:
        self.rank, self.size = rank, size
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            # Each rank of a machine uses another GPU as "cuda"; with fewer GPUs than ranks, ranks share them.
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        before = open_files()
        dist.init_process_group(backend, init_method=address, rank=rank, world_size=size, timeout=TIMEOUT)
        for number in open_files() - before:
            keep_alive(number)

    @staticmethod
    def from_environment() -> Ranks:
        """Return the ranks that ``torchrun`` started; they connect once, for all runs of a study."""
        if not _joined:
            _joined.append(Ranks(rank_here(), int(os.environ["WORLD_SIZE"]), "env://"))
            atexit.register(disconnect)
        return _joined[0]

    def leave(self) -> None:
        """Close the connections, so that this process can connect to new ranks in its next run.

        Ranks of ``torchrun`` stay connected.
        """
        if self not in _joined:
            disconnect()

    def broadcast(self, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send a message from rank 0 to all other ranks."""
        encoded = _encode(fields, tensors or {})
        dist.broadcast(torch.tensor([len(encoded)]), 0)
        dist.broadcast(encoded, 0)

    def receive(self) -> Message:
        """Return the next message that rank 0 broadcasts."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(encoded, 0)
        return _decode(encoded)

    def send(self, fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Send a message from this rank to rank 0."""
        encoded = _encode(fields, tensors or {})
        dist.send(torch.tensor([len(encoded)]), 0)
        dist.send(encoded, 0)

    def recv_from(self, rank: int) -> Message:
        """Return the next message from a rank, at rank 0."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(encoded, rank)
        return _decode(encoded)

    def sum_to_rank_0(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place; only rank 0 holds the sum."""
        dist.reduce(tensor, 0)


def open_files() -> set[int]:
    """Return the numbers of this process's open files; empty where the system does not list them."""
    try:
        return {int(name) for name in os.listdir("/proc/self/fd")}
    except OSError:
        return set()


def keep_alive(number: int) -> None:
    """Have the system probe an open connection, and close it if the other machine does not answer."""
    try:
        connection = socket.socket(fileno=os.dup(number))
    except OSError:
        # Another kind of file.
        return
    with connection, contextlib.suppress(OSError, AttributeError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in PROBES.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def is_about_connection(error: RuntimeError) -> bool:
    """Whether a PyTorch error means that another rank ended; PyTorch has no error class for this."""
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "peer", "store", "socket"))


def _encode(fields: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Encode a message as one safetensors file in memory, uint8 [bytes]; no pickle."""
    encoded = for_file(tensors)
    # safetensors rejects a file without tensors.
    encoded[""] = torch.zeros(1)
    return torch.frombuffer(bytearray(save(encoded, {"fields": json.dumps(fields)})), dtype=torch.uint8)


def _decode(encoded: torch.Tensor) -> Message:
    content = encoded.numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    fields = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["fields"])
    return fields, {name: tensor for name, tensor in load(content).items() if name}
