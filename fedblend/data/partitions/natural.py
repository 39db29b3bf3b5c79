"""The data's own clients: writers, speaking roles, hospitals."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Count, part


@part("partition", "natural")
class Natural:
    """One client for each client the data comes with (FedMix: FEMNIST's writers, Shakespeare's roles).

    Only those with at least ``min_samples`` training samples count. Of these ``clients`` are taken,
    by a draw (``choose = "random"``) or the first in the data's order (``"first"``); all of them if
    ``clients`` is not given. ``Population.natural`` holds the data's own number of each client.
    """

    clients: Count | None = None
    """Number of clients to take; all, if not given."""
    min_samples: Count = 1
    """Training samples below which a client of the data is left out."""
    choose: Literal["random", "first"] = "random"
    """Whether clients are drawn, or are the first in the data's order."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Group the samples by ``natural``, int64 [n]. Raises :class:`FedblendError` if that is ``None``."""
        if natural is None:
            raise FedblendError("partition 'natural': the data has no clients of its own; choose another partition")
        ids, sizes = np.unique(natural, return_counts=True)
        ids = ids[sizes >= self.min_samples]
        wanted = len(ids) if self.clients is None else self.clients
        if wanted > len(ids) or not len(ids):
            largest = f"; the largest has {sizes.max():,}" if not len(ids) else ""
            raise FedblendError(
                f"partition.clients: {wanted:,} clients wanted, but {len(ids):,} hold min_samples = "
                f"{self.min_samples:,} training samples or more{largest}; valid: 1 to {len(ids):,}"
            )
        if self.choose == "random":
            ids = np.sort(stream(seed, "partition").permutation(ids)[:wanted])
        ids = ids[:wanted]
        place = np.searchsorted(ids, natural).clip(max=len(ids) - 1)
        rows = np.flatnonzero(ids[place] == natural)
        owner = place[rows]
        offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=wanted))])
        order = rows[np.argsort(owner, kind="stable")]
        return Population(order.astype(np.int64), offsets.astype(np.int64), natural=ids.astype(np.int64))
