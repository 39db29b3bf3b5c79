"""What an engine does: it runs tasks on clients and yields results, wherever the clients live."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedblend.aggregators.base import Upload
from fedblend.sharing.base import Payload, Pool

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TrainTask:
    """One round of local training: what every client of the cohort is told."""

    round: int
    weights: Tensors
    pool: Pool | None
    sizes: np.ndarray


@dataclass(frozen=True)
class Trained:
    """What a client sends after training: its upload, the number of samples it used, and its mean loss."""

    client: int
    upload: dict[str, torch.Tensor]
    samples: int
    loss: float


@dataclass(frozen=True)
class Scores:
    """Per-sample results of one set of samples: ``loss`` float32 [n], and ``right`` bool [n] in classification."""

    loss: np.ndarray
    right: np.ndarray | None
    samples: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))


@dataclass
class Collected:
    """What a round's training gave: of good uploads the client, its samples and its loss, and why others were not.

    ``partial`` is what the aggregator kept of the good uploads, ``sent`` the bytes of all uploads, ``seconds`` the
    time that training them took. ``uploads`` are the good ones with their weights, in order of client, where the
    server step looks at them; ``held`` are those of this process by client, where it will ask the clients.
    """

    good: list[tuple[int, int, float]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0
    partial: Any = None
    uploads: list[Upload] = field(default_factory=list)
    held: dict[int, Tensors] = field(default_factory=dict)


class Engine(Protocol):
    """Runs tasks on clients. Results come in the order in which the clients were given."""

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload]]:
        """Ask clients to share; those that send nothing yield nothing."""
        ...

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[Trained]:
        """Train a model on each client from the round's weights."""
        ...

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> Collected:
        """Train the clients, check what they send, and keep of it what the aggregator needs."""
        ...

    def ask(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Put the server step's question to the clients whose uploads the last :meth:`collect` found good."""
        ...

    def score(self, weights: Tensors, held: bool = False) -> Scores:
        """Score the test half of the data set, or all samples that clients hold out."""
        ...

    def server_model(self) -> nn.Module:
        """A module for functional calls with any weights, in evaluation mode, for the server step."""
        ...

    def close(self) -> None:
        """Let go of other processes, if there are any."""
        ...
