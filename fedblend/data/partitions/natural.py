"""The data set's own clients: writers, speaking roles, hospitals."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Count, part
from fedblend.data.partitions.deal import split_by_sizes


@part("partition", "natural")
class Natural:
    """One client for each client of the data set (FedMix: FEMNIST's writers, Shakespeare's roles).

    Clients with fewer than ``min_samples`` training samples are left out. ``clients`` of the others are drawn
    (``choose = "random"``), or are the first in the data set's order (``"first"``); the default is all.
    ``Population.natural`` has the data set's number of each client.
    """

    clients: Count | None = None
    """Number of clients; the default is all."""
    min_samples: Count = 1
    """Training samples that a client needs at least."""
    choose: Literal["random", "first"] = "random"
    """Drawn clients, or the first in the data set's order."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Group the samples by ``natural``, int64 [n]. Raises :class:`FedblendError` if that is ``None``."""
        if natural is None:
            remedy = "(a table: data.client; a folder: data.clients; an .npz file: the array 'client')"
            raise FedblendError(
                f"partition 'natural': the data set has no clients; name them {remedy}, or choose another partition"
            )
        ids, sizes = np.unique(natural, return_counts=True)
        ids = ids[sizes >= self.min_samples]
        wanted = len(ids) if self.clients is None else self.clients
        if wanted > len(ids) or not len(ids):
            largest = f"; the largest has {sizes.max():,}" if not len(ids) else ""
            found = f"{len(ids):,} have min_samples = {self.min_samples:,} training samples or more{largest}"
            raise FedblendError(
                f"partition.clients: {wanted:,} clients are needed, but {found}; valid: 1 to {len(ids):,}"
            )
        if self.choose == "random":
            ids = np.sort(stream(seed, "partition").permutation(ids)[:wanted])
        ids = ids[:wanted]
        position = np.searchsorted(ids, natural).clip(max=len(ids) - 1)
        rows = np.flatnonzero(ids[position] == natural)
        owner = position[rows]
        population = split_by_sizes(rows[np.argsort(owner, kind="stable")], np.bincount(owner, minlength=wanted))
        return replace(population, natural=ids.astype(np.int64))
