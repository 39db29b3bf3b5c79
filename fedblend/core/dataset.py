"""A data set as stored, with a training and a test half; and which client holds which samples."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

TaskKind = Literal["classification", "multi-label", "regression"]
"""What is predicted of a sample: one of several classes, which of several labels it has, or numbers."""


@dataclass(frozen=True)
class Samples:
    """Samples as stored: images stay uint8 [n, C, H, W]; text is codes [n, T]; features float32 [n, d].

    Tokens are ids int64 [n, T], or [n, 2, T] with their attention mask (1 for an id to read, 0 for padding).

    ``y`` is int64 [n] (classes), float32 [n, L] of 0 and 1 (multi-label) or float32 [n, q] (regression). ``client`` is
    int64 [n] where the data has clients of its own (writers, roles, hospitals), else ``None``.
    """

    x: torch.Tensor
    y: torch.Tensor
    client: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A data set, split into train and test by its publisher or by a fixed rule that ``facts`` states.

    ``classes`` are the names of the classes, of which a sample has one; ``labels`` are the names of labels, of which a
    sample has any number; without both the targets are numbers (regression). ``facts`` holds the source, the
    SHA-256 of every file read, and notes; ``vocabulary`` is the number of codes of a text.
    """

    name: str
    kind: Literal["image", "text", "features", "tokens"]
    train: Samples
    test: Samples
    classes: tuple[str, ...]
    client_names: tuple[str, ...] = ()
    vocabulary: int = 0
    facts: dict[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()

    @property
    def task(self) -> TaskKind:
        """What is predicted: one of ``classes``, some of ``labels``, or numbers."""
        if self.classes:
            return "classification"
        return "multi-label" if self.labels else "regression"

    @property
    def outputs(self) -> int:
        """Width of a model's output: the number of classes, of labels, or of numbers to predict."""
        return len(self.classes) if self.classes else int(self.train.y.shape[1])


Split = Literal["test", "holdout", "validation", "server"]
"""Samples that a model is scored on: the data set's test half, what clients hold out for tests of their own, what
clients keep for validation, and what the server keeps for validation."""

ClientSplit = Literal["test", "holdout", "validation"]
"""Those of the splits whose samples belong to clients."""


@dataclass(frozen=True)
class Population:
    """Clients as rows of a ragged array: client k holds ``order[offsets[k]:offsets[k + 1]]``.

    ``held_order`` and ``held_offsets`` are the same for samples a client keeps for its own test, ``validation_order``
    and ``validation_offsets`` for those it keeps for validation; ``server_order`` are samples that the server keeps for
    validation and no client has. Indices count in the training half of the data set. ``natural`` int64 [clients] is the
    data set's own number of each client (writer, role, hospital) where the split keeps them. ``notes`` says how the
    split came about.
    """

    order: np.ndarray
    offsets: np.ndarray
    held_order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    held_offsets: np.ndarray | None = None
    natural: np.ndarray | None = None
    validation_order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    validation_offsets: np.ndarray | None = None
    server_order: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    notes: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(groups: Sequence[np.ndarray], **notes: Any) -> Population:
        """A population from one index array a client."""
        sizes = np.fromiter((len(g) for g in groups), np.int64, len(groups))
        order = np.concatenate([np.asarray(g, np.int64) for g in groups]) if len(groups) else np.empty(0, np.int64)
        return Population(order, np.concatenate([[0], np.cumsum(sizes)]), notes=notes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def sizes(self) -> np.ndarray:
        """Training samples of each client, int64 [clients]; not to be written to."""
        sizes = np.diff(self.offsets)
        sizes.flags.writeable = False
        return sizes

    @property
    def elsewhere(self) -> bool:
        """Whether the samples lie at the clients' own sites, so that only their numbers are known here."""
        return len(self.order) != self.offsets[-1]

    def names(self, data: Dataset) -> tuple[str, ...]:
        """The name of each client, where the clients are the data set's own and it names them; empty elsewhere."""
        if self.natural is None or not data.client_names:
            return ()
        return tuple(data.client_names[number] for number in self.natural.tolist())

    def places_of(self, of: np.ndarray) -> np.ndarray:
        """The client of each sample of the data's own clients ``of``, int64 [n]; -1 where one takes no part here."""
        assert self.natural is not None
        place = np.full(int(max(self.natural.max(initial=0), of.max(initial=0))) + 1, -1)
        place[self.natural] = np.arange(len(self.natural))
        return place[of]

    def indices(self, client: int) -> np.ndarray:
        """The training samples of a client."""
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def held(self, client: int) -> np.ndarray:
        """The samples a client keeps for its own test (empty unless it holds some out)."""
        if self.held_offsets is None:
            return self.held_order[:0]
        return self.held_order[self.held_offsets[client] : self.held_offsets[client + 1]]

    def rows(self, split: Literal["holdout", "validation", "server"]) -> np.ndarray:
        """The samples of a split, in the order of their clients."""
        return {"holdout": self.held_order, "validation": self.validation_order, "server": self.server_order}[split]

    def owners(self, split: Literal["train", "holdout", "validation"] = "train") -> np.ndarray:
        """The client of each entry of ``order``, or of the samples of another split, int64."""
        tables = {"train": self.offsets, "holdout": self.held_offsets, "validation": self.validation_offsets}
        offsets = tables[split]
        if offsets is None:
            return np.empty(0, np.int64)
        return np.repeat(np.arange(len(self)), np.diff(offsets))
