"""Partitions by exact counts of each class at each client: any table, Mix2FLD's, and XorMixFL's."""

from __future__ import annotations

from typing import Literal

import numpy as np

from fedblend.core.dataset import Population
from fedblend.core.errors import FedblendError, brief
from fedblend.core.random import stream
from fedblend.core.registry import Count, Int, part
from fedblend.data.partitions.deal import deal_counts, require_classes, require_clients, require_supply


@part("partition", "counts")
class Counts:
    """``counts[k][c]`` samples of class c at client k: one row for each client, one number for each class."""

    counts: list[list[Int]]
    """Samples of each class at each client: one row for each client, one number for each class."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples to clients. Raises :class:`FedblendError` for invalid rows, or too few samples."""
        require_classes(classes, "counts")
        if not self.counts:
            raise FedblendError("partition.counts: is empty; give one row of counts for each client")
        for k, row in enumerate(self.counts):
            if len(row) != classes or min(row) < 0:
                valid = f"{classes} numbers from 0 up, one for each class"
                raise FedblendError(f"partition.counts: row {k} is {brief(row)}; valid: {valid}")
        return _deal(np.array(self.counts, np.int64), labels, seed, "partition.counts")


@part("partition", "mix2fld")
class Mix2FldSplit:
    """Mix2FLD's devices (section IV): ``samples`` each, here 500.

    ``form = "iid"``: equally many samples of every label. ``"non-iid"``: ``scarce_labels`` labels, drawn separately for
    each device, have ``scarce_samples`` samples each (2 labels of 2 samples). The other labels share the rest equally
    (62 samples each, for 10 labels).
    """

    clients: Count = 10
    """Number of clients."""
    form: Literal["iid", "non-iid"] = "non-iid"
    """Equally many samples of every label, or some scarce labels at each client."""
    samples: Count = 500
    """Samples of each client."""
    scarce_labels: Count = 2
    """Number of scarce labels, drawn separately for each client ("non-iid")."""
    scarce_samples: Int = 2
    """Samples of each scarce label, 0 or more."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples to clients. Raises :class:`FedblendError` if there are too few, or for uneven counts."""
        require_classes(classes, "mix2fld")
        require_clients(self.clients, len(labels))
        scarce = self.scarce_labels if self.form == "non-iid" else 0
        rest, plentiful = self.samples - scarce * self.scarce_samples, classes - scarce
        if plentiful < 1 or self.scarce_samples < 0:
            found = f"{scarce} of {self.scarce_samples} samples"
            raise FedblendError(
                f"partition.scarce_labels: {found}; valid: 1 to {classes - 1} labels of 0 samples or more"
            )
        if rest < 0 or rest % plentiful:
            least = scarce * self.scarce_samples
            near = least + max(round(rest / plentiful), 1) * plentiful
            found = f"{self.samples} do not leave equally many of {plentiful} labels"
            valid = f"{least} and any multiple of {plentiful} more, such as {near}"
            raise FedblendError(f"partition.samples: {found}; valid: {valid}")
        counts = np.full((self.clients, classes), rest // plentiful)
        rng = stream(seed, "partition")
        drawn = rng.permuted(np.broadcast_to(np.arange(classes), counts.shape), axis=1)[:, :scarce]
        np.put_along_axis(counts, drawn, self.scarce_samples, axis=1)
        return _deal(counts, labels, seed, "partition.samples", rng)


@part("partition", "xormixfl")
class XorMixFlSplit:
    """XorMixFL's devices (section 4): each has n samples of every target label, and m of every other label.

    ``n`` (10) is ``target_samples``, ``m`` (200) is ``samples``, U (3) is ``clients``. The server requests the
    difference, 190 samples of each target label.
    """

    clients: Count = 3
    """Number of clients."""
    targets: tuple[Int, ...] = (0,)
    """The target labels, of which clients have few samples."""
    samples: Count = 200
    """Samples of every other label at each client."""
    target_samples: Int = 10
    """Samples of every target label at each client, 0 or more."""

    def split(self, labels: np.ndarray, classes: int, seed: int, natural: np.ndarray | None) -> Population:
        """Deal the samples to clients. Raises :class:`FedblendError` for unknown labels, or too few samples."""
        require_classes(classes, "xormixfl")
        require_clients(self.clients, len(labels))
        if not self.targets or min(self.targets) < 0 or max(self.targets) >= classes:
            raise FedblendError(f"partition.targets: {list(self.targets)} is not valid: labels from 0 to {classes - 1}")
        if self.target_samples < 0:
            raise FedblendError(f"partition.target_samples: {self.target_samples} is not valid: 0 or more")
        counts = np.full((self.clients, classes), self.samples)
        counts[:, list(self.targets)] = self.target_samples
        return _deal(counts, labels, seed, "partition.samples")


def _deal(
    counts: np.ndarray, labels: np.ndarray, seed: int, field: str, rng: np.random.Generator | None = None
) -> Population:
    """Deal samples by counts [clients, classes]. Raises :class:`FedblendError` if there are too few."""
    require_supply(labels, counts.sum(0, dtype=np.float64), field, "take fewer clients or fewer samples a client")
    return deal_counts(labels, counts, rng or stream(seed, "partition"))
