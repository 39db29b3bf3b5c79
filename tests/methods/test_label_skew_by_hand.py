"""FedNTD, FedLC and FedRS beside gradients in NumPy from their papers' equations, where clients lack classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from baselines_helpers import Reference, descend, near, skewed, softmax
from helpers import setup

from fedblend.core.context import Batch, Context, StepPlan, Task
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.calibrated import FedLC, FedRS
from fedblend.methods.objectives.fedmix import FedMix

Slope = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""(logits, logits of the global model, one-hot labels, the client's samples by class) -> the loss's slope by logits."""


def averaged(of: Reference, slope: Slope) -> np.ndarray:
    """FedAvg with another loss of clients."""
    w = of.first
    for number, lr, cohort in of.cohorts():
        models = []
        for k in cohort:
            x, y = of.samples(k)
            label = np.eye(3)[y]

            def gradient(v: np.ndarray, rows: np.ndarray, x: Any = x, label: Any = label, w: Any = w) -> np.ndarray:
                made = slope(x[rows] @ v.T, x[rows] @ w.T, label[rows], label.sum(0))
                return made.T @ x[rows] / len(rows)

            steps = [lambda v, rows=rows, gradient=gradient: gradient(v, rows) for rows in of.batches(k, number)]
            models.append(descend(w, steps, lr))
        w = of.mean(cohort, models)
    return w


def fedntd(beta: float, tau: float) -> Slope:
    def slope(z: np.ndarray, z_global: np.ndarray, label: np.ndarray, counts: np.ndarray) -> np.ndarray:
        student, teacher = (np.where(label, 0.0, np.exp(one / tau)) for one in (z, z_global))
        student, teacher = (one / one.sum(1, keepdims=True) for one in (student, teacher))
        return softmax(z) - label + beta * tau**2 * (student - teacher) / tau

    return slope


def fedlc(tau: float) -> Slope:
    def slope(z: np.ndarray, z_global: np.ndarray, label: np.ndarray, counts: np.ndarray) -> np.ndarray:
        # The limit of no sample: the class takes no part.
        e = np.where(counts > 0, np.exp(z - tau * np.maximum(counts, 1) ** -0.25), 0.0)
        return e / e.sum(1, keepdims=True) - label

    return slope


def fedrs(alpha: float) -> Slope:
    def slope(z: np.ndarray, z_global: np.ndarray, label: np.ndarray, counts: np.ndarray) -> np.ndarray:
        factor = np.where(counts > 0, 1.0, alpha)
        return factor * (softmax(factor * z) - label)

    return slope


CASES: dict[str, tuple[Any, Slope]] = {
    "fedntd": (
        {"name": "fedntd", "terms": [{"name": "fedntd", "beta": 0.7, "tau": 2.0}]},
        fedntd(0.7, 2.0),
    ),
    "fedlc": ({"name": "fedlc", "objective": {"tau": 0.8}}, fedlc(0.8)),
    "fedrs": ({"name": "fedrs", "objective": {"alpha": 0.3}}, fedrs(0.3)),
}
"""By method: its fields and the slope of its loss."""


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_papers(name: str) -> None:
    method, slope = CASES[name]
    of = Reference(skewed(), method=method)
    near(of.flat(of.trained().weights), averaged(of, slope))


def test_label_counts_are_those_of_the_data_that_have_arrived() -> None:
    made = setup(groups=skewed(), arrival={"first": 0.4, "clients": 0.0})
    assert made.label_counts(1, int(made.sizes(0)[1])).tolist() == [4, 0, 0]
    assert made.label_counts(1, 9).tolist() == [5, 4, 0]


def test_a_mixed_target_with_a_class_that_the_client_lacks_has_a_finite_loss() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Linear(2, 3), torch.randn(4, 2)
    context = Context(Task("classification", 3), lambda x: x, {"x": torch.randn(1, 2), "y": torch.ones(1, 3) / 3})
    plan = StepPlan(np.array([4]), 4, 0, entries=1, label_counts=np.array([3, 1, 0]))
    for objective in (FedLC(base=FedMix(lam=0.5)), FedRS(alpha=0.0, base=FedMix(lam=0.5))):
        row = {name: torch.from_numpy(a)[0] for name, a in objective.draw(np.random.default_rng(0), plan).items()}
        (phase,) = objective.phases()
        loss = phase(EagerNet(model), Batch(x, torch.tensor([0, 0, 0, 1])), row, context)
        assert torch.isfinite(loss)
        assert all(torch.isfinite(g).all() for g in torch.autograd.grad(loss, list(model.parameters())))
