"""Frozen tensors: which they are, that nothing moves them, and that they do not travel."""

from __future__ import annotations

from typing import Any

import torch
from helpers import each, federation, federation_of, images, run, same, setup
from own_models import Backbone, Dense
from torch import nn

from fedblend.core.loop import RoundLoop
from fedblend.core.module import evaluating, frozen_names, train_mode
from fedblend.core.trees import bytes_of
from fedblend.engines.autotune import unstackable
from fedblend.engines.stacked.engine import StackedEngine

BACKBONE: dict[str, Any] = {"model": {"name": "module", "path": "own_models:Backbone"}}
TRAVELS = {"norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "head.weight", "head.bias"}


class Lora(nn.Module):
    """A frozen layer with a trained one beside it, as adapters are added: its batch norm is frozen all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).requires_grad_(False)
        self.base.add_module("adapter", nn.Linear(3, 3))
        self.base.register_buffer("seen", torch.zeros(1))


def test_buffers_are_frozen_with_their_innermost_layer_that_has_parameters() -> None:
    assert Backbone().state_dict().keys() - frozen_names(Backbone()) == TRAVELS
    base = frozen_names(Lora())
    assert {"base.1.running_mean", "base.0.weight"} < base
    assert not {"base.seen", "base.adapter.weight"} & base  # "base" trains in part
    assert frozen_names(nn.Sequential(nn.BatchNorm1d(2, affine=False), nn.Linear(2, 2))) == set()


def test_frozen_batch_norms_evaluate_in_training_and_dropout_drops() -> None:
    model = train_mode(Backbone())
    modes = {name: layer.training for name, layer in model.named_modules()}
    assert [name for name, training in modes.items() if not training] == ["body", "body.2", "body.3"]
    assert modes["body.4"]
    with evaluating(model):
        assert not any(layer.training for layer in model.modules())
    assert {name: layer.training for name, layer in model.named_modules()} == modes


@each("method", ["fedavg", "scaffold", "moon", "ditto", "fedadam"])
def test_nothing_moves_frozen_tensors(method: str) -> None:
    holdout = {"holdout": 0.2} if method == "ditto" else {}
    fed = federation(images(side=8), method=method, **BACKBONE, **holdout)
    state, records = run(fed, 2)
    first = fed.setup.weights()
    moved = {name for name, tensor in state.weights.items() if not torch.equal(tensor, first[name])}
    assert moved == TRAVELS
    one_model = bytes_of({name: first[name] for name in TRAVELS})
    assert records[0]["bytes_down"]["weights"] == records[0]["bytes_up"]["weights"] == one_model * records[0]["uploads"]


def test_a_layer_with_frozen_weights_gives_what_it_gave_when_it_was_frozen() -> None:
    fed = federation(images(side=8), **BACKBONE)
    state, _ = run(fed, 2)
    x, model = torch.rand(5, 1, 8, 8), Backbone()
    model.load_state_dict(state.weights)
    own = Backbone()
    own.load_state_dict(fed.setup.weights())
    assert torch.equal(model.eval().body(x), own.eval().body(x))


class NormedBody(Dense):
    """Its first layer is frozen, and a frozen batch norm with statistics of its own follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6).requires_grad_(False)
        self.norm.running_mean.copy_(torch.linspace(-1, 1, 6))
        self.first.requires_grad_(False)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x).tanh()


def test_clients_of_a_frozen_batch_norm_are_stacked_as_in_the_loop() -> None:
    made = setup(images(side=8), model={"name": "module", "path": "test_module:NormedBody"})
    assert unstackable(made) == ""
    loop, _ = run(federation_of(made), 2)
    stacked, _ = run(RoundLoop(made, StackedEngine(made)), 2)
    for name, tensor in loop.weights.items():
        torch.testing.assert_close(stacked.weights[name], tensor, rtol=1e-5, atol=1e-6)
    assert same({n: stacked.weights[n] for n in made.frozen}, {n: made.weights()[n] for n in made.frozen})
    trained = setup(images(side=8), model={"name": "module", "path": "own_models:Backbone"})
    assert "'norm' is a batch norm with running statistics" in unstackable(trained)
