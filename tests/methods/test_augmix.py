"""Fed-AugMix: the divergence, the rule for lambda, and other objectives' losses as its base."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, examples, images, same, setup, weight_gradient
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, Objective, Plain, StepPlan, Task
from fedblend.core.registry import build
from fedblend.core.sharing import gather
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.experiment import presets
from fedblend.experiment.config import resolve
from fedblend.experiment.parts import dump
from fedblend.methods.augment.augmix import augmix
from fedblend.methods.objectives.augmix import AugMix, jensen_shannon
from fedblend.methods.objectives.calibrated import FedLC
from fedblend.methods.objectives.fedmix import FedMix, HiddenMix, LocalMix, NaiveMix

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
    [(torch.zeros(2, 5), TASK, "needs images"), (torch.zeros(2, 1, 4, 4), Task("regression", 3), "needs classes")],
)
def test_what_has_no_pictures_or_classes_is_refused(x: torch.Tensor, task: Task, told: str) -> None:
    context = Context(task, Stretched())
    with pytest.raises(FedblendError, match=told):
        AugMix().loss(EagerNet(net()), Batch(x, torch.zeros(2).long()), row_of(AugMix(), 2), context)


POOL = {
    "x": torch.from_numpy(np.random.default_rng(5).normal(size=(3, 1, 6, 6))),
    "y": torch.from_numpy(np.random.default_rng(6).dirichlet([1.0] * 3, 3)),
}
MIXED = Context(CONTEXT.task, CONTEXT.scale, POOL)
BASES = [NaiveMix(lam=0.3), FedMix(lam=0.3), LocalMix(), Plain()]


def mixed_row(objective: Objective, size: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = objective.draw(np.random.default_rng(seed), StepPlan(np.array([size]), size, 0, entries=3))
    row = {name: torch.from_numpy(array)[0] for name, array in drawn.items()}
    return row | ({"lam": row["lam"].double()} if "lam" in row else {})  # as precise as the model here


def mixed_loss(objective: Objective, model: Any, given: Batch, row: dict[str, torch.Tensor]) -> torch.Tensor:
    return objective.loss(EagerNet(model), given, row, MIXED)


def divergence_of(model: Any, given: Batch, row: dict[str, torch.Tensor]) -> torch.Tensor:
    """Equation 6 as it is written, on the client's own images and their views, by three passes."""
    views = augmix(CONTEXT.scale.to_unit(given.x), row)
    p = [model(x).softmax(-1) for x in (given.x, *map(CONTEXT.scale.from_unit, views.double()))]
    q = sum(p) / 3
    return sum(F.kl_div(q.log(), one, reduction="batchmean") for one in p) / 3


@each("base", BASES)
@each("scaling", [False, True])
def test_the_loss_is_the_bases_and_the_divergence_of_the_clean_images(base: Objective, scaling: bool) -> None:
    threshold = 3.0
    objective = AugMix(lam=2.5, loss_scaling=scaling, threshold=threshold, large_lambda=7.0, base=base)
    model, given, row = net(), batch(), mixed_row(objective)

    value = mixed_loss(objective, model, given, row)

    own, divergence = mixed_loss(base, model, given, row), divergence_of(model, given, row)
    lam = 7.0 if scaling and own > threshold * divergence else 2.5
    assert value.item() == pytest.approx((own + lam * divergence).item(), rel=1e-6)
    expected = weight_gradient(own + lam * divergence, model)
    torch.testing.assert_close(weight_gradient(value, model), expected, rtol=1e-5, atol=1e-8)


@examples(20)
@given(st.floats(0, 1), st.integers(0, 10**6))
def test_lambda_is_chosen_by_the_bases_loss(threshold: float, seed: int) -> None:
    base = FedMix(lam=0.3)
    objective = AugMix(lam=0.0, threshold=100 * threshold, large_lambda=1.0, base=base)
    model, given, row = net(), batch(), mixed_row(objective, seed=seed)
    own, divergence = mixed_loss(base, model, given, row).item(), divergence_of(model, given, row).item()
    added = mixed_loss(objective, model, given, row).item() - own
    assert added == pytest.approx(divergence if own > 100 * threshold * divergence else 0.0, abs=1e-6)


def test_plain_as_a_base_asks_for_no_further_pass() -> None:
    passes = []

    class Counted(EagerNet):
        def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
            passes.append(len(x))
            return super().__call__(x, start, stop)

    for base in (Plain(), NaiveMix()):
        objective = AugMix(base=base)
        objective.loss(Counted(net()), batch(), mixed_row(objective), MIXED)

    assert passes == [12, 12, 4]


def test_views_are_the_same_on_any_base() -> None:
    drawn = [
        AugMix(base=base).draw(np.random.default_rng(3), StepPlan(np.array([4]), 4, 0, entries=3)) for base in BASES
    ]

    for one in drawn[:-1]:
        assert set(one) > set(drawn[-1]) == {"operation", "level", "mix"}
        for name, array in drawn[-1].items():
            assert np.array_equal(one[name], array)


def test_names_that_both_draw_are_refused() -> None:
    class Alike(Plain):
        def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
            return {"mix": np.zeros(1)}

    with pytest.raises(FedblendError, match="'plain' draws mix, as 'augmix' does"):
        AugMix(base=Alike()).draw(np.random.default_rng(0), StepPlan(np.array([4]), 4, 0))


def test_hidden_mixing_keeps_its_first_phase() -> None:
    base = HiddenMix(layer=1)
    objective = AugMix(base=base)
    assert objective.phases() == (base.mix, objective.loss)
    assert (objective.layer, objective.needs) == (1, ("x", "y"))


UNEVEN = [range(9), range(9, 24), range(24, 28), range(28, 40)]
SMALLER = {"objective": {"large_lambda": 20.0}}


def test_a_client_with_nothing_to_mix_with_keeps_its_views() -> None:
    """The third client makes no mean, so that it trains as with Fed-AugMix alone."""
    sharing = {"name": "local-means", "samples_per_mean": 8}
    both = {"name": "naivemix+fed-augmix", "sharing": sharing, **SMALLER}

    def trained(method: dict[str, Any]) -> dict[str, torch.Tensor]:
        made = setup(images(), UNEVEN, method=method, policy={"min_mean": 5})
        engine = LoopEngine(made)
        active = made.experiment.method.sharing.plan.active
        shared = dict(engine.share(0, made.weights(), range(4), made.sizes(0))) if active else {}
        assert set(shared) == ({0, 1, 3} if active else set())
        pool = made.experiment.method.sharing.pool(gather(shared), np.random.default_rng(0)) if shared else None
        (sent,) = engine.train(TrainTask(0, made.weights(), pool, made.sizes(0)), [2])
        return dict(sent.weights)

    alone = trained({"name": "fed-augmix", **SMALLER})
    assert same(trained(both), alone)
    assert not same(trained({"name": "fedavg"}), alone)


FILE = {"data": "mnist5k", "partition": {"name": "iid", "clients": 4}, "model": "lenet5"}


def test_a_base_is_a_part_of_its_own_in_files() -> None:
    method = {"name": "fedmix+fed-augmix", "objective": {"severity": 4, "base": {"lambda": 0.2}}}
    made = resolve({**FILE, "method": method}).method.objective

    table = dump(made)

    assert (made.severity, made.base) == (4.0, FedMix(lam=0.2))
    assert table["base"] == dump(FedMix(lam=0.2))
    assert build("objective", table) == made
    assert made.needs == FedMix.needs
    assert AugMix().base == Plain()
    assert AugMix(base=FedMix()).fallback() == AugMix()
    assert AugMix(base=FedLC(base=FedMix())).fallback() == AugMix(base=FedLC())
    assert FedLC(base=AugMix(base=FedMix(), lam=2)).fallback() == FedLC(base=AugMix(lam=2))


def test_another_base_replaces_the_presets() -> None:
    method = {"name": "fedmix+fed-augmix", "objective": {"base": {"name": "naivemix", "lambda": 0.2}}}
    assert resolve({**FILE, "method": method}).method.objective.base == NaiveMix(lam=0.2)


def test_the_presets_are_the_methods_with_the_divergence_on_their_loss() -> None:
    for name in presets.AUGMENTED:
        plain, ours = (presets.expand({"name": n}) for n in (name, f"{name}+fed-augmix"))
        assert ours["objective"] == {"name": "augmix", "base": plain["objective"]}
        assert ours["sharing"] == plain["sharing"]
