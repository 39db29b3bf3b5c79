"""Processes that work on one run, and what they say to each other: tables of plain words, and tensors."""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

Message = tuple[dict[str, Any], dict[str, torch.Tensor]]

PATIENCE = datetime.timedelta(days=7)
"""How long a rank waits for the next word: a dead rank is told of by its closed connection, not by a clock."""


_met: list[Ranks] = []


def part() -> None:
    """End this process's connections with other ranks, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank_here() -> int:
    """The rank that ``torchrun`` gave this process; 0 where it was not started by it."""
    return int(os.environ.get("RANK", "0")) if started_by_torchrun() else 0


def started_by_torchrun() -> bool:
    """Whether this process is one of several that ``torchrun`` started."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


class Ranks:
    """The processes of one run; rank 0 gives the orders, the others follow them."""

    def __init__(self, rank: int, size: int, where: str) -> None:
        self.rank, self.size = rank, size
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            # What "cuda" means here: each rank of a machine takes a GPU of its own, as far as there are some.
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        dist.init_process_group(backend, init_method=where, rank=rank, world_size=size, timeout=PATIENCE)

    @staticmethod
    def of_environment() -> Ranks:
        """The processes that ``torchrun`` started, which meet once and stay together for all runs of a study."""
        if not _met:
            _met.append(Ranks(rank_here(), int(os.environ["WORLD_SIZE"]), "env://"))
        return _met[0]

    def leave(self) -> None:
        """Part from the others, so that this process can meet others for its next run."""
        if self not in _met:
            part()

    def broadcast(self, words: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """From rank 0 to all others."""
        encoded = _encode(words, tensors or {})
        dist.broadcast(torch.tensor([len(encoded)]), 0)
        dist.broadcast(encoded, 0)

    def receive(self) -> Message:
        """What rank 0 tells."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(length, 0)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(encoded, 0)
        return _decode(encoded)

    def send(self, words: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """From another rank to rank 0."""
        encoded = _encode(words, tensors or {})
        dist.send(torch.tensor([len(encoded)]), 0)
        dist.send(encoded, 0)

    def recv_from(self, rank: int) -> Message:
        """What a rank reports."""
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, rank)
        encoded = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(encoded, rank)
        return _decode(encoded)

    def add_up(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over all ranks, in place; only rank 0's is then the sum."""
        dist.reduce(tensor, 0)


def is_about_connection(error: RuntimeError) -> bool:
    """Whether PyTorch complains that another rank is gone; it has no error class of its own for that."""
    text = str(error).lower()
    return any(word in text for word in ("connection", "gloo", "nccl", "peer", "store", "socket"))


def _encode(words: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """As one safetensors file in memory: no pickle, also between our own processes."""
    named, seen = {}, set()
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().cpu()
        # What is told to several clients is one tensor under several names, which the format does not have.
        named[name] = flat.clone() if flat.data_ptr() in seen else flat
        seen.add(flat.data_ptr())
    # An empty file is no file.
    named[""] = torch.zeros(1)
    return torch.frombuffer(bytearray(save(named, {"words": json.dumps(words)})), dtype=torch.uint8)


def _decode(encoded: torch.Tensor) -> Message:
    content = encoded.numpy().tobytes()
    length = int.from_bytes(content[:8], "little")
    words = json.loads(json.loads(content[8 : 8 + length])["__metadata__"]["words"])
    return words, {name: tensor for name, tensor in load(content).items() if name}
