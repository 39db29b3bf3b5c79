"""What the papers' formulas imply for each objective, asserted exactly where it can be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from helpers import (
    engine_of,
    examples,
    federation,
    finite_differences,
    images,
    linear_net,
    loss_of,
    run,
    same,
    tanh_net,
    weight_gradient,
    world,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedblend.data.scale import OneHot
from fedblend.engines import Trained, TrainTask
from fedblend.engines.loop import EagerNet
from fedblend.models import LSTM, Staged
from fedblend.objectives import (
    Batch,
    Context,
    FedMix,
    GlobalMixup,
    HiddenMix,
    LocalMix,
    NaiveMix,
    Plain,
    Plan,
    Proximal,
    Task,
)
from fedblend.objectives.base import Net, Tensors
from fedblend.sharing import Pool
from fedblend.world import World

CLASSES = Task("classification", 3)
NUMBERS = Task("regression", 3)
TASKS = [CLASSES, NUMBERS]
TAYLORS = ["algorithm", "proposition"]


def draws(task: Task, n: int, seed: int, width: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    """Random inputs and targets in float64 (classes as indices)."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(n, width, generator=rng, dtype=torch.float64)
    if task.kind == "regression":
        return x, torch.randn(n, task.outputs, generator=rng, dtype=torch.float64)
    return x, torch.randint(task.outputs, (n,), generator=rng)


def one_hot(y: torch.Tensor) -> torch.Tensor:
    return F.one_hot(y, 3).double()


def mean_pool(task: Task, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    """One entry: the mean of raw samples."""
    targets = y if task.kind == "regression" else F.one_hot(y, task.outputs).double()
    return {"x": x.mean(0, keepdim=True), "y": targets.mean(0, keepdim=True)}


def random_pool(task: Task, entries: int = 1, seed: int = 5, width: int = 5) -> dict[str, torch.Tensor]:
    """Entries as other clients would send them, in float64."""
    pools = [mean_pool(task, *draws(task, 4, seed + i, width)) for i in range(entries)]
    return {name: torch.cat([p[name] for p in pools]) for name in ("x", "y")}


def global_mixup(
    model: nn.Module, task: Task, batch: Batch, x: torch.Tensor, y: torch.Tensor, lam: float
) -> torch.Tensor:
    """Equation 3 averaged over raw samples, with targets mixed inside one loss."""
    own = batch.y if task.kind == "regression" else F.one_hot(batch.y, task.outputs).double()
    other = y if task.kind == "regression" else F.one_hot(y, task.outputs).double()
    losses = [
        task.loss(model((1 - lam) * batch.x + lam * xj), (1 - lam) * own + lam * yj)
        for xj, yj in zip(x, other, strict=True)
    ]
    return torch.stack(losses).mean()


def distances(objective: FedMix, task: Task, measure: str, seed: int) -> list[float]:
    """How far FedMix is from the averaged Global Mixup, as lambda halves."""
    model = tanh_net(seed=seed)
    batch = Batch(*draws(task, 4, 10 + seed))
    x, y = draws(task, 6, 20 + seed)
    found = []
    for lam in (0.02, 0.01, 0.005, 0.0025):
        near = loss_of(objective, model, batch, task, lam, mean_pool(task, x, y))
        exact = global_mixup(model, task, batch, x, y, lam)
        if measure == "loss":
            found.append(abs(float(near.detach() - exact.detach())))
        else:
            found.append(float((weight_gradient(near, model) - weight_gradient(exact, model)).norm()))
    return found


def ratios(values: list[float]) -> list[float]:
    return [a / b for a, b in itertools.pairwise(values)]


# The squared loss differs from Global Mixup's by a constant in the weights, so only gradients compare.
MEASURES = [(CLASSES, "loss"), (CLASSES, "gradient"), (NUMBERS, "gradient")]


# FedMix: the approximation ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("taylor", TAYLORS)
@pytest.mark.parametrize(("task", "measure"), MEASURES)
def test_fedmix_is_second_order_near_global_mixup(task: Task, measure: str, taylor: str, seed: int) -> None:
    objective = FedMix(taylor=taylor)

    found = ratios(distances(objective, task, measure, seed))

    assert all(3.6 < ratio < 4.4 for ratio in found), found


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("mistake", ["no third term", "averaged twice", "half a third term"])
@pytest.mark.parametrize(("task", "measure"), MEASURES)
def test_order_drops_to_first_where_the_third_term_is_not_whole(
    task: Task, measure: str, mistake: str, seed: int
) -> None:
    changed = {
        "no third term": {"taylor_weight": 0.0},
        "averaged twice": {"average": "twice"},
        "half a third term": {"taylor_weight": 0.5},
    }

    found = ratios(distances(FedMix(**changed[mistake]), task, measure, seed))

    assert all(1.4 < ratio < 2.6 for ratio in found), found


@pytest.mark.parametrize("lam", [0.3, 0.7])
@pytest.mark.parametrize("taylor", TAYLORS)
@pytest.mark.parametrize("task", TASKS)
def test_fedmix_is_its_three_terms_at_the_shrunk_input(task: Task, taylor: str, lam: float) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task)
    z, x_g, y_g, h = (1 - lam) * batch.x, pool["x"][0], pool["y"][0], 1e-5

    value = loss_of(FedMix(taylor=taylor), model, batch, task, lam, pool)

    # The mean inner product is the slope of the mean loss at z when every input moves along x_g.
    slope = (task.loss(model(z + h * x_g), batch.y) - task.loss(model(z - h * x_g), batch.y)) / (2 * h)
    factor = lam * (1 - lam) if taylor == "algorithm" else lam
    expected = (1 - lam) * task.loss(model(z), batch.y) + lam * task.loss(model(z), y_g) + factor * slope
    assert value.item() == pytest.approx(expected.item(), abs=1e-9)


def test_third_term_of_a_linear_model_is_the_hand_formula() -> None:
    lam, model, batch, pool = 0.3, linear_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    z = (1 - lam) * batch.x

    with_term = loss_of(FedMix(), model, batch, CLASSES, lam, pool)
    without = loss_of(FedMix(), model, batch, CLASSES, lam, {**pool, "x": torch.zeros_like(pool["x"])})

    p = model(z).softmax(-1)
    by_input = (p - one_hot(batch.y)) @ model.weight
    expected = lam * (1 - lam) * sum(by_input[b] @ pool["x"][0] for b in range(4)) / 4
    assert (with_term - without).item() == pytest.approx(expected.item(), rel=1e-10)


@pytest.mark.parametrize("taylor", TAYLORS)
@pytest.mark.parametrize("weight", [0.0, 0.5, 2.0])
def test_taylor_weight_multiplies_the_third_term_alone(weight: float, taylor: str) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    still = {**pool, "x": torch.zeros_like(pool["x"])}

    whole, weighted = (
        loss_of(FedMix(taylor=taylor, taylor_weight=w), model, batch, CLASSES, 0.3, pool) for w in (1.0, weight)
    )
    without = loss_of(FedMix(), model, batch, CLASSES, 0.3, still)

    assert weighted.item() == pytest.approx((without + weight * (whole - without)).item(), rel=1e-12)


@pytest.mark.parametrize("taylor", TAYLORS)
@pytest.mark.parametrize("make", [linear_net, tanh_net])
@pytest.mark.parametrize("task", TASKS)
def test_fedmix_gradient_matches_finite_differences(task: Task, make: type, taylor: str) -> None:
    model, batch, pool = make(), Batch(*draws(task, 4, 1)), random_pool(task)

    def value() -> torch.Tensor:
        return loss_of(FedMix(taylor=taylor), model, batch, task, 0.3, pool)

    gradient = weight_gradient(value(), model)

    torch.testing.assert_close(gradient, finite_differences(value, model), rtol=1e-6, atol=1e-8)


def test_linear_softmax_gradient_is_the_hand_formula() -> None:
    lam, model, batch, pool = 0.3, linear_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    x_g, y_g = pool["x"][0], pool["y"][0]

    gradient = weight_gradient(loss_of(FedMix(), model, batch, CLASSES, lam, pool), model)

    by_weight, by_bias = torch.zeros(3, 5, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for x, y in zip(batch.x, one_hot(batch.y), strict=True):
        z = (1 - lam) * x
        p = model(z).softmax(-1).detach()
        error = (1 - lam) * (p - y) + lam * (p - y_g)
        # d <W^T (p - y), x_g> / dW = (p - y) x_g^T + J (W x_g) z^T with p's Jacobian J.
        turn = (torch.diag(p) - torch.outer(p, p)) @ (model.weight.detach() @ x_g)
        by_weight += torch.outer(error, z) + lam * (1 - lam) * (torch.outer(p - y, x_g) + torch.outer(turn, z))
        by_bias += error + lam * (1 - lam) * turn
    torch.testing.assert_close(gradient, torch.cat([by_weight.flatten(), by_bias]) / 4)


@pytest.mark.parametrize("task", TASKS)
def test_gradient_flows_through_the_input_derivative(task: Task) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task)
    still = {**pool, "x": torch.zeros_like(pool["x"])}

    def third() -> torch.Tensor:
        return loss_of(FedMix(), model, batch, task, 0.3, pool) - loss_of(FedMix(), model, batch, task, 0.3, still)

    gradient = weight_gradient(third(), model)

    assert gradient.norm() > 1e-3
    torch.testing.assert_close(gradient, finite_differences(third, model), rtol=1e-6, atol=1e-8)


# FedMix: exact properties ----------------------------------------------------------------------------------


@pytest.mark.parametrize("taylor", TAYLORS)
@pytest.mark.parametrize("average", ["sample", "twice"])
@examples(15)
@given(share=st.floats(0, 1), lam=st.floats(0, 1))
def test_fedmix_is_affine_in_the_entry(average: str, taylor: str, share: float, lam: float) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES, entries=2)
    middle = {name: (share * t[:1] + (1 - share) * t[1:]) for name, t in pool.items()}
    objective = FedMix(taylor=taylor, average=average)

    one, two = (loss_of(objective, model, batch, CLASSES, lam, pool, entry=i) for i in (0, 1))
    both = loss_of(objective, model, batch, CLASSES, lam, middle)

    assert both.item() == pytest.approx((share * one + (1 - share) * two).item(), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_fedmix_gradient_is_affine_in_the_entry(task: Task) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task, entries=2)
    middle = {name: t.mean(0, keepdim=True) for name, t in pool.items()}

    one, two = (weight_gradient(loss_of(FedMix(), model, batch, task, 0.2, pool, entry=i), model) for i in (0, 1))
    both = weight_gradient(loss_of(FedMix(), model, batch, task, 0.2, middle), model)

    torch.testing.assert_close(both, (one + two) / 2, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("times", [2, 5])
def test_duplicated_batch_leaves_loss_and_gradient_unchanged(task: Task, times: int) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task)
    copies = Batch(torch.cat([batch.x] * times), torch.cat([batch.y] * times))

    once, more = (loss_of(FedMix(), model, b, task, 0.2, pool) for b in (batch, copies))

    assert more.item() == pytest.approx(once.item(), rel=1e-12)
    torch.testing.assert_close(weight_gradient(more, model), weight_gradient(once, model), rtol=1e-11, atol=1e-13)


def test_averaging_twice_depends_on_the_batch_size() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    copies = Batch(torch.cat([batch.x] * 2), torch.cat([batch.y] * 2))
    twice, none = FedMix(average="twice"), {**pool, "x": torch.zeros_like(pool["x"])}

    third = [
        (loss_of(twice, model, b, CLASSES, 0.2, pool) - loss_of(twice, model, b, CLASSES, 0.2, none)).item()
        for b in (batch, copies)
    ]

    assert third[0] == pytest.approx(2 * third[1], rel=1e-9)


@pytest.mark.parametrize("objective", [FedMix(), FedMix(taylor="proposition"), FedMix(average="twice"), NaiveMix()])
@pytest.mark.parametrize("task", TASKS)
def test_lambda_0_is_fedavg(task: Task, objective: FedMix) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task)

    mixed = loss_of(objective, model, batch, task, 0.0, pool)
    plain = loss_of(Plain(), model, batch, task)

    assert mixed.item() == pytest.approx(plain.item(), rel=1e-14)
    torch.testing.assert_close(weight_gradient(mixed, model), weight_gradient(plain, model), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("task", TASKS)
def test_lambda_1_is_the_entrys_target_at_zero_input(task: Task) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(task, 4, 1)), random_pool(task)

    mixed = loss_of(FedMix(), model, batch, task, 1.0, pool)

    alone = task.loss(model(torch.zeros(1, 5, dtype=torch.float64)), pool["y"])
    assert mixed.item() == pytest.approx(alone.item(), rel=1e-14)
    torch.testing.assert_close(weight_gradient(mixed, model), weight_gradient(alone, model))


def test_naivemix_at_lambda_1_trains_on_the_entry_alone() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)

    mixed = loss_of(NaiveMix(), model, batch, CLASSES, 1.0, pool)

    assert mixed.item() == pytest.approx(CLASSES.loss(model(pool["x"]), pool["y"]).item(), rel=1e-14)


def test_the_drawn_entry_is_the_one_used() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES, entries=3)

    chosen = loss_of(FedMix(), model, batch, CLASSES, 0.2, pool, entry=2)
    alone = loss_of(FedMix(), model, batch, CLASSES, 0.2, {n: t[2:] for n, t in pool.items()})

    assert torch.equal(chosen, alone)
    assert not torch.equal(chosen, loss_of(FedMix(), model, batch, CLASSES, 0.2, pool, entry=0))


# One forward pass ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("objective", [FedMix(), NaiveMix(), Plain()])
def test_one_forward_pass_a_batch(objective: FedMix) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))

    value = loss_of(objective, model, batch, CLASSES, 0.2, pool)
    weight_gradient(value, model)

    assert len(calls) == 1


def test_one_dropout_mask_serves_all_three_terms() -> None:
    torch_state = torch.get_rng_state()
    first, last = tanh_net()[0], tanh_net()[2]
    batch, pool, lam = Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES), 0.3
    torch.manual_seed(3)
    mask = F.dropout(torch.ones(4, 7, dtype=torch.float64), 0.5)
    torch.manual_seed(3)

    value = loss_of(FedMix(), nn.Sequential(first, nn.Dropout(0.5), nn.Tanh(), last), batch, CLASSES, lam, pool)
    torch.set_rng_state(torch_state)

    z = ((1 - lam) * batch.x).requires_grad_()
    outputs = last(torch.tanh(first(z) * mask))
    own = CLASSES.loss(outputs, batch.y)
    (slope,) = torch.autograd.grad(own, z)
    third = lam * (1 - lam) * (slope * pool["x"]).sum()
    expected = (1 - lam) * own + lam * CLASSES.loss(outputs, pool["y"][0]) + third
    assert 0 < int((mask == 0).sum()) < mask.numel()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)


def test_weights_keep_no_gradient_of_their_own() -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)

    loss_of(FedMix(), model, batch, CLASSES, 0.2, pool)

    assert all(p.grad is None for p in model.parameters())
    assert not batch.x.requires_grad


# NaiveMix, LocalMix, Global Mixup --------------------------------------------------------------------------


@pytest.mark.parametrize("lam", [0.1, 0.5, 0.9])
def test_naivemix_is_mixed_label_cross_entropy_at_the_mixed_input(lam: float) -> None:
    model, batch, pool = tanh_net(), Batch(*draws(CLASSES, 4, 1)), random_pool(CLASSES)

    value = loss_of(NaiveMix(), model, batch, CLASSES, lam, pool)

    mixed_x = (1 - lam) * batch.x + lam * pool["x"]
    mixed_y = (1 - lam) * one_hot(batch.y) + lam * pool["y"]
    assert value.item() == pytest.approx(F.cross_entropy(model(mixed_x), mixed_y).item(), rel=1e-12)


@pytest.mark.parametrize("lam", [0.25, 1.0])
def test_localmix_mixes_inputs_and_labels_of_partners(lam: float) -> None:
    model, batch = tanh_net(), Batch(*draws(CLASSES, 4, 1))
    partner = torch.tensor([2, 0, 3, 1, 5])  # one place more than the (short) batch fills

    value = loss_of(LocalMix(), model, batch, CLASSES, lam, partner=partner)

    other = partner[:4]
    mixed_x = (1 - lam) * batch.x + lam * batch.x[other]
    mixed_y = (1 - lam) * one_hot(batch.y) + lam * one_hot(batch.y[other])
    assert value.item() == pytest.approx(F.cross_entropy(model(mixed_x), mixed_y).item(), rel=1e-12)


def test_localmix_mixes_numbers_as_weighted_squared_errors() -> None:
    model, batch, lam = tanh_net(), Batch(*draws(NUMBERS, 3, 1)), 0.25
    partner = torch.tensor([1, 2, 0])

    value = loss_of(LocalMix(), model, batch, NUMBERS, lam, partner=partner)

    outputs = model((1 - lam) * batch.x + lam * batch.x[partner])
    errors = [((outputs - y) ** 2).sum(1).mean() for y in (batch.y, batch.y[partner])]
    assert value.item() == pytest.approx(((1 - lam) * errors[0] + lam * errors[1]).item(), rel=1e-12)


def plan(sizes: list[int], round: int = 0, entries: int = 0, own: np.ndarray | None = None) -> Plan:
    return Plan(np.array(sizes, np.int64), max(sizes), round, own, entries)


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=8), seed=st.integers(0, 2**32))
@examples(60)
def test_localmix_partners_permute_each_batch(sizes: list[int], seed: int) -> None:
    drawn = LocalMix().draw(np.random.default_rng(seed), plan(sizes))

    assert drawn["partner"].shape == (len(sizes), max(sizes))
    for row, size in zip(drawn["partner"], sizes, strict=True):
        assert sorted(row[:size]) == list(range(size))


def test_localmix_partners_are_drawn_anew_and_uniformly() -> None:
    drawn = LocalMix().draw(np.random.default_rng(0), plan([4] * 4000))

    often = np.stack([np.bincount(column, minlength=4) for column in drawn["partner"].T]) / 4000
    assert np.abs(often - 0.25).max() < 0.03


@pytest.mark.parametrize("objective", [LocalMix(), GlobalMixup()])
def test_lambda_is_uniform_by_default_and_new_for_each_step(objective: LocalMix) -> None:
    drawn = objective.draw(np.random.default_rng(1), plan([2] * 20_000, entries=3))["lam"]

    gap = np.abs(np.sort(drawn) - (np.arange(20_000) + 0.5) / 20_000).max()
    assert drawn.shape == (20_000,)
    assert len(np.unique(drawn)) > 19_000
    assert gap < 0.0137  # Kolmogorov-Smirnov, 0.1 %


@pytest.mark.parametrize("part", [LocalMix, GlobalMixup])
def test_lambda_follows_beta_alpha(part: type) -> None:
    drawn = part(alpha=4).draw(np.random.default_rng(1), plan([2] * 20_000, entries=3))["lam"]

    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    assert drawn.var() == pytest.approx(1 / 36, rel=0.05)


@pytest.mark.parametrize("part", [LocalMix, GlobalMixup])
@pytest.mark.parametrize("lam", [0.0, 0.05, 1.0])
def test_lambda_can_be_fixed(part: type, lam: float) -> None:
    drawn = part(lam=lam).draw(np.random.default_rng(1), plan([2] * 9, entries=3))["lam"]

    assert np.array_equal(drawn, np.full(9, lam, np.float32))


def test_global_mixup_takes_raw_samples_and_scales_them() -> None:
    made = world(images(), method="global-mixup", unsafe=True, model={"name": "mlp", "hidden": []})
    data, net = made.data.train, EagerNet(made.model)
    batch = Batch(made.scale(data.x[:3]), data.y[:3])
    context = Context(made.task, made.scale, {"x": data.x, "y": data.y})
    partner = torch.tensor([7, 0, 30, 9])  # the last place is beyond the short batch

    value = GlobalMixup().loss(net, batch, {"lam": torch.tensor(0.3), "partner": partner}, context)

    other = made.scale(data.x[partner[:3]])
    mixed_y = 0.7 * F.one_hot(batch.y, 3) + 0.3 * F.one_hot(data.y[partner[:3]], 3)
    expected = F.cross_entropy(made.model(0.7 * batch.x + 0.3 * other), mixed_y)
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)


def test_global_mixup_draws_a_partner_for_every_sample_from_all_entries() -> None:
    drawn = GlobalMixup().draw(np.random.default_rng(0), plan([5] * 2000, entries=8))["partner"]

    often = np.bincount(drawn.ravel(), minlength=8) / drawn.size
    assert drawn.shape == (2000, 5)
    assert np.abs(often - 1 / 8).max() < 0.015
    assert any(len(set(row)) > 1 for row in drawn)


# What is drawn ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", [NaiveMix, FedMix, HiddenMix])
def test_entries_are_uniform_over_all_received(part: type) -> None:
    own = np.array([True, True, False, False, False])

    drawn = part().draw(np.random.default_rng(0), plan([2] * 10_000, entries=5, own=own))["entry"]

    assert drawn.shape == (10_000,)
    assert np.abs(np.bincount(drawn, minlength=5) / 10_000 - 0.2).max() < 0.02


@pytest.mark.parametrize("part", [NaiveMix, FedMix, HiddenMix, GlobalMixup])
@examples(30)
@given(own=st.lists(st.booleans(), min_size=2, max_size=8).filter(lambda o: not all(o)), seed=st.integers(0, 99))
def test_exclude_own_never_picks_own(part: type, own: list[bool], seed: int) -> None:
    mine = np.array(own)

    drawn = part(exclude_own=True).draw(np.random.default_rng(seed), plan([3] * 60, entries=len(own), own=mine))

    picked = drawn["partner" if part is GlobalMixup else "entry"]
    assert not mine[picked].any()
    assert picked.min() >= 0
    assert picked.max() < len(own)


def test_exclude_own_covers_all_others() -> None:
    own = np.array([False, True, False, True, False])

    drawn = FedMix(exclude_own=True).draw(np.random.default_rng(0), plan([1] * 300, entries=5, own=own))["entry"]

    assert set(drawn) == {0, 2, 4}


@pytest.mark.parametrize("part", [NaiveMix, FedMix, HiddenMix, GlobalMixup])
def test_a_client_that_alone_has_shared_mixes_with_its_own_only_if_it_may(part: type) -> None:
    alone = plan([2] * 50, entries=2, own=np.array([True, True]))

    may, may_not = (part(exclude_own=own).draw(np.random.default_rng(0), alone)["lam"] for own in (False, True))

    assert (may > 0).all()
    assert (may_not == 0).all()
    assert may_not.dtype == may.dtype


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_mixed_share_of_the_batches_are_mixed(share: float) -> None:
    drawn = FedMix(lam=0.2, mixed_share=share).draw(np.random.default_rng(0), plan([1] * 10_000, entries=2))["lam"]

    mixed = drawn != 0
    assert mixed.mean() == pytest.approx(share, abs=0.02)
    assert np.all(drawn[mixed] == np.float32(0.2))


@pytest.mark.parametrize(("round", "part"), [(0, 1 / 4), (1, 2 / 4), (2, 3 / 4), (3, 1), (50, 1)])
def test_lambda_rises_linearly_over_the_warmup(round: int, part: float) -> None:
    drawn = NaiveMix(lam=0.4, warmup=3).draw(np.random.default_rng(0), plan([1] * 5, round, entries=2))["lam"]

    assert drawn == pytest.approx(np.full(5, 0.4 * part), rel=1e-6)


def test_without_warmup_lambda_is_full_at_once() -> None:
    drawn = FedMix(lam=0.4).draw(np.random.default_rng(0), plan([1] * 5, entries=2))["lam"]

    assert np.array_equal(drawn, np.full(5, 0.4, np.float32))


# Through the engine ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedmix", "naivemix"])
@pytest.mark.parametrize("off", [{"lambda": 0.0}, {"mixed_share": 0.0}])
def test_an_objective_that_mixes_nothing_trains_as_fedavg(method: str, off: dict[str, float]) -> None:
    fed = federation(method={"name": method, "objective": off})

    state, _ = run(fed, 2)
    plain, _ = run(federation(), 2)

    for name, tensor in plain.weights.items():
        torch.testing.assert_close(state.weights[name], tensor, rtol=1e-5, atol=1e-7)


def test_fedmix_in_the_engine_takes_the_steps_of_its_formula() -> None:
    settings_ = {"cohort": 1, "epochs": 1, "batch_size": 40, "lr": 0.5}
    made = world(groups=[range(20)], method={"name": "fedmix", "objective": {"lambda": 0.3}}, train=settings_)
    x_g = made.scale(made.data.train.x[20:40]).mean(0, keepdim=True)
    pool = Pool({"x": x_g, "y": torch.full((1, 3), 1 / 3)}, np.array([7]))
    before = made.weights()

    trained = next(iter(train_all(made, pool)))

    made.model.load_state_dict(before)
    x, y = made.samples(0, 20)
    batch = Batch(made.scale(x), y)
    loss = loss_of(FedMix(), made.model, batch, made.task, 0.3, pool.tensors)
    gradients = torch.autograd.grad(loss, list(made.model.parameters()))
    for (name, start), gradient in zip(made.model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(trained.weights[name], start.detach() - 0.5 * gradient, rtol=1e-5, atol=1e-6)
    assert trained.loss == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("method", ["fedmix", "naivemix"])
def test_a_lone_client_that_excludes_its_own_trains_as_fedavg(method: str) -> None:
    groups, train = [range(20)], {"cohort": 1}
    fed = federation(groups=groups, train=train, method={"name": method, "objective": {"exclude_own": True}})

    state, _ = run(fed, 2)
    plain, _ = run(federation(groups=groups, train=train), 2)

    for name, tensor in plain.weights.items():
        torch.testing.assert_close(state.weights[name], tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["fedmix", "naivemix"])
def test_the_engine_tells_a_client_its_own_entries(method: str) -> None:
    made = world(groups=[range(20)], method={"name": method, "objective": {"exclude_own": True}})
    own, other = torch.full((3, 1, 4, 4), torch.nan), torch.rand(1, 1, 4, 4)
    pool = Pool({"x": torch.cat([own, other]), "y": torch.full((4, 3), 1 / 3)}, np.array([0, 0, 0, 7]))

    trained = next(iter(train_all(made, pool)))

    assert all(bool(t.isfinite().all()) for t in trained.weights.values())


def train_all(made: World, pool: Pool | None) -> Iterable[Trained]:
    """Train all clients of a world for one round from its first weights."""
    task = TrainTask(0, made.weights(), pool, made.sizes(0))
    return engine_of(made).train(task, range(len(made.population)))


# Hidden states (appendix E) --------------------------------------------------------------------------------


def staged() -> Staged:
    first, last = tanh_net(5, 7, 3, seed=0), tanh_net(7, 6, 3, seed=1)
    return Staged(nn.Sequential(first[0], nn.Tanh()), last[0], nn.Sequential(nn.Tanh(), last[2]))


def hidden_mix(
    form: str, model: Staged, batch: Batch, pool: dict[str, torch.Tensor], layer: int
) -> tuple[torch.Tensor, ...]:
    """The losses of the objective's phases."""
    context = Context(CLASSES, lambda x: x, pool)
    row = {"lam": torch.tensor(0.3, dtype=torch.float64), "entry": torch.tensor(0)}
    phases = HiddenMix(layer=layer, form=form).phases()
    return tuple(phase(EagerNet(model), batch, row, context) for phase in phases)


@pytest.mark.parametrize("form", ["fedmix", "naivemix"])
@pytest.mark.parametrize("layer", [1, 2])
def test_hidden_mixing_gives_no_gradient_before_its_layer(form: str, layer: int) -> None:
    model, batch = staged(), Batch(*draws(CLASSES, 4, 1))
    pool = random_pool(CLASSES, width=7 if layer == 1 else 6)

    mixing, plain = hidden_mix(form, model, batch, pool, layer)

    for number, stage in enumerate(model.stages):
        parameters = list(stage.parameters())
        touched = torch.autograd.grad(mixing, parameters, retain_graph=True, allow_unused=True)
        assert all((g is None) == (number < layer) for g in touched)
        assert all(g.norm() > 0 for g in torch.autograd.grad(plain, parameters, retain_graph=True))


@pytest.mark.parametrize(("form", "objective"), [("fedmix", FedMix()), ("naivemix", NaiveMix())])
@pytest.mark.parametrize("layer", [1, 2])
def test_hidden_mixing_is_the_input_form_on_the_tail(form: str, objective: FedMix, layer: int) -> None:
    model, batch = staged(), Batch(*draws(CLASSES, 4, 1))
    pool = random_pool(CLASSES, width=7 if layer == 1 else 6)
    head, tail = nn.Sequential(*model.stages[:layer]), nn.Sequential(*model.stages[layer:])

    mixing, plain = hidden_mix(form, model, batch, pool, layer)

    by_hand = loss_of(objective, tail, Batch(head(batch.x).detach(), batch.y), CLASSES, 0.3, pool)
    assert mixing.item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert plain.item() == pytest.approx(CLASSES.loss(model(batch.x), batch.y).item(), rel=1e-12)
    torch.testing.assert_close(weight_gradient(mixing, tail), weight_gradient(by_hand, tail))


def test_hidden_mixing_steps_on_the_tail_and_then_on_all() -> None:
    method = {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 1, "lambda": 0.3}}
    settings_ = {"cohort": 1, "batch_size": 40, "lr": 0.5}
    made = world(groups=[range(20)], method=method, train=settings_)
    pool = Pool({"x": torch.rand(1, 6), "y": torch.full((1, 3), 1 / 3)}, np.array([7]))
    before = made.weights()

    trained = next(iter(train_all(made, pool)))

    made.model.load_state_dict(before)
    head, tail = made.model.stages[0], made.model.stages[1]
    x, y = made.samples(0, 20)
    batch = Batch(made.scale(x), y)
    hidden = Batch(head(batch.x).detach(), y)
    for model, loss in (
        (tail, lambda: loss_of(FedMix(), tail, hidden, made.task, 0.3, pool.tensors)),
        (made.model, lambda: made.task.loss(made.model(batch.x), y)),
    ):
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.5 * gradient
    for name, parameter in made.model.named_parameters():
        torch.testing.assert_close(trained.weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


# The proximal term -----------------------------------------------------------------------------------------


@given(mu=st.floats(0, 10))
@examples(10)
def test_proximal_gradient_is_mu_times_the_distance(mu: float) -> None:
    model, start = tanh_net(seed=0), dict(tanh_net(seed=1).named_parameters())
    context = Context(CLASSES, lambda x: x, start={n: p.detach() for n, p in start.items()})
    batch = Batch(*draws(CLASSES, 2, 0))

    value = Proximal(mu=mu).loss(dict(model.named_parameters()), EagerNet(model), batch, context)

    apart = torch.cat([(p - start[n]).detach().flatten() for n, p in model.named_parameters()])
    assert value.item() == pytest.approx(mu / 2 * apart.square().sum().item(), rel=1e-12)
    torch.testing.assert_close(weight_gradient(value, model), mu * apart)


def test_proximal_term_is_measured_from_the_rounds_global_weights() -> None:
    mu, lr = 2.0, 0.1
    alone = {"cohort": 1, "epochs": 2, "batch_size": 40, "lr": lr, "lr_decay": 1.0}
    fed = federation(groups=[range(20)], method={"terms": [{"name": "proximal", "mu": mu}]}, train=alone)

    first, _ = run(fed, 1)
    second, _ = run(fed, 1, first)

    model, (x, y) = fed.world.model, fed.world.samples(0, 20)
    model.load_state_dict(first.weights)
    for _ in range(2):
        gradients = torch.autograd.grad(F.cross_entropy(model(fed.world.scale(x)), y), list(model.parameters()))
        with torch.no_grad():
            for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
                p -= lr * (gradient + mu * (p - first.weights[name]))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(second.weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_proximal_term_with_another_loss_is_differentiated() -> None:
    class Absolute(Proximal):
        def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
            return self.mu * torch.stack([(p - context.start[n]).abs().sum() for n, p in params.items()]).sum()

    assert (Proximal(mu=3.0).pull, Absolute(mu=3.0).pull) == (3.0, 0.0)


def test_proximal_term_of_weight_0_changes_nothing() -> None:
    with_term = federation(method={"terms": [{"name": "proximal", "mu": 0.0}]}, train={"epochs": 2})

    state, _ = run(with_term, 1)
    plain, _ = run(federation(train={"epochs": 2}), 1)

    assert same(state.weights, plain.weights)


# Text ------------------------------------------------------------------------------------------------------


def text_model(seed: int = 0) -> Staged:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LSTM(embedding=4, hidden=5, layers=2).build((6, 9), 9).double()


def test_mean_of_one_hots_times_the_embedding_is_the_mean_of_embeddings() -> None:
    codes = torch.randint(9, (20, 6), generator=torch.Generator().manual_seed(0))
    embedding = text_model().stages[0].weight

    of_means = OneHot(9)(codes).double().mean(0) @ embedding

    torch.testing.assert_close(of_means, F.embedding(codes, embedding).mean(0))


@pytest.mark.parametrize("objective", [FedMix(), FedMix(taylor="proposition"), NaiveMix()])
def test_mixing_one_hots_is_mixing_embeddings(objective: FedMix) -> None:
    rng, scale, task = torch.Generator().manual_seed(0), OneHot(9), Task("classification", 9)
    model = text_model()
    embedding, rest = model.stages[0].weight.detach(), nn.Sequential(*model.stages[1:])
    codes, others = torch.randint(9, (4, 6), generator=rng), torch.randint(9, (8, 6), generator=rng)
    y, y_g = torch.randint(9, (4,), generator=rng), torch.full((1, 9), 1 / 9, dtype=torch.float64)

    of_one_hots = {"x": scale(others).double().mean(0, keepdim=True), "y": y_g}
    of_embeddings = {"x": embedding[others].mean(0, keepdim=True), "y": y_g}
    on_one_hots = loss_of(objective, model, Batch(scale(codes).double(), y), task, 0.2, of_one_hots)
    on_embeddings = loss_of(objective, rest, Batch(embedding[codes], y), task, 0.2, of_embeddings)

    assert on_one_hots.item() == pytest.approx(on_embeddings.item(), rel=1e-12)
    torch.testing.assert_close(weight_gradient(on_one_hots, rest), weight_gradient(on_embeddings, rest))


def test_fedmix_gradient_of_the_lstm_matches_finite_differences() -> None:
    rng, scale, task = torch.Generator().manual_seed(0), OneHot(9), Task("classification", 9)
    model = text_model()
    codes, y = torch.randint(9, (3, 6), generator=rng), torch.randint(9, (3,), generator=rng)
    batch, x_g = Batch(scale(codes).double(), y), torch.rand(1, 6, 9, generator=rng, dtype=torch.float64)
    pool = {"x": x_g, "y": torch.full((1, 9), 1 / 9, dtype=torch.float64)}

    def value() -> torch.Tensor:
        return loss_of(FedMix(), model, batch, task, 0.3, pool)

    gradient = weight_gradient(value(), model)

    torch.testing.assert_close(gradient, finite_differences(value, model), rtol=1e-5, atol=1e-8)


# The task --------------------------------------------------------------------------------------------------


def test_cross_entropy_takes_indices_a_shared_distribution_or_one_a_sample() -> None:
    outputs, y = draws(CLASSES, 6, 0, width=3)
    vectors, shared = one_hot(y), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)

    by_index, by_row, by_shared = (CLASSES.loss(outputs, t).item() for t in (y, vectors, shared))

    assert by_index == pytest.approx(F.cross_entropy(outputs, y).item(), rel=1e-12)
    assert by_row == pytest.approx(by_index, rel=1e-12)
    assert by_shared == pytest.approx(F.cross_entropy(outputs, shared.expand(6, 3)).item(), rel=1e-12)


def test_squared_error_is_summed_over_outputs_and_averaged_over_samples() -> None:
    outputs, y = torch.tensor([[1.0, 2.0], [3.0, 5.0]]), torch.tensor([[0.0, 0.0], [1.0, 1.0]])

    value = Task("regression", 2).loss(outputs, y)

    assert value.item() == ((1 + 4) + (4 + 16)) / 2


def test_targets_are_encoded_as_vectors() -> None:
    classes, values = torch.tensor([2, 0]), torch.tensor([[1.5, 2.0, 3.0]])

    assert CLASSES.encode(classes).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert torch.equal(NUMBERS.encode(values), values)
