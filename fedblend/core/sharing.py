"""What a sharing is: what a client gives before training, and what is made of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from fedblend.core.objective import Scale, Task
from fedblend.core.protection import Mechanism
from fedblend.core.registry import Part

Payload = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Request:
    """What a server asks of one client in particular.

    One with data of its own (XorMixFL, section 3): ``wanted`` int64 [C] are samples by target label, ``dummies`` int64
    [M] the labels to hide them with. One that coordinates mixtures (Mix2FLD): ``pairs`` int64 [n, 2] are the labels to
    mix, -1 where it asks for none.
    """

    wanted: np.ndarray
    dummies: np.ndarray
    pairs: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int64))


@dataclass(frozen=True)
class ClientData:
    """What a client sees when it is asked to share: its samples as stored, and how to read them.

    ``hidden`` gives the global model's hidden states after k layers; ``minimum`` is the client's policy:
    it shares no mean of fewer samples. ``request`` is what the server asks of this client in particular, if anything.
    """

    x: torch.Tensor
    y: torch.Tensor
    task: Task
    scale: Scale
    hidden: Callable[[torch.Tensor, int], torch.Tensor]
    rng: np.random.Generator
    minimum: int = 1
    request: Request | None = None


@dataclass(frozen=True)
class Pool:
    """What every client may use: tensors with one row an entry, and each entry's client (-1: several)."""

    tensors: Payload
    owner: np.ndarray

    def __len__(self) -> int:
        return len(self.owner)


class Sharing(Part):
    """Base of all sharings; it shares nothing.

    ``bytes_kind`` is the word under which bytes are counted; ``leaves_client`` is false where nothing leaves a
    client; ``own_only`` is true where a client may use nothing of another; ``each_round`` where it happens again
    every round. ``for_server`` is true where what is shared is for the server step and does not go out to clients.
    ``server`` is the client that plays the server, where that has data of its own: it shares nothing with itself.
    ``coordinated`` is true where the server first asks clients for their labels, and then each for certain ones.
    ``secure_aggregated`` is true where the server of a real federation learns sums over groups of clients only.
    """

    bytes_kind: str = "shared"
    unsafe: bool = False
    leaves_client: bool = True
    own_only: bool = False
    each_round: bool = False
    for_server: bool = False
    server: int | None = None
    coordinated: bool = False
    secure_aggregated: bool = False
    active: bool = True
    refresh: float | None = None

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no client could share anything, before any is asked.

        ``sizes`` int64 [clients] are the samples each one holds, ``minimum`` is their policy as in :class:`ClientData`.
        """

    def share(self, local: ClientData) -> Payload | None:
        """At a client: what it sends, or ``None``."""
        return None

    def mechanism(self) -> Mechanism | str:
        """The noise on what is shared that earns an (epsilon, delta) for a sample, or why there is none to state."""
        return f"'{self.name}' shares without noise"

    def pool(self, entries: Pool, rng: np.random.Generator) -> Pool:
        """At the server: what is made of all entries that were sent, in order of client."""
        return entries

    def requests(self, base: np.ndarray, classes: int, clients: Sequence[int]) -> dict[int, Request]:
        """At a server with data of its own, labels ``base`` int64 [n]: what it asks of each of ``clients``."""
        return {}

    def requests_by_labels(self, held: np.ndarray, rng: np.random.Generator) -> dict[int, Request]:
        """At a server that coordinates: what it asks of clients that hold the labels ``held`` bool [clients, C]."""
        return {}

    def pool_beside(self, entries: Pool, base: tuple[torch.Tensor, torch.Tensor], rng: np.random.Generator) -> Pool:
        """At a server with samples of its own, ``base`` = (x, y) as stored: what is made of these and the entries."""
        return self.pool(entries, rng)

    def pool_of_sums(self, entries: Pool, asked: np.ndarray, rng: np.random.Generator) -> Pool:
        """At a server that learns sums only: what is made of the entries of the clients ``asked``, int64 in order."""
        return self.pool(entries, rng)

    def view(self, pool: Pool, client: int) -> Pool:
        """The part of the pool that a client may use: all of it, unless a sharing says otherwise."""
        return pool


def gather(payloads: Mapping[int, Payload]) -> Pool:
    """Stack payloads row by row, in order of client."""
    clients = sorted(payloads)
    if not clients:
        return Pool({}, np.empty(0, np.int64))
    names = list(payloads[clients[0]])
    rows = [len(payloads[k][names[0]]) for k in clients]
    return Pool({n: torch.cat([payloads[k][n] for k in clients]) for n in names}, np.repeat(clients, rows))


def rows_of(pool: Pool, chosen: np.ndarray) -> Pool:
    """The chosen entries of a pool; ``chosen`` is bool or int64."""
    index = torch.from_numpy(chosen)
    return Pool({name: tensor[index] for name, tensor in pool.tensors.items()}, pool.owner[chosen])


def joined(kept: Pool, new: Pool) -> Pool:
    """Entries kept and entries renewed, in order of client."""
    if not len(kept) or not len(new):
        return new if len(new) else kept
    both = Pool(
        {name: torch.cat([kept.tensors[name], new.tensors[name]]) for name in new.tensors},
        np.concatenate([kept.owner, new.owner]),
    )
    return rows_of(both, np.argsort(both.owner, kind="stable"))
