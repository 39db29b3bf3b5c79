"""The IID partition: every client's samples have the same distribution."""

from __future__ import annotations

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.random import stream
from fedblend.core.registry import Count, part
from fedblend.data.partitions.deal import even_sizes, require_clients, split_by_sizes


@part("partition", "iid")
class Iid:
    """Shuffled samples in equal parts: client sizes differ by at most 1, or are ``samples`` each."""

    clients: Count = 10
    """Number of clients."""
    samples: Count | None = None
    """Samples of each client; by default all samples are used."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal ``len(labels)`` samples to clients. Raises :class:`FedblendError` if there are too few."""
        n = len(labels)
        require_clients(self.clients, n, self.samples or 1)
        sizes = np.full(self.clients, self.samples) if self.samples else even_sizes(n, self.clients)
        return split_by_sizes(stream(seed, "partition").permutation(n), sizes)
