"""The papers' networks in every engine."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from cli_helpers import here, succeeded
from helpers import each, images, run, setup, slow_after_first, slow_except
from models_helpers import SMALL, Spec, built, samples, small
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedblend.core import registry
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.setup import Setup
from fedblend.engines.autotune import unstackable
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.experiment.options import kind_entries

NORMED = ("cnn", "cnn1d", "vgg16", "convnet", "resnet18", "resnet50")


LEAST: dict[str, tuple[int, ...]] = {
    "cnn": (1, 4, 4),
    "cnn1d": (1, 4),
    "mix2fld-cnn": (1, 2, 2),
    "xormixfl-cnn": (1, 10, 10),
    "vgg16": (1, 32, 32),
    "convnet": (1, 9, 9),
    "resnet18": (1, 8, 8),
    "resnet50": (1, 8, 8),
}
"""The smallest inputs that each takes."""


@each("name", NORMED)
def test_norms_follow_every_convolution_or_none(name: str) -> None:
    spec, shape = SMALL[name]
    kinds = {"group": nn.GroupNorm, "batch": nn.BatchNorm1d if name == "cnn1d" else nn.BatchNorm2d}
    x = samples(shape, 4)
    for choice in ("group", "batch", "none"):
        model = built({**spec, "norm": choice}, shape)
        layers = list(model.modules())
        convolutions = [m for m in layers if isinstance(m, (nn.Conv1d, nn.Conv2d))]
        norms = [m for m in layers if isinstance(m, (nn.GroupNorm, nn.modules.batchnorm._BatchNorm))]

        assert len(norms) == (0 if choice == "none" else len(convolutions))
        assert all(type(m) is kinds[choice] for m in norms)
        assert all(m.num_groups == 4 for m in norms if isinstance(m, nn.GroupNorm))
        # Only batch norm depends on other samples.
        assert ((model(x)[:2] - model(x[:2])).abs().max() > 1e-4) == (choice == "batch")


@each("name", NORMED)
def test_groups_that_do_not_divide_the_channels_are_refused(name: str) -> None:
    spec, shape = SMALL[name]
    told = f"model.groups: 3 does not divide the 4 channels .*'{name}'; valid: 1, 2, 4$"
    with pytest.raises(FedblendError, match=told):
        registry.build("model", {**spec, "norm": "group", "groups": 3}).build(shape, 3)


@each(("name", "least"), LEAST.items())
def test_inputs_too_small_or_of_another_rank_are_errors(name: str, least: tuple[int, ...]) -> None:
    spec, _ = SMALL[name]
    side = least[-1]
    wrong = [(5,), (*least[:-1], side - 1), (1, 2, 3, 64, 64), (64, 64) if len(least) == 3 else (3, 64, 64)]
    needed = f"{side}x{side} pixels" if len(least) == 3 else f"{side} time steps"

    assert built(spec, least)(samples(least)).shape == (3, 3)
    for shape in wrong:
        with pytest.raises(FedblendError) as caught:
            registry.build("model", spec).build(shape, 3)
        message = str(caught.value)
        assert message.startswith(f"model.name: '{name}' takes ")
        assert all(word in message for word in (needed, str(list(shape)), "'mlp'"))


def test_five_by_five_kernels_of_xormixfl_need_sixteen_pixels() -> None:
    part = registry.build("model", {"name": "xormixfl-cnn", "channels": 2, "kernel": 5, "hidden": []})

    assert part.build((1, 16, 16), 3)(torch.zeros(1, 1, 16, 16)).shape == (1, 3)
    with pytest.raises(FedblendError, match="at least 16x16 pixels"):
        part.build((1, 16, 15), 3)


@small
@pytest.mark.parametrize("training", slow_after_first([True, False]))
def test_stacked_gradients_equal_single_gradients(spec: Spec, shape: tuple[int, ...], training: bool) -> None:
    model = built(spec, shape).train(training)
    draw = torch.Generator().manual_seed(2)
    stacked = {
        name: torch.stack([p + 0.1 * torch.randn(p.shape, generator=draw, dtype=p.dtype) for _ in range(2)])
        for name, p in model.named_parameters()
    }
    x, y = torch.stack([samples(shape, seed=k) for k in range(2)]), torch.tensor([[0, 1, 2], [2, 2, 0]])

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (x,)), y)

    together = vmap(grad(loss))({name: p.detach() for name, p in stacked.items()}, x, y)

    for k in range(2):
        alone = copy.deepcopy(model)
        alone.load_state_dict({name: p[k].detach() for name, p in stacked.items()})
        gradients = torch.autograd.grad(F.cross_entropy(alone(x[k]), y[k]), list(alone.parameters()))
        for (name, _), gradient in zip(alone.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(together[name][k], gradient, rtol=1e-7, atol=1e-9)


def windows(channels: int, time: int) -> Dataset:
    """Random windows of signals whose class shows in their mean."""
    rng = np.random.default_rng(0)
    halves = []
    for count in (16, 6):
        y = np.arange(count) % 3
        x = rng.standard_normal((count, channels, time)) + y[:, None, None]
        halves.append(Samples(torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)))
    return Dataset("windows", "features", *halves, tuple("abc"))


def small_world(name: str, method: str = "fedavg", **changes: Any) -> Setup:
    """Two clients of eight samples, batches of four, on data that the network can take."""
    spec, shape = SMALL[name]
    data = windows(*shape) if len(shape) == 2 else images(n=16, side=max(shape[1:]), test=6)
    train = {"cohort": 2, "batch_size": 4, "lr": 0.05}
    partition = {"name": "iid", "clients": 2}
    return setup(data, partition=partition, model=spec, method=method, unsafe=True, train=train, **changes)


@pytest.mark.parametrize("name", slow_except([name for name in SMALL if not name.startswith("resnet")], SMALL))
def test_every_network_trains_in_a_federation(name: str) -> None:
    made = small_world(name)
    before = made.weights()

    state, (record,) = run(RoundLoop(made, LoopEngine(made)), 1)

    assert np.isfinite(record["train_loss"])
    for tensor, weights in before.items():
        assert state.weights[tensor].isfinite().all()
        if weights.dim() > 1:
            assert not torch.equal(state.weights[tensor], weights), tensor


def engines_agree(made: Setup, rounds: int) -> None:
    loop, _ = run(RoundLoop(made, LoopEngine(made)), rounds)
    stacked, _ = run(RoundLoop(made, StackedEngine(made, stack=2)), rounds)
    for tensor, weights in loop.weights.items():
        torch.testing.assert_close(stacked.weights[tensor], weights, rtol=1e-4, atol=1e-5)


GROUP_NORM = [(f"{name}, group norm", "fedmix") for name in ("cnn", "cnn1d")]


@pytest.mark.slow
@each(("name", "method"), [*GROUP_NORM, ("cnn, group norm", "fedavg"), ("resnet18", "fedavg")])
def test_the_stacked_engine_agrees_on_group_norm(name: str, method: str) -> None:
    made = small_world(name, method)
    assert not unstackable(made)
    engines_agree(made, 2)


def test_the_stacked_engine_draws_the_loops_masks_in_vgg16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SMALL, "vgg16", ({**SMALL["vgg16"][0], "dropout": 0.5}, (1, 32, 32)))
    engines_agree(small_world("vgg16"), 1)


def test_batch_norm_is_left_to_the_loop() -> None:
    spec = {"name": "resnet18", "width": 4, "norm": "batch"}
    made = setup(images(side=8), model=spec, train={"cohort": 2})

    assert "batch norm with running statistics" in unstackable(made)


def test_the_list_of_models_has_one_line_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    shown = succeeded(here("list", "models")).out

    for entry in kind_entries("model"):
        assert entry.summary.endswith(".")
        assert any(entry.name in line and entry.summary.rstrip(".") in line for line in shown.splitlines()), entry.name
