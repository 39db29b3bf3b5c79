"""Fed-AugMix's divergence on other objectives' losses: one composition of parts, which engines agree on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, examples, images, same, setup, weight_gradient
from hypothesis import given
from hypothesis import strategies as st
from test_augmix import CONTEXT, batch, net
from torch.nn import functional as F

from fedblend.core.engine import TrainTask
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, Objective, Plain, StepPlan
from fedblend.core.registry import build
from fedblend.core.sharing import gather
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.nets import EagerNet
from fedblend.experiment import presets
from fedblend.experiment.config import resolve
from fedblend.experiment.parts import dump
from fedblend.methods.augment.augmix import augmix
from fedblend.methods.objectives.augmix import AugMix
from fedblend.methods.objectives.calibrated import FedLC
from fedblend.methods.objectives.fedmix import FedMix, HiddenMix, LocalMix, NaiveMix

POOL = {
    "x": torch.from_numpy(np.random.default_rng(5).normal(size=(3, 1, 6, 6))),
    "y": torch.from_numpy(np.random.default_rng(6).dirichlet([1.0] * 3, 3)),
}
MIXED = Context(CONTEXT.task, CONTEXT.scale, POOL)
BASES = [NaiveMix(lam=0.3), FedMix(lam=0.3), LocalMix(), Plain()]


def row_of(objective: Objective, size: int = 4, seed: int = 0) -> dict[str, torch.Tensor]:
    drawn = objective.draw(np.random.default_rng(seed), StepPlan(np.array([size]), size, 0, entries=3))
    row = {name: torch.from_numpy(array)[0] for name, array in drawn.items()}
    return row | ({"lam": row["lam"].double()} if "lam" in row else {})  # as precise as the model here


def loss_of(objective: Objective, model: Any, given: Batch, row: dict[str, torch.Tensor]) -> torch.Tensor:
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
    model, given, row = net(), batch(), row_of(objective)

    value = loss_of(objective, model, given, row)

    own, divergence = loss_of(base, model, given, row), divergence_of(model, given, row)
    lam = 7.0 if scaling and own > threshold * divergence else 2.5
    assert value.item() == pytest.approx((own + lam * divergence).item(), rel=1e-6)
    expected = weight_gradient(own + lam * divergence, model)
    torch.testing.assert_close(weight_gradient(value, model), expected, rtol=1e-5, atol=1e-8)


@examples(20)
@given(st.floats(0, 1), st.integers(0, 10**6))
def test_lambda_is_chosen_by_the_bases_loss(threshold: float, seed: int) -> None:
    base = FedMix(lam=0.3)
    objective = AugMix(lam=0.0, threshold=100 * threshold, large_lambda=1.0, base=base)
    model, given, row = net(), batch(), row_of(objective, seed=seed)
    own, divergence = loss_of(base, model, given, row).item(), divergence_of(model, given, row).item()
    added = loss_of(objective, model, given, row).item() - own
    assert added == pytest.approx(divergence if own > 100 * threshold * divergence else 0.0, abs=1e-6)


def test_plain_as_a_base_asks_for_no_further_pass() -> None:
    passes = []

    class Counted(EagerNet):
        def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
            passes.append(len(x))
            return super().__call__(x, start, stop)

    for base in (Plain(), NaiveMix()):
        objective = AugMix(base=base)
        objective.loss(Counted(net()), batch(), row_of(objective), MIXED)

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


@each(
    ("base", "told"),
    [
        ("augmix", "'augmix' cannot be its own base"),
        ({"name": "fedlc", "base": "augmix"}, "'augmix' cannot be its own base"),
        ({"name": "fedlc", "base": {"name": "virtual-samples", "base": "fedrs"}}, "'fedrs' changes logits itself"),
        ("fedfa", "'fedfa' keeps a state from round to round, which 'augmix' does not pass on"),
        ({"name": "fedlc", "base": "fedfa"}, "'fedfa' keeps a state from round to round"),
        ("fedmyx", "unknown objective 'fedmyx'.*fedmix"),
        ({"name": "fedmix", "lambada": 1}, r"lambada: unknown key"),
        ({"name": "fedmix", "lambda": 2}, r"lambda: 2 is not valid"),
        ("fedmix", "'augmix' reads the model's inputs"),
    ],
)
def test_mistakes_name_the_base(base: Any, told: str) -> None:
    with pytest.raises(FedblendError, match=rf"^method\.(objective\.base|sharing).*{told}"):
        resolve({**FILE, "method": {"name": "fed-augmix", "objective": {"base": base}}})


ON_MEANS = {"name": "fed-augmix", "sharing": "means"}
AS_STORED = "reads raw samples; valid: raw"


@each(
    ("method", "told"),
    [
        (
            {"name": "statmix", "objective": {"name": "fedlc", "base": {"name": "statmix", "base": "fedmix"}}},
            "'fedmix' needs x, y, which clients do not share beside channel stat",
        ),
        ({**ON_MEANS, "objective": {"base": "global-mixup"}}, AS_STORED),
        ({**ON_MEANS, "objective": {"base": {"name": "fedlc", "base": "global-mixup"}}}, AS_STORED),
        (
            {"name": "fedmix-hidden", "objective": {"name": "augmix", "base": {"name": "hidden-mix", "layer": 3}}},
            r"method\.sharing\.layer: 2 and method\.objective\.layer: 3 differ",
        ),
    ],
)
def test_what_a_base_cannot_have_is_refused_below_another_base_too(method: Any, told: str) -> None:
    with pytest.raises(FedblendError, match=told):
        resolve({**FILE, "method": method})


def test_the_presets_are_the_methods_with_the_divergence_on_their_loss() -> None:
    for name in presets.AUGMENTED:
        plain, ours = (presets.expand({"name": n}) for n in (name, f"{name}+fed-augmix"))
        assert ours["objective"] == {"name": "augmix", "base": plain["objective"]}
        assert ours["sharing"] == plain["sharing"]
