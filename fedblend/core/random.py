"""Random numbers that are addressed, not drawn in turn.

Every random choice comes from a stream keyed by (seed, purpose, round, client). So a result depends
neither on the engine, the number of ranks, the order of clients, nor on whether a run was resumed.

Real sites are the exception: what protects their samples comes from the operating system (`fedblend.flower.secrets`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(seed: int, purpose: str, round: int = 0, client: int = 0, bits: int = 128) -> int:
    """The address of a stream as a whole number of ``bits`` bits (BLAKE2b of the four coordinates).

    >>> key(0, "cohort", 1) == key(0, "cohort", 1), key(0, "cohort", 1) == key(0, "cohort", 2)
    (True, False)
    """
    text = f"{seed}/{purpose}/{round}/{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=bits // 8).digest(), "little")


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A fresh counter-based generator at the address (seed, purpose, round, client)."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, round, client)))


@contextmanager
def lent_generator(seed: int, purpose: str, round: int = 0, client: int = 0) -> Iterator[None]:
    """Lend keyed randomness to code we do not own, and put the global state back afterwards.

    ``nn.Module`` constructors and dropout draw from PyTorch's global generator and take no other.
    Inside this context that generator stands at the given address; outside it nothing has changed.
    """
    # PyTorch's CPU generator keeps 32 bits of a seed, CUDA's 64: more would be cut off silently.
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        address = key(seed, purpose, round, client, bits=32)
        torch.default_generator.manual_seed(address)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(address)
        yield
