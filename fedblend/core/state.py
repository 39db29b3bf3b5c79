"""What a run carries from round to round: plain trees of tensors and two numbers, so that a checkpoint is one file."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from fedblend.core.sharing import Pool, gather
from fedblend.core.trees import Tensors, add_prefix, strip_prefix


@dataclass(frozen=True)
class RunState:
    """The state of a run after ``round`` rounds.

    Parts extend the two trees ``server_state`` and ``client_states``. A part's own table stands under its slot, its
    place in the method: ``server_step``, ``objective``, ``terms.0``. No other code reads what is in it.
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
    client_states: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """What clients keep, by client.

    ``SLOT/name`` is a part's. ``weights/...`` and ``outputs/...`` are the model and the mean outputs of a client that
    goes on from its own (federated distillation, a lost downlink); ``personal/...`` is its personal model, ``own/...``
    are its own layers of the global model.
    """
    ended_by: str = ""
    """The callbacks that ended the run after this round, with commas; empty where it goes on."""

    def server_part(self, slot: str) -> dict[str, torch.Tensor]:
        """What the part at ``slot`` keeps at the server."""
        return strip_prefix(f"{slot}/", self.server_state)


def replaced(state: Tensors, slot: str, table: Tensors) -> dict[str, torch.Tensor]:
    """A server state with the table of one slot replaced."""
    others = {name: tensor for name, tensor in state.items() if not name.startswith(f"{slot}/")}
    return others | add_prefix(f"{slot}/", table)
