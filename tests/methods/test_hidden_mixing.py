"""Mixing hidden states (FedMix, appendix E) and embeddings of text."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import federation, loss_of, run, setup, tanh_net, weight_gradient
from objectives_helpers import CLASSES, draws, random_pool, train_all
from torch import nn

from fedblend.core.context import Batch, Context, Task
from fedblend.core.sharing import Pool
from fedblend.data.scale import OneHot
from fedblend.engines.nets import EagerNet
from fedblend.methods.objectives.fedmix import FedMix, HiddenMix, NaiveMix
from fedblend.models.layers import Staged
from fedblend.models.lstm import LSTM


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


def test_hidden_mixing_steps_on_the_tail_and_then_on_all() -> None:
    method = {"name": "fedmix-hidden", "sharing": {"layer": 1}, "objective": {"layer": 1, "lambda": 0.3}}
    settings_ = {"cohort": 1, "batch_size": 40, "lr": 0.5}
    made = setup(groups=[range(20)], method=method, train=settings_)
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
