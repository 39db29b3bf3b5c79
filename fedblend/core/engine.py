"""What an engine does: it runs tasks on clients and yields results, wherever the clients live."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.core.sharing import Payload, Pool
from fedblend.core.trees import strip_prefix

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class TrainTask:
    """One round of local training: what every client of the cohort is told.

    ``said`` is what the server says beside the model; ``own`` holds, by client, what those know who begin from weights
    of their own and not from the round's: ``weights/...`` and ``said/...``.
    """

    round: int
    weights: Tensors
    pool: Pool | None
    sizes: np.ndarray
    said: Tensors = field(default_factory=dict)
    own: Mapping[int, Tensors] = field(default_factory=dict)

    def start_of(self, client: int) -> Tensors:
        """The weights that a client begins with."""
        return strip_prefix("weights/", self.own[client]) if client in self.own else self.weights

    def knows(self, client: int) -> tuple[bool, bool]:
        """Whether a client begins from weights of its own, and whether it has heard anything beside a model."""
        return client in self.own, bool(self.said_to(client))

    def said_to(self, client: int) -> Tensors:
        """What the server said beside the model, as far as the client has heard."""
        return strip_prefix("said/", self.own[client]) if client in self.own else self.said


@dataclass(frozen=True)
class ClientUpdate:
    """What training made at a client: its weights, the number of samples it used, and its mean loss.

    ``outputs`` float32 [C, C] are the means of its model's softmax outputs by label, where they were noted.
    """

    client: int
    weights: dict[str, torch.Tensor]
    samples: int
    loss: float
    outputs: torch.Tensor | None = None


@dataclass(frozen=True)
class Scores:
    """Per-sample results of one set of samples: ``loss`` float32 [n], and ``right`` bool [n] in classification.

    ``owner`` int64 [n] is the client that holds each sample out, where not all could be asked.
    """

    loss: np.ndarray
    right: np.ndarray | None
    samples: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    owner: np.ndarray | None = None


@dataclass
class CohortResult:
    """What a round's training gave: of good uploads the client, its samples and its loss, and why others were not.

    ``partial`` is what the aggregator kept of the good uploads, ``sent`` the bytes of all uploads, ``seconds`` the
    time that training them took. ``held`` are the good uploads of this process by client, where the server step looks
    at them. ``own`` are the weights of clients that go on from their own, by client. ``beside`` are bytes of other
    kinds that went with the uploads, by direction and kind.
    """

    good: list[tuple[int, int, float]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    sent: int = 0
    seconds: float = 0.0
    partial: Any = None
    held: dict[int, Tensors] = field(default_factory=dict)
    own: dict[int, Tensors] = field(default_factory=dict)
    beside: dict[tuple[str, str], int] = field(default_factory=dict)


class Engine(Protocol):
    """Runs tasks on clients. Results come in the order in which the clients were given.

    ``secret_noise`` is true where clients are real: noise that protects them is then drawn from the system's entropy.
    """

    secret_noise: bool

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload]]:
        """Ask clients to share; those that send nothing yield nothing."""
        ...

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[ClientUpdate]:
        """Train a model on each client from the round's weights."""
        ...

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> CohortResult:
        """Train the clients, check what they send, and keep of it what the aggregator needs."""
        ...

    def ask(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Put the server step's question to the holders of the uploads that the last :meth:`collect` found good."""
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


def collect(setup: Setup, task: TrainTask, results: Iterable[ClientUpdate], lost: Collection[int]) -> CohortResult:
    """Protect, count and check each upload, and hand the good ones to the aggregator as they come.

    ``lost`` are clients whose upload never arrives.
    """
    experiment = setup.experiment
    kind = experiment.method.upload
    collected = CohortResult()

    def uploads() -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        for result in _timed(results, collected):
            upload = leaving(setup, task, result)
            collected.sent += experiment.protection.sent_bytes(upload, task.weights)
            if experiment.keeps_client_weights:
                collected.own[result.client] = result.weights
            if result.client in lost:
                continue
            fault = kind.fault(upload, task.weights, setup.task)
            if fault:
                collected.refused.append({"client": result.client, "reason": fault})
                continue
            collected.good.append((result.client, result.samples, result.loss))
            if experiment.method.server_step.looks_at_uploads:
                collected.held[result.client] = upload
            yield upload, float(result.samples)

    collected.partial = kind.aggregator(experiment.method.aggregator).partial(uploads())
    return collected


def leaving(setup: Setup, task: TrainTask, result: ClientUpdate) -> dict[str, torch.Tensor]:
    """What a client sends: its upload with the protection on it, or what an adversary makes of it."""
    experiment, client = setup.experiment, result.client
    payload = experiment.method.upload.payload(result.weights, result.outputs)
    if setup.adversaries[client]:
        rng = stream(experiment.seed, "adversary", task.round, client)
        return experiment.adversary.corrupt(payload, task.weights, rng)
    rng = stream(experiment.seed, "protection", task.round, client)
    return experiment.protection.protect(payload, task.weights, experiment.train.lr_in(task.round), rng)


def _timed(results: Iterable[ClientUpdate], collected: CohortResult) -> Iterator[ClientUpdate]:
    """Pass results on, adding up the time that making each one took."""
    waiting = iter(results)
    while True:
        start = time.perf_counter()
        result = next(waiting, None)
        collected.seconds += time.perf_counter() - start
        if result is None:
            return
        yield result
