"""Objectives through the engine, the proximal term, the loss of each task, and mixing of inputs and hidden states."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, examples, federation, images, loss_of, run, same, setup, tanh_net, weight_gradient
from hypothesis import given
from hypothesis import strategies as st
from objectives_helpers import CLASSES, NUMBERS, draws, one_hot, random_pool, step_of_sgd, train_all
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import Batch, Context, Net, StepPlan, Task
from fedblend.core.sharing import Pool
from fedblend.core.trees import Tensors
from fedblend.data.scale import OneHot
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.fedmix import FedMix, GlobalMixup, HiddenMix, LocalMix, NaiveMix
from fedblend.methods.objectives.terms import Proximal, representation
from fedblend.models.layers import Staged
from fedblend.models.lstm import LSTM

ON_HIDDEN = {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 1, "lambda": 0.3}}


@pytest.mark.parametrize("method", [{"name": "fedmix", "objective": {"lambda": 0.3}}, ON_HIDDEN])
def test_the_engine_takes_the_steps_of_fedmixs_formula(method: dict[str, Any]) -> None:
    """On hidden states it steps on the layers above them, and then on all."""
    made = setup(groups=[range(20)], method=method, train={"cohort": 1, "batch_size": 40, "lr": 0.5})
    x_g = torch.rand(1, 6) if method is ON_HIDDEN else made.scale(made.data.train.x[20:40]).mean(0, keepdim=True)
    pool = Pool({"x": x_g, "y": torch.full((1, 3), 1 / 3)}, np.array([7]))
    before, model = made.weights(), made.model

    trained = next(iter(train_all(made, pool)))

    model.load_state_dict(before)
    x, y = made.samples(0, 20)
    x, above = made.scale(x), model
    mixed = Batch(x, y)
    if method is ON_HIDDEN:
        head, above = model.stages
        mixed = Batch(head(x).detach(), y)
    loss = loss_of(FedMix(), above, mixed, made.task, 0.3, pool.tensors)
    step_of_sgd(above, loss, 0.5)
    if method is ON_HIDDEN:
        step_of_sgd(model, made.task.loss(model(x), y), 0.5)
    else:
        assert trained.loss == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(trained.weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["fedmix", "naivemix"])
def test_the_engine_tells_a_client_its_own_entries(method: str) -> None:
    made = setup(groups=[range(20)], method={"name": method, "objective": {"exclude_own": True}})
    own, other = torch.full((3, 1, 4, 4), torch.nan), torch.rand(1, 1, 4, 4)
    pool = Pool({"x": torch.cat([own, other]), "y": torch.full((4, 3), 1 / 3)}, np.array([0, 0, 0, 7]))
    trained = next(iter(train_all(made, pool)))
    assert all(bool(t.isfinite().all()) for t in trained.weights.values())


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

    model, (x, y) = fed.setup.model, fed.setup.samples(0, 20)
    model.load_state_dict(first.weights)
    for _ in range(2):
        away = sum((p - first.weights[name]).square().sum() for name, p in model.named_parameters())
        step_of_sgd(model, F.cross_entropy(model(fed.setup.scale(x)), y) + mu / 2 * away, lr)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(second.weights[name], parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_proximal_term_with_another_loss_is_differentiated() -> None:
    class Absolute(Proximal):
        def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
            return self.mu * torch.stack([(p - context.start[n]).abs().sum() for n, p in params.items()]).sum()

    assert (Proximal(mu=3.0).proximal_mu, Absolute(mu=3.0).proximal_mu) == (3.0, 0.0)


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


def test_a_model_that_does_not_train_is_as_in_a_test() -> None:
    net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5)).train()
    x = torch.randn(6, 4)
    received = {name: tensor.clone() + 1 for name, tensor in net.state_dict().items()}
    tested = copy.deepcopy(net).eval()
    tested.load_state_dict(received)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}

    fixed = EagerNet(net).with_weights(received, training=False)(x)

    assert torch.equal(fixed, tested(x))
    assert net.training
    assert net[2].training
    assert same(net.state_dict(), before)


@pytest.mark.parametrize("method", ["moon", "fedntd", "flea"])
def test_the_models_that_a_method_compares_with_do_not_train(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    with_weights = EagerNet.with_weights
    monkeypatch.setattr(
        EagerNet,
        "with_weights",
        lambda self, weights, training=True: called.append(training) or with_weights(self, weights, training),
    )
    run(federation(method=method, model={"name": "mlp", "hidden": [5]}), 2)
    assert called
    assert not any(called)


@pytest.mark.parametrize(
    "model", [{"name": "resnet18", "width": 4}, {"name": "lenet5"}, {"name": "mlp", "hidden": [6, 5]}]
)
def test_a_representation_is_what_the_last_layer_takes(model: dict[str, Any]) -> None:
    made = setup(images(side=28), model=model)
    taken: list[torch.Tensor] = []
    last = [layer for layer in made.model.modules() if isinstance(layer, nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0]))
    made.model.eval()
    x = made.scale(made.samples(0, 4)[0])

    z = representation(EagerNet(made.model), x)
    made.model(x)

    assert torch.equal(z, taken[-1])


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


def plan(sizes: list[int], round: int = 0, entries: int = 0, own: np.ndarray | None = None) -> StepPlan:
    return StepPlan(np.array(sizes, np.int64), max(sizes), round, own, entries)


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


@each("part", [LocalMix, GlobalMixup])
@each("lam", [0.0, 0.05, 1.0])
def test_lambda_can_be_fixed(part: type, lam: float) -> None:
    drawn = part(lam=lam).draw(np.random.default_rng(1), plan([2] * 9, entries=3))["lam"]
    assert np.array_equal(drawn, np.full(9, lam, np.float32))


def test_global_mixup_takes_raw_samples_and_scales_them() -> None:
    made = setup(images(), method="global-mixup", unsafe=True, model={"name": "mlp", "hidden": []})
    data, net = made.data.train, EagerNet(made.model)
    batch = Batch(made.scale(data.x[:3]), data.y[:3])
    context = Context(made.task, made.scale, {"x": data.x, "y": data.y}, pool_stored=True)
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


@each(("round", "part"), [(0, 1 / 4), (1, 2 / 4), (2, 3 / 4), (3, 1), (50, 1)])
def test_lambda_rises_linearly_over_the_warmup(round: int, part: float) -> None:
    drawn = NaiveMix(lam=0.4, warmup=3).draw(np.random.default_rng(0), plan([1] * 5, round, entries=2))["lam"]
    assert drawn == pytest.approx(np.full(5, 0.4 * part), rel=1e-6)


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


def text_model(seed: int = 0) -> Staged:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LSTM(embedding=4, hidden=5, layers=2).build((6, 9), 9).double()


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


def test_hidden_states_can_mix_each_sample_with_an_entry_of_its_own() -> None:
    method = {"name": "fedmix-hidden", "objective": {"entries": "sample"}}
    fed = federation(method=method, model={"name": "mlp", "hidden": [8, 6]})
    state, _ = run(fed, 1)
    assert all(tensor.isfinite().all() for tensor in state.weights.values())
