"""Objectives through the engine, the proximal term, and the loss of each task."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from helpers import (
    examples,
    federation,
    images,
    loss_of,
    run,
    same,
    setup,
    tanh_net,
    weight_gradient,
)
from hypothesis import given
from hypothesis import strategies as st
from objectives_helpers import CLASSES, NUMBERS, draws, one_hot, train_all
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import Batch, Context, Net, Task
from fedblend.core.sharing import Pool
from fedblend.core.trees import Tensors
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.fedmix import FedMix
from fedblend.methods.objectives.terms import Proximal, representation


def test_fedmix_in_the_engine_takes_the_steps_of_its_formula() -> None:
    settings_ = {"cohort": 1, "epochs": 1, "batch_size": 40, "lr": 0.5}
    made = setup(groups=[range(20)], method={"name": "fedmix", "objective": {"lambda": 0.3}}, train=settings_)
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
        gradients = torch.autograd.grad(F.cross_entropy(model(fed.setup.scale(x)), y), list(model.parameters()))
        with torch.no_grad():
            for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
                p -= lr * (gradient + mu * (p - first.weights[name]))
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
