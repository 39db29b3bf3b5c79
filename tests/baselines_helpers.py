"""A federation in NumPy, in float64, for the equations of papers written beside fedblend's own training.

The network is linear with softmax outputs, so that the gradient on rows x is (p - y)^T x / n. Clients hold different
numbers of samples and make different numbers of steps; only some take part in a round; the learning rate decays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers import images, run, setup

from fedblend.core.engine import TrainTask
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import cohort_of
from fedblend.core.state import RunState
from fedblend.engines.loop_engine import LoopEngine

LR, DECAY, ROUNDS = 0.1, 0.9, 4
SIZES = (3, 9, 12, 16)
GROUPS = [list(group) for group in np.split(np.arange(40), np.cumsum(SIZES)[:-1])]
TRAIN: dict[str, Any] = {"cohort": 2, "epochs": 2, "batch_size": 4, "lr": LR, "lr_decay": DECAY}
Gradient = Callable[[np.ndarray], np.ndarray]


class Reference:
    """The federation: the model w [C, D + 1], its last column the bias, and the gradients of each client's steps."""

    def __init__(self, groups: list[list[int]] = GROUPS, **changes: Any) -> None:
        changes = {"model": {"name": "mlp", "hidden": []}, **changes, "train": {**TRAIN, **changes.get("train", {})}}
        self.setup = setup(images(), groups, **changes)
        self.engine = LoopEngine(self.setup)
        self.loop = RoundLoop(self.setup, self.engine)
        self.names = list(self.setup.weights())
        self.first = self.flat(self.setup.weights()) if len(self.names) == 2 else np.empty(0)
        self.sizes = self.setup.population.sizes
        self.clients = range(len(self.sizes))

    def flat(self, weights: dict[str, torch.Tensor], before: str = "") -> np.ndarray:
        """Weight and bias as one matrix."""
        weight, bias = (weights[before + name].double().numpy() for name in self.names)
        return np.concatenate([weight, bias[:, None]], 1)

    def samples(self, client: int) -> tuple[np.ndarray, np.ndarray]:
        """A client's inputs [n, D + 1], the last one 1, and classes."""
        x, y = self.setup.samples(client, int(self.sizes[client]))
        return np.concatenate([self.setup.scale(x).flatten(1).double().numpy(), np.ones((len(x), 1))], 1), y.numpy()

    def gradient(self, client: int, rows: Any = slice(None)) -> Gradient:
        """The gradient of the mean cross-entropy over a client's samples, or some of them."""
        x, y = (half[rows] for half in self.samples(client))
        label = np.eye(self.setup.task.outputs)[y]

        def of(w: np.ndarray) -> np.ndarray:
            return (softmax(x @ w.T) - label).T @ x / len(x)

        return of

    def batches(self, client: int, round: int, personal: bool = False) -> list[np.ndarray]:
        """The rows of each of a client's steps in a round."""
        sizes = self.setup.sizes(round)
        task = TrainTask(round, {}, self.loop.exchange.pool_of(self.loop.start()[0]), sizes, personal=personal)
        made = self.engine.assign(task, client)
        return [made.order[a:b] for a, b in zip(made.bounds, made.bounds[1:], strict=False)]

    def steps(self, client: int, round: int, personal: bool = False) -> list[Gradient]:
        """The gradient of each of a client's steps in a round."""
        return [self.gradient(client, rows) for rows in self.batches(client, round, personal)]

    def cohorts(self) -> list[tuple[int, float, list[int]]]:
        """The number, the learning rate and the clients of each round."""
        return [(round, LR * DECAY**round, cohort_of(self.setup, round).tolist()) for round in range(ROUNDS)]

    def trained(self) -> RunState:
        """The state after all rounds, by fedblend."""
        return run(self.loop, ROUNDS)[0]

    def shares(self, cohort: list[int]) -> np.ndarray:
        """The clients' shares of a cohort's samples."""
        return self.sizes[cohort] / self.sizes[cohort].sum()

    def mean(self, cohort: list[int], models: list[np.ndarray]) -> np.ndarray:
        """FedAvg's mean, by samples."""
        return np.average(models, axis=0, weights=self.sizes[cohort])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities of the last axis."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def descend(w: np.ndarray, steps: list[Gradient], lr: float, change: Callable[..., np.ndarray] | None = None) -> Any:
    """One client's steps; ``change(g, w)`` is what it follows instead of the gradient g."""
    for gradient in steps:
        g = gradient(w)
        w = w - lr * (g if change is None else change(g, w))
    return w


def near(made: np.ndarray, wanted: np.ndarray) -> None:
    """Assert that both are equal but for float32: fedblend's training rounds each of some dozen steps."""
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def skewed() -> list[list[int]]:
    """Groups of the same sizes in which clients lack classes: 0; 0 and 1; 1 and 2; all."""
    of = [list(range(label, 40, 3)) for label in range(3)]
    return [of[0][:3], of[0][3:8] + of[1][:4], of[1][4:10] + of[2][:6], of[0][8:14] + of[1][10:] + of[2][6:]]
