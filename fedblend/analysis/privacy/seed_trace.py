"""Seeds traced through a run: raw samples, the seed that was sent, the decoded sample (XorMixFL, Figure 2)."""

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
    """The images of one seed, uint8 [C, H, W]; where p samples are blended, the first of them."""

    client: int
    labels: tuple[int, int]
    """Labels of the target and of the (first) dummy."""
    target: torch.Tensor
    dummy: torch.Tensor
    sent: torch.Tensor
    server_dummy: torch.Tensor | None
    """The server's sample for decoding the seed; ``None`` in MixFL and for a seed that the server did not use."""
    decoded: torch.Tensor | None
    """The sample that the server trains on; ``None`` as above (in MixFL it trains on the seed)."""


def seed_traces(setup: Setup, state: RunState, rows: np.ndarray) -> list[SeedTrace]:
    """Trace some of the entries that a run has stored, by the random streams that the run drew from.

    Empty where the entries cannot be reproduced: they are of other data, of real sites, or were renewed in a later
    round.
    """
    sharing, entries = setup.experiment.method.sharing, state.entries
    if not isinstance(sharing, XorSeeds | MixedTargetSeeds) or not len(entries):
        return []
    sizes = setup.sizes(0)
    base = setup.base(sizes)
    assert base is not None
    requests, recipes = setup.requests(sizes), {}
    for client in np.unique(entries.owner[rows]).tolist():
        x, y = setup.samples(client, int(sizes[client]))
        rng = stream(setup.experiment.seed, "share", 0, client)
        recipe = sharing.draw_recipe(y.numpy(), requests.get(client), rng)
        own_rows = torch.from_numpy(np.flatnonzero(entries.owner == client))
        if recipe is None or not torch.equal(sharing.make_seeds(x, recipe, rng), entries.tensors["seeds"][own_rows]):
            return []
        recipes[client] = x, recipe
    decoded_by_row = _decode(sharing, state, base, setup.experiment.seed)
    traces = []
    for row in rows.tolist():
        client = int(entries.owner[row])
        x, recipe = recipes[client]
        number = row - int(np.flatnonzero(entries.owner == client)[0])
        server_dummy, decoded = decoded_by_row.get(row, (None, None))
        labels = int(recipe.labels[number]), int(recipe.dummy_labels[number, 0])
        target, dummy = x[recipe.targets[number, 0]], x[recipe.dummies[0][number, 0]]
        traces.append(SeedTrace(client, labels, target, dummy, entries.tensors["seeds"][row], server_dummy, decoded))
    return traces


def _decode(
    sharing: XorSeeds | MixedTargetSeeds, state: RunState, base: tuple[torch.Tensor, torch.Tensor], seed: int
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """By entry: the server's own sample, and the sample that it decoded with it (the first time)."""
    if not isinstance(sharing, XorSeeds):
        return {}
    rows, decoded, own = sharing.balance(state.entries, base, stream(seed, "pool", max(0, state.shared_round)))
    first = dict(zip(rows[::-1].tolist(), range(len(rows) - 1, -1, -1), strict=True))
    return {row: (base[0][own[place, 0]], decoded[place]) for row, place in first.items()}
