"""What a run and its clients carry from round to round: plain trees of tensors, so that a checkpoint is one file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from fedblend.core.sharing import Pool, gather
from fedblend.core.trees import Tensors, add_prefix, by_client, for_clients, in_order, strip_prefix

PREFIXES = {
    "model": "weights/",
    "personal": "personal/",
    "layers": "own/",
    "outputs": "outputs/",
    "optimizer": "optimizer/",
    "parts": "",
}
"""By field of :class:`ClientState`: the prefix of its tensors in files and messages. Parts' names begin with a slot."""


@dataclass(frozen=True)
class ClientState:
    """What a client keeps from round to round; a table is empty where the client keeps nothing of its kind."""

    model: Tensors = field(default_factory=dict)
    """The model of a client that goes on from its own, not from the global one (federated distillation, a lost
    downlink)."""
    personal: Tensors = field(default_factory=dict)
    """Its personal model (:class:`fedblend.core.objective.Personal`)."""
    layers: Tensors = field(default_factory=dict)
    """Its own layers of the global model."""
    outputs: Tensors = field(default_factory=dict)
    """The mean outputs by label that it last received, where it has a ``model``."""
    optimizer: Tensors = field(default_factory=dict)
    """What its optimiser keeps, by ``KEY/name``."""
    parts: Tensors = field(default_factory=dict)
    """What parts keep at it, by ``SLOT/name``."""

    def __bool__(self) -> bool:
        return any(map(len, vars(self).values()))

    def ordered(self, names: Iterable[str]) -> ClientState:
        """Return the state with its models in the order of ``names``; files and messages reorder."""
        tables = {key: in_order(getattr(self, key), names) for key in ("model", "personal", "layers")}
        return replace(self, **tables)

    def to_tensors(self) -> dict[str, torch.Tensor]:
        """Return one flat table, for files and messages."""
        tables = [add_prefix(prefix, getattr(self, key)) for key, prefix in PREFIXES.items()]
        return {path: tensor for table in tables for path, tensor in table.items()}

    @staticmethod
    def from_tensors(tensors: Tensors) -> ClientState:
        """Return the state of :meth:`to_tensors`."""
        tables: dict[str, dict[str, torch.Tensor]] = {key: {} for key in PREFIXES}
        for path, tensor in tensors.items():
            key, prefix = next((key, prefix) for key, prefix in PREFIXES.items() if path.startswith(prefix))
            tables[key][path.removeprefix(prefix)] = tensor
        return ClientState(**tables)


def to_tensors(states: Mapping[int, ClientState]) -> dict[str, torch.Tensor]:
    """Return clients' states as one flat table, for files and messages between ranks."""
    return for_clients("client/", {client: state.to_tensors() for client, state in states.items()})


def from_tensors(tensors: Tensors) -> dict[int, ClientState]:
    """Return the clients' states in a table that has those of :func:`to_tensors`."""
    return {client: ClientState.from_tensors(table) for client, table in by_client("client/", tensors).items()}


@dataclass(frozen=True)
class RunState:
    """The state of a run after ``round`` rounds.

    Parts extend ``server_state`` and :attr:`ClientState.parts`. A part's own table stands under its slot, its place in
    the method: ``server_step``, ``objective``, ``terms.0``. No other code reads what is in it.
    """

    round: int
    """Rounds made so far."""
    weights: dict[str, torch.Tensor]
    """The global model: weights and buffers by name."""
    has_pool: np.ndarray
    """Which clients have downloaded the pool since it was last renewed, bool [clients]."""
    shared_sizes: np.ndarray
    """Samples that each client held when it last shared, int64 [clients]; 0 before."""
    entries: Pool = field(default_factory=lambda: gather({}))
    """All entries that clients have shared."""
    shared_round: int = -1
    """The round in which entries were last renewed; -1 before."""
    global_outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """Mean outputs by label, where uploads are outputs."""
    server_state: dict[str, torch.Tensor] = field(default_factory=dict)
    """What parts keep at the server, by ``SLOT/name``."""
    client_states: dict[int, ClientState] = field(default_factory=dict)
    """What clients keep, by client."""
    ended_by: str = ""
    """The callbacks that ended the run after this round, with commas; empty where it goes on."""

    def server_part(self, slot: str) -> dict[str, torch.Tensor]:
        """What the part at ``slot`` keeps at the server."""
        return strip_prefix(f"{slot}/", self.server_state)


def replaced(state: Tensors, slot: str, table: Tensors) -> dict[str, torch.Tensor]:
    """A server state with the table of one slot replaced."""
    others = {name: tensor for name, tensor in state.items() if not name.startswith(f"{slot}/")}
    return others | add_prefix(f"{slot}/", table)
