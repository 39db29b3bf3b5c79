"""Fed-AugMix's objective: the divergence, the rule for lambda, and what training with it does."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from helpers import examples, weight_gradient
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, StepPlan, Task
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.augmix import AugMix, jensen_shannon

TASK = Task("classification", 3)
LOG3 = math.log(3)


@dataclass(frozen=True)
class Stretched:
    """A scale that is not the unit one."""

    factor: float = 3.0
    offset: float = -0.7

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.from_unit(x / 255)

    def to_unit(self, scaled: torch.Tensor) -> torch.Tensor:
        return ((scaled - self.offset) / self.factor).clamp(0, 1)

    def from_unit(self, unit: torch.Tensor) -> torch.Tensor:
        return unit * self.factor + self.offset


CONTEXT = Context(TASK, Stretched())


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batch(size: int = 4, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    stored = torch.from_numpy(rng.integers(0, 256, (size, 1, 6, 6))).double()
    return Batch(CONTEXT.scale(stored), torch.from_numpy(rng.integers(0, 3, size)))


def row_of(objective: AugMix, size: int = 4, seed: int = 0, width: int | None = None) -> dict[str, torch.Tensor]:
    """What the objective draws for one step of a batch, in a plan of this width."""
    drawn = objective.draw(np.random.default_rng(seed), StepPlan(np.array([size]), width or size, 0))
    return {name: torch.from_numpy(array[0]) for name, array in drawn.items()}


def loss_of(objective: AugMix, model: nn.Module, given: Batch, seed: int = 0) -> torch.Tensor:
    return objective.loss(EagerNet(model), given, row_of(objective, len(given.y), seed), CONTEXT)


def shares(seed: int, views: int = 3, samples: int = 5, classes: int = 4, sharp: float = 2.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return F.log_softmax(sharp * torch.randn(views, samples, classes, generator=rng, dtype=torch.float64), -1)


def test_divergence_of_disjoint_certainties_is_log_3() -> None:
    certain = torch.eye(3, dtype=torch.float64)[:, None].expand(3, 2, 3).log()
    assert jensen_shannon(certain).item() == pytest.approx(LOG3, abs=1e-12)


@examples(50)
@given(st.integers(0, 10**6), st.floats(0.01, 40))
def test_divergence_is_that_of_the_definition_and_at_most_log_3(seed: int, sharp: float) -> None:
    given_shares = shares(seed, sharp=sharp)
    p = given_shares.exp().numpy()
    q = np.maximum(p.mean(0), 1e-7)
    with np.errstate(divide="ignore", invalid="ignore"):
        parts = np.where(p > 0, p * np.log(p / q), 0.0)

    value = jensen_shannon(given_shares).item()

    assert value == pytest.approx(parts.sum(-1).mean(), rel=1e-9, abs=1e-12)
    assert -1e-6 <= value <= LOG3 + 1e-12


def test_the_mixture_is_clamped() -> None:
    tiny = 1e-9
    given_shares = torch.tensor([tiny, 1 - tiny], dtype=torch.float64).log().expand(3, 1, 2)
    assert jensen_shannon(given_shares).item() == pytest.approx(tiny * math.log(tiny / 1e-7), rel=1e-6)


def test_gradients_stay_finite_where_probabilities_vanish() -> None:
    logits = torch.tensor([[[300.0, 0.0, -300.0]], [[-300.0, 0.0, 300.0]], [[0.0, 0.0, 0.0]]], requires_grad=True)
    value = jensen_shannon(F.log_softmax(logits, -1))
    (gradient,) = torch.autograd.grad(value, logits)
    assert bool(gradient.isfinite().all())
    assert 0 < value.item() < LOG3


def test_a_large_lambda_multiplies_no_rounding() -> None:
    """Outputs that differ in their fourth digit: their divergence is 1e-8, in float32 as in float64."""
    exact = net()
    with torch.no_grad():
        exact[3].weight.mul_(1e-3)
    given = batch()
    rounded = copy.deepcopy(exact).float()
    objective = AugMix(lam=5e3, loss_scaling=False)

    wanted = weight_gradient(loss_of(objective, exact, given), exact)
    found = weight_gradient(loss_of(objective, rounded, Batch(given.x.float(), given.y)), rounded)

    plain = weight_gradient(F.cross_entropy(exact(given.x), given.y), exact)
    assert float((wanted - plain).norm()) > 1e-4
    assert float((found - wanted).norm()) < 0.01 * float((wanted - plain).norm())


def test_the_rule_for_lambda_at_equality() -> None:
    objective = AugMix(lam=50, threshold=4.0, large_lambda=5000)
    divergence = torch.tensor(0.5, dtype=torch.float64)

    def chosen(own: float) -> float:
        return objective.weight(torch.tensor(own, dtype=torch.float64), divergence).item()

    assert chosen(2.0) == 50  # equal: not above
    assert chosen(np.nextafter(2.0, 3)) == 5000
    assert chosen(np.nextafter(2.0, 1)) == 50
    assert AugMix(loss_scaling=False).weight(torch.tensor(2.0), torch.tensor(0.0)).item() == 50


def test_the_papers_defaults() -> None:
    made = AugMix()
    assert (made.threshold, made.large_lambda, made.lam) == (5e4, 5e3, 50)
    assert (made.alpha, made.chains, made.depth) == (1, 3, 3)


def test_a_short_batch_takes_its_own_draws() -> None:
    objective, model, given = AugMix(), net(), batch(3)
    wide = row_of(objective, 3, width=5)
    narrow = {name: values[:3] for name, values in wide.items()}
    values = [objective.loss(EagerNet(model), given, row, CONTEXT).item() for row in (wide, narrow)]
    assert values[0] == values[1]


def test_every_step_draws_afresh() -> None:
    drawn = AugMix().draw(np.random.default_rng(0), StepPlan(np.array([4, 4, 2]), 4, 0))
    assert {name: array.shape[:2] for name, array in drawn.items()} == dict.fromkeys(drawn, (3, 4))
    assert not np.array_equal(drawn["level"][0], drawn["level"][1])


@pytest.mark.parametrize(
    ("x", "task", "told"),
    [
        (torch.zeros(2, 5), TASK, "needs images"),
        (torch.zeros(2, 1, 4, 4), Task("regression", 3), "needs classes"),
    ],
)
def test_what_has_no_pictures_or_classes_is_refused(x: torch.Tensor, task: Task, told: str) -> None:
    context = Context(task, Stretched())
    with pytest.raises(FedblendError, match=told):
        AugMix().loss(EagerNet(net()), Batch(x, torch.zeros(2).long()), row_of(AugMix(), 2), context)
