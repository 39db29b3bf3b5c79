"""A few classes at each client: the partition of FedMix's CIFAR experiments."""

from __future__ import annotations

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Count, part
from fedblend.data.partitions.deal import (
    deal,
    even_sizes,
    require_classes,
    require_clients,
    require_supply,
    stable_order,
)


@part("partition", "classes")
class Classes:
    """Every client has samples of ``classes_per_client`` random classes only (FedMix, appendix B).

    The draw is balanced: the classes' numbers of clients differ by at most 1. So every class has a client if clients *
    classes_per_client is at least the number of classes. With ``random``, each client draws its classes without regard
    to the others, and a class without any client is not used. With ``samples``, every client has that many samples,
    evenly divided among its classes. Otherwise, each class's samples are evenly divided among its clients.
    """

    clients: Count = 60
    """Number of clients."""
    classes_per_client: Count = 2
    """Classes of each client."""
    samples: Count | None = None
    """Samples of each client, evenly of its classes; by default each class is divided among its clients."""
    random: bool = False
    """Draw each client's classes independently of the others; if false, all classes have equally many clients."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples to clients. Raises :class:`FedblendError` if a class has too few samples or classes."""
        require_classes(classes, "classes")
        require_clients(self.clients, len(labels))
        supply = np.bincount(labels, minlength=classes)
        present = np.flatnonzero(supply)
        each = self.classes_per_client
        if each > len(present):
            found = f"{each} is more than the {len(present)} classes of the training half"
            raise FedblendError(f"partition.classes_per_client: {found}; valid: 1 to {len(present)}")
        if self.samples is not None and self.samples < each:
            found = f"{self.samples} samples cannot be of {each} classes"
            raise FedblendError(f"partition.samples: {found}; valid: {each} or more")
        rng = stream(seed, "partition")
        if self.random:
            every = np.broadcast_to(np.arange(len(present)), (self.clients, len(present)))
            drawn = rng.permuted(every, axis=1)[:, :each]
        else:
            drawn = draw_classes(self.clients, each, len(present), rng)
        label = present[drawn].ravel()
        client = np.repeat(np.arange(self.clients), each)
        if self.samples is None:
            count = _even_shares(label, labels)
        else:
            count = np.tile(even_sizes(self.samples, each), self.clients)
            clients = np.bincount(label, minlength=len(supply))
            most = int((supply[clients > 0] // clients[clients > 0]).min()) * each
            # In float64, as the sum may be beyond int64.
            wanted = np.bincount(label, weights=count, minlength=len(supply))
            valid = f"valid: up to {most:,} samples a client" if most else "valid: fewer clients"
            require_supply(labels, wanted, f"partition.samples: {self.samples:,} a client", valid)
        population = deal(labels, client, label, count, self.clients, rng)
        if len(unused := np.setdiff1d(present, label)):
            population.notes["classes_unheld"] = unused.tolist()
        return population


def draw_classes(clients: int, each: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """``each`` distinct classes for every client, int64 [clients, each]; the classes' counts differ by at most 1.

    Clients are divided into blocks of as many clients as classes. In a block, client i has the classes pi(i + s_j) for
    a random permutation pi and random distinct shifts s_j (modulo the classes), so each class occurs exactly ``each``
    times. The last, smaller block takes the classes in turn from one random cycle, so counts differ by at most 1. No
    draw is rejected.
    """
    blocks, rest = divmod(clients, classes)
    pi = rng.permuted(np.broadcast_to(np.arange(classes), (blocks, classes)), axis=1)
    shifts = rng.permuted(np.broadcast_to(np.arange(classes), (blocks, classes)), axis=1)[:, :each]
    position = (np.arange(classes)[None, :, None] + shifts[:, None, :]) % classes
    full = np.take_along_axis(pi[:, :, None], position, axis=1).reshape(blocks * classes, each)
    turn = np.arange(rest * each).reshape(rest, each) % classes
    return np.concatenate([full, rng.permutation(classes)[turn]])


def _even_shares(label: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The samples of each (client, class) pair if every class is divided evenly among its clients."""
    supply, clients = (np.bincount(of, minlength=int(labels.max()) + 1) for of in (labels, label))
    require_supply(labels, clients, "partition.clients", "take fewer clients or fewer classes a client")
    order = stable_order(label)
    grouped = label[order]
    rank = np.empty(len(label), np.int64)
    rank[order] = np.arange(len(label)) - np.searchsorted(grouped, grouped)
    return supply[label] // clients[label] + (rank < supply[label] % clients[label])
