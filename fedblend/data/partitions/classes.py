"""A few classes a client: the split of FedMix's CIFAR experiments."""

from __future__ import annotations

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Count, part
from fedblend.data.partitions.deal import deal, even, require_classes, stable_order


@part("partition", "classes")
class Classes:
    """Every client holds ``classes_per_client`` random classes and no others (FedMix, appendix B).

    The draw is level: every class has equally many holders, give or take one, so that all classes are
    held as soon as clients * classes_per_client reaches their number. With ``samples``, every client
    holds that many, divided evenly among its classes. Without, each class's samples are dealt out
    evenly among its holders.
    """

    clients: Count = 60
    """Number of clients."""
    classes_per_client: Count = 2
    """Classes that each client holds."""
    samples: Count | None = None
    """Samples that each client holds, evenly of its classes; without it a class is dealt out among its holders."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples out. Raises :class:`FedblendError` if a class runs out or too few exist."""
        require_classes(classes, "classes")
        supply = np.bincount(labels, minlength=classes)
        present = np.flatnonzero(supply)
        each = self.classes_per_client
        if each > len(present):
            raise FedblendError(
                f"partition.classes_per_client: {each} is more than the {len(present)} classes of the "
                f"training half; valid: 1 to {len(present)}"
            )
        if self.samples is not None and self.samples < each:
            raise FedblendError(
                f"partition.samples: {self.samples} cannot come from {each} classes; valid: {each} or more"
            )
        rng = stream(seed, "partition")
        label = present[holdings(self.clients, each, len(present), rng)].ravel()
        client = np.repeat(np.arange(self.clients), each)
        if self.samples is None:
            count = _shares(label, supply)
        else:
            count = np.tile(even(self.samples, each), self.clients)
            self._require(label, count, supply)
        population = deal(labels, client, label, count, self.clients, rng)
        unheld = np.setdiff1d(present, label)
        if len(unheld):
            population.notes["classes_unheld"] = unheld.tolist()
        return population

    def _require(self, label: np.ndarray, count: np.ndarray, supply: np.ndarray) -> None:
        """Raise :class:`FedblendError` if a class is asked for more than it has."""
        wanted = np.bincount(label, weights=count, minlength=len(supply)).astype(np.int64)
        if (wanted > supply).any():
            c = int(np.argmax(wanted - supply))
            holders = np.bincount(label, minlength=len(supply))
            most = int((supply[holders > 0] // holders[holders > 0]).min()) * self.classes_per_client
            valid = f"up to {most:,} samples a client" if most else "fewer clients"
            raise FedblendError(
                f"partition.samples: {self.samples:,} samples a client ask for {wanted[c]:,} of class {c} "
                f"({holders[c]:,} holders), which has {supply[c]:,}; valid: {valid}"
            )


def holdings(clients: int, each: int, classes: int, rng: np.random.Generator) -> np.ndarray:
    """``each`` distinct classes a client, int64 [clients, each]; every class equally often, within 1.

    Clients come in blocks of as many as there are classes. In a block, client i holds the classes
    pi(i + s_j) for a random permutation pi and random distinct shifts s_j (modulo the classes): every
    class exactly ``each`` times. The last, smaller block takes the classes in turn from one random
    cycle, which levels it to within 1. So no draw is ever rejected.
    """
    blocks, rest = divmod(clients, classes)
    pi = rng.permuted(np.broadcast_to(np.arange(classes), (blocks, classes)), axis=1)
    shifts = rng.permuted(np.broadcast_to(np.arange(classes), (blocks, classes)), axis=1)[:, :each]
    place = (np.arange(classes)[None, :, None] + shifts[:, None, :]) % classes
    full = np.take_along_axis(pi[:, :, None], place, axis=1).reshape(blocks * classes, each)
    turn = np.arange(rest * each).reshape(rest, each) % classes
    return np.concatenate([full, rng.permutation(classes)[turn]])


def _shares(label: np.ndarray, supply: np.ndarray) -> np.ndarray:
    """How many samples each holding gets if every class is dealt out evenly among its holders."""
    holders = np.bincount(label, minlength=len(supply))
    short = np.flatnonzero(holders > supply)
    if len(short):
        c = short[0]
        raise FedblendError(
            f"partition.clients: {holders[c]:,} clients are to hold class {c}, which has {supply[c]:,} "
            "samples; take fewer clients or fewer classes a client"
        )
    order = stable_order(label)
    grouped = label[order]
    rank = np.empty(len(label), np.int64)
    rank[order] = np.arange(len(label)) - np.searchsorted(grouped, grouped)
    return supply[label] // holders[label] + (rank < supply[label] % holders[label])
