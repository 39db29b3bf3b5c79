"""What became of single samples in a run: raw, hidden, and as the server trains on them (XorMixFL, Figure 2)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.methods.sharing.xor_seeds import MixedTargetSeeds, XorSeeds


@dataclass(frozen=True)
class SeedTrace:
    """One seed: the device's (first) target and dummy sample, what it sent, and the server's side, uint8 [C, H, W].

    ``own`` is the (first) sample that the server decoded it with, ``made`` what it trains on; both ``None`` in MixFL,
    where that is what was sent, and for a seed that the server does not use. ``labels`` are the target's and the
    (first) dummy's.
    """

    client: int
    labels: tuple[int, int]
    target: torch.Tensor
    dummy: torch.Tensor
    sent: torch.Tensor
    own: torch.Tensor | None
    made: torch.Tensor | None


def stories(setup: Setup, state: RunState, rows: np.ndarray) -> list[SeedTrace]:
    """The stories of some of the entries that a run has kept, by the streams that it drew from.

    Empty where these entries do not follow from the world: of other data, of clients who chose on their own machines,
    or renewed in a later round.
    """
    sharing, sent = setup.experiment.method.sharing, state.entries
    if not isinstance(sharing, XorSeeds | MixedTargetSeeds) or not len(sent):
        return []
    sizes = setup.sizes(0)
    base = setup.base(sizes)
    assert base is not None
    wanted, found = setup.requests(sizes), {}
    for client in np.unique(sent.owner[rows]).tolist():
        x, y = setup.samples(client, int(sizes[client]))
        rng = stream(setup.experiment.seed, "share", 0, client)
        drawn = sharing.drawn(y.numpy(), wanted.get(client), rng)
        its = torch.from_numpy(np.flatnonzero(sent.owner == client))
        if drawn is None or not torch.equal(sharing.made(x, drawn, rng), sent.tensors["seeds"][its]):
            return []
        found[client] = x, drawn
    decoded = _decoded(sharing, state, base, setup.experiment.seed)
    told = []
    for row in rows.tolist():
        client = int(sent.owner[row])
        x, drawn = found[client]
        place = row - int(np.flatnonzero(sent.owner == client)[0])
        own, made = decoded.get(row, (None, None))
        labels = int(drawn.labels[place]), int(drawn.hidden[place, 0])
        target, dummy = x[drawn.targets[place, 0]], x[drawn.dummies[0][place, 0]]
        told.append(SeedTrace(client, labels, target, dummy, sent.tensors["seeds"][row], own, made))
    return told


def _decoded(
    sharing: XorSeeds | MixedTargetSeeds, state: RunState, base: tuple[torch.Tensor, torch.Tensor], seed: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By entry: the server's own sample, and what it decoded with it (the first time)."""
    if not isinstance(sharing, XorSeeds):
        return {}
    rows, made, own = sharing.levelled(state.entries, base, stream(seed, "pool", max(0, state.shared_round)))
    places = dict(zip(rows[::-1].tolist(), range(len(rows) - 1, -1, -1), strict=True))
    return {row: (base[0][own[place, 0]], made[place]) for row, place in places.items()}
