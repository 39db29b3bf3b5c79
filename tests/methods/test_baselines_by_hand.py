"""SCAFFOLD, FedDyn, MOON, Ditto and server optimisers beside an independent computation of their papers' equations.

The network is linear with softmax outputs and each step takes all of a client's samples, so that a client's gradient is
(p - y)^T x / n: the reference is NumPy in float64, written from the papers' algorithm boxes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import run, setup
from torch.nn import functional as F

from fedblend.core.loop import RoundLoop
from fedblend.core.state import RunState
from fedblend.engines.loop import LoopEngine

STEPS, LR, ROUNDS, CLIENTS = 3, 0.1, 4, 4
LINEAR: dict[str, Any] = {
    "model": {"name": "mlp", "hidden": []},
    "train": {"cohort": 2, "epochs": STEPS, "batch_size": 1000, "lr": LR, "lr_decay": 1.0},
}
Gradient = Callable[[np.ndarray], np.ndarray]


class Reference:
    """The federation in NumPy: the model w [C, D + 1], its last column the bias, and each client's gradient."""

    def __init__(self, **changes: Any) -> None:
        self.setup = setup(**LINEAR, **changes)
        self.loop = RoundLoop(self.setup, LoopEngine(self.setup))
        self.names = list(self.setup.weights())
        self.first = self.flat(self.setup.weights())
        self.sizes = self.setup.population.sizes

    def flat(self, weights: dict[str, torch.Tensor], before: str = "") -> np.ndarray:
        """Weight and bias as one matrix."""
        weight, bias = (weights[before + name].double().numpy() for name in self.names)
        return np.concatenate([weight, bias[:, None]], 1)

    def gradient(self, client: int) -> Gradient:
        """The gradient of a client's mean cross-entropy over all of its samples."""
        x, y = self.setup.samples(client, int(self.sizes[client]))
        rows = np.concatenate([self.setup.scale(x).flatten(1).double().numpy(), np.ones((len(x), 1))], 1)
        label = np.eye(self.setup.task.outputs)[y.numpy()]

        def of(w: np.ndarray) -> np.ndarray:
            logits = rows @ w.T
            p = np.exp(logits - logits.max(1, keepdims=True))
            return (p / p.sum(1, keepdims=True) - label).T @ rows / len(rows)

        return of

    def cohorts(self) -> list[list[int]]:
        """The clients of each round."""
        return [self.loop.draw_cohort(round).tolist() for round in range(ROUNDS)]

    def trained(self) -> RunState:
        """The state after all rounds, by fedblend."""
        return run(self.loop, ROUNDS)[0]

    def mean(self, cohort: list[int], models: list[np.ndarray]) -> np.ndarray:
        """FedAvg's mean, by samples."""
        return np.average(models, axis=0, weights=self.sizes[cohort])


def descend(w: np.ndarray, gradient: Gradient) -> np.ndarray:
    """The steps of one client."""
    for _ in range(STEPS):
        w = w - LR * gradient(w)
    return w


def near(made: np.ndarray, wanted: np.ndarray) -> None:
    """Equal but for float32: fedblend's training rounds each of some dozen steps."""
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("option", ["I", "II"])
def test_scaffold(option: str) -> None:
    of = Reference(method={"name": "scaffold", "terms": [{"name": "scaffold", "option": option}]})
    x, c = of.first, np.zeros_like(of.first)
    variates = [np.zeros_like(x) for _ in range(CLIENTS)]
    for cohort in of.cohorts():
        models, changes = [], []
        for i in cohort:
            g = of.gradient(i)
            y = descend(x, lambda w, g=g, i=i, c=c: g(w) - variates[i] + c)
            renewed = g(x) if option == "I" else variates[i] - c + (x - y) / (STEPS * LR)
            models.append(y - x)
            changes.append(renewed - variates[i])
            variates[i] = renewed
        x = x + np.mean(models, 0)
        c = c + len(cohort) / CLIENTS * np.mean(changes, 0)

    state = of.trained()

    near(of.flat(state.weights), x)
    near(of.flat(state.server_part("terms.0")), c)
    for i in state.client_states:
        near(of.flat(state.client_states[i], "terms.0/"), variates[i])


def test_feddyn() -> None:
    alpha = 0.05
    of = Reference(method={"name": "feddyn", "terms": [{"name": "feddyn", "alpha": alpha}]})
    theta, h = of.first, np.zeros_like(of.first)
    kept = [np.zeros_like(theta) for _ in range(CLIENTS)]
    for cohort in of.cohorts():
        models = []
        for k in cohort:
            g = of.gradient(k)
            model = descend(theta, lambda w, g=g, k=k, theta=theta: g(w) - kept[k] + alpha * (w - theta))
            kept[k] = kept[k] - alpha * (model - theta)
            models.append(model)
        h = h - alpha / CLIENTS * sum(model - theta for model in models)
        theta = np.mean(models, 0) - h / alpha

    state = of.trained()

    near(of.flat(state.weights), theta)
    near(of.flat(state.server_part("terms.0")), h)


def test_ditto() -> None:
    lam = 0.7
    of = Reference(method={"name": "ditto", "personal": {"name": "ditto", "lambda": lam}})
    w, personal = of.first, {}
    for cohort in of.cohorts():
        models = []
        for k in cohort:
            g = of.gradient(k)
            models.append(descend(w, g))
            personal[k] = descend(personal.get(k, w), lambda v, g=g, w=w: g(v) + lam * (v - w))
        w = of.mean(cohort, models)

    state = of.trained()

    near(of.flat(state.weights), w)
    assert state.client_states.keys() == personal.keys()
    for k, v in personal.items():
        near(of.flat(state.client_states[k], "personal/"), v)


@pytest.mark.parametrize("name", ["fedavgm", "fedadagrad", "fedadam", "fedyogi"])
def test_server_optimisers(name: str) -> None:
    options: dict[str, Any] = {"lr": 0.5, "beta": 0.8} if name == "fedavgm" else {"lr": 0.02, "beta_1": 0.8}
    of = Reference(method={"name": name, "server_step": {"name": name, **options}})
    beta_2, tau = 0.99, 1e-3
    x, m, v = of.first, np.zeros_like(of.first), np.full_like(of.first, tau**2)
    for cohort in of.cohorts():
        delta = of.mean(cohort, [descend(x, of.gradient(k)) for k in cohort]) - x
        if name == "fedavgm":
            m = 0.8 * m + delta
            x = x + 0.5 * m
            continue
        m = 0.8 * m + 0.2 * delta
        if name == "fedadagrad":
            v = v + delta**2
        elif name == "fedadam":
            v = beta_2 * v + (1 - beta_2) * delta**2
        else:
            v = v - (1 - beta_2) * delta**2 * np.sign(v - delta**2)
        x = x + 0.02 * m / (np.sqrt(v) + tau)

    near(of.flat(of.trained().weights), x)


def test_moon() -> None:
    """With a hidden layer; the reference is written with functions of PyTorch in float64."""
    made = setup(
        method={"name": "moon", "terms": [{"name": "moon", "mu": 2.0, "tau": 0.7}]},
        model={"name": "mlp", "hidden": [5]},
        train={**LINEAR["train"], "cohort": CLIENTS},
    )
    names = list(made.weights())
    w = [tensor.double() for tensor in made.weights().values()]
    previous = [list(w) for _ in range(CLIENTS)]

    def hidden(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ weights[0].T + weights[1])

    for _ in range(2):
        models = []
        for k in range(CLIENTS):
            x, y = made.samples(k, int(made.population.sizes[k]))
            x, local = made.scale(x).flatten(1).double(), list(w)
            for _ in range(STEPS):
                local = [p.detach().requires_grad_() for p in local]
                z = hidden(local, x)
                near_, far = ((F.cosine_similarity(z, hidden(other, x)) / 0.7).exp() for other in (w, previous[k]))
                loss = F.cross_entropy(z @ local[2].T + local[3], y) - 2.0 * (near_ / (near_ + far)).log().mean()
                local = [p - LR * g for p, g in zip(local, torch.autograd.grad(loss, local), strict=True)]
            previous[k] = [p.detach() for p in local]
            models.append(previous[k])
        share = made.population.sizes / made.population.sizes.sum()
        w = [sum(s * m[i] for s, m in zip(share, models, strict=True)) for i in range(len(w))]

    state, _ = run(RoundLoop(made, LoopEngine(made)), 2)

    for name, wanted in zip(names, w, strict=True):
        near(state.weights[name].double().numpy(), wanted.numpy())
