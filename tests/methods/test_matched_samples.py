"""Synthetic samples that clients learn by distribution matching, and the methods that train on them."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, engine_of, local, numbers, run, same, same_up_to_rounding, setup
from torch import nn
from torch.func import functional_call

from fedblend.core.context import Task
from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.loop import RoundLoop
from fedblend.core.random import lent_generator, stream
from fedblend.core.sharing import ClientData
from fedblend.data.scale import Scaler
from fedblend.methods.sharing.matched_samples import MatchedSamples
from fedblend.models.layers import Staged

GROUPS = [list(range(0, 12)), list(range(12, 20)), list(range(20, 40))]
QUICK = {"steps": 4, "per_class": 2, "batch_size": 3}


def world(method: str = "feddm", sharing: dict[str, Any] | None = None, **changes: Any) -> Any:
    given = {"name": method, "sharing": {**QUICK, **(sharing or {})}}
    return setup(**{"groups": GROUPS, "method": given, "train": {"cohort": 2}, **changes})


def unit_scale() -> Scaler:
    """A scale on which inputs are in [-1, 1], and stored values in [0, 1]."""
    one = torch.ones(1, 1, 1)
    return Scaler("symmetric", False, 2 * one, -one, one, 0 * one)


def client(x: torch.Tensor, y: list[int], model: nn.Module, minimum: int = 1) -> ClientData:
    given = local(x, torch.tensor(y), Task("classification", 3), unit_scale(), minimum=minimum)
    return replace(given, model=model.eval())


def embed(model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and outputs by the layers of a staged model."""
    return functional_call(model, weights, (x, 0, -1)), functional_call(model, weights, (x,))


def independent(made: Any, client: int, sharing: MatchedSamples, round: int = 0) -> torch.Tensor:
    """The same samples, class after class, with PyTorch's SGD and weights moved or renewed one tensor at a time."""
    rng = stream(made.experiment.seed, "share", round, client)
    x, y = made.samples(client, int(made.sizes(0)[client]))
    x = made.scale(x)
    classes = [c for c in range(3) if (y == c).sum() >= made.experiment.policy.min_mean]
    shape = (len(classes) * sharing.per_class, *x.shape[1:])
    synthetic = torch.from_numpy(rng.standard_normal(shape, np.float32)).requires_grad_()
    optimizer = torch.optim.SGD([synthetic], lr=sharing.lr, momentum=sharing.momentum)
    model = copy.deepcopy(made.model).eval()
    for step in range(sharing.steps):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        if sharing.networks == "global":
            noise = rng.standard_normal(sum(p.numel() for p in weights.values()), np.float32)
            noise, used = noise * (sharing.radius / np.linalg.norm(noise)), 0
            for p in weights.values():
                p += torch.from_numpy(noise[used : used + p.numel()]).view(p.shape)
                used += p.numel()
        else:
            with lent_generator(int(rng.integers(2**31)), "network", step):
                fresh = [nn.Linear(16, 6), nn.Linear(6, 3)]
            weights = dict(zip(weights, [p.detach() for layer in fresh for p in layer.parameters()], strict=True))
        keys = rng.random(len(y))
        with torch.no_grad():
            synthetic.copy_(made.scale.from_unit(made.scale.to_unit(synthetic)))
        loss = torch.zeros(())
        for i, label in enumerate(classes):
            rows = np.flatnonzero(y.numpy() == label)
            rows = rows[np.argsort(keys[rows])][: sharing.batch_size]
            real = embed(model, weights, x[torch.from_numpy(rows)])
            own = embed(model, weights, synthetic[i * sharing.per_class : (i + 1) * sharing.per_class])
            loss = loss + sum((a.mean(0) - b.mean(0)).square().sum() for a, b in zip(own, real, strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made.scale.from_unit(made.scale.to_unit(synthetic.detach()))


@pytest.mark.parametrize("method", ["feddm", "server-matched"])
def test_entries_are_those_of_an_independent_implementation(method: str) -> None:
    made = world(method, {"radius": 0.3, "lr": 0.5})

    state, _ = run(made, 1)

    entries, sharing = state.entries, made.experiment.method.sharing
    assert sharing.networks == ("global" if method == "feddm" else "random")
    for k in range(3):
        wanted = independent(made, k, sharing)
        same_up_to_rounding({"x": entries.tensors["x"][entries.owner == k]}, {"x": wanted}, steps=1000)


def test_a_class_of_too_few_samples_has_none() -> None:
    model, sharing = Staged(nn.Flatten(), nn.Linear(4, 3)), MatchedSamples(per_class=2, steps=1)
    x = torch.rand(5, 1, 2, 2)
    assert sharing.share(client(x, [0, 0, 1, 1, 1], model, minimum=3))["y"].argmax(1).tolist() == [1, 1]
    assert sharing.share(client(x, [0, 0, 1, 1, 1], model, minimum=4)) is None


def test_the_clients_model_is_not_changed() -> None:
    model = Staged(nn.Flatten(), nn.Linear(4, 3))
    before = copy.deepcopy(model.state_dict())
    for networks in ("global", "random"):
        MatchedSamples(per_class=1, steps=2, networks=networks).share(client(torch.rand(4, 1, 2, 2), [0] * 4, model))
    assert same(model.state_dict(), before)


def test_feddm_sends_samples_in_each_round_and_no_models() -> None:
    made = world("feddm")

    first, _ = run(made, 1)
    state, records = run(made, 2)

    model = 4 * sum(tensor.numel() for tensor in state.weights.values())
    size = 3 * 3 * 2 * 4 * (16 + 3)  # clients, classes, samples of each; inputs and targets
    assert [record["bytes_up"] for record in records] == [{"synthetic": size}] * 2
    assert [record["bytes_down"] for record in records] == [{"weights": 3 * model}] * 2
    assert not torch.equal(state.entries.tensors["x"], first.entries.tensors["x"])
    same_up_to_rounding(
        {"x": state.entries.tensors["x"][state.entries.owner == 1]},
        {
            "x": independent(
                replace(made, model=with_weights(made.model, first.weights)), 1, made.experiment.method.sharing, 1
            )
        },
        steps=1000,
    )


def with_weights(model: nn.Module, weights: dict[str, torch.Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(weights)
    return other


def features() -> Dataset:
    """A table with classes."""
    made = numbers(40)
    halves = (Samples(half.x, (half.y[:, 0] > 0).long()) for half in (made.train, made.test))
    return Dataset("table", "features", *halves, ("no", "yes"))


def test_tables_with_classes_can_be_matched() -> None:
    made = world("feddm", data=features())
    state, _ = run(made, 1)
    assert state.entries.tensors["x"].shape[1:] == (5,)


def test_text_is_refused() -> None:
    given = local(
        torch.zeros(4, 3, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64), Task("classification", 3), lambda x: x
    )
    with pytest.raises(FedblendError, match=r"'matched-samples' learns images or features .* these data are text"):
        MatchedSamples().share(given)


GOOD = {"x": torch.zeros(4, 1, 4, 4), "y": torch.eye(3)[[0, 0, 2, 2]]}


@each(
    ("name", "value", "told"),
    [
        ("x", torch.zeros(4, 1, 4, 5), "of the shapes"),
        ("x", torch.zeros(4, 1, 4, 4).double(), "in float32"),
        ("x", torch.zeros(3, 1, 4, 4), "of the shapes"),
        ("y", torch.eye(4)[[0, 0, 2, 2]], "of the shapes"),
        ("y", torch.full((4, 3), 1 / 3), "no single class"),
        ("y", torch.tensor([[1.0, 1.0, 0.0]] * 4), "no single class"),
        ("y", torch.tensor([[2.0, -1.0, 0.0]] * 4), "no single class"),
        ("y", torch.eye(3)[[0, 0, 0, 2]], "3 samples of a class; valid: 2"),
        ("z", torch.zeros(4), "of the shapes"),
    ],
)
def test_samples_that_no_client_can_have_are_refused(name: str, value: torch.Tensor, told: str) -> None:
    loop, sharing = RoundLoop(made := world(), engine_of(made)), MatchedSamples(per_class=2)
    assert sharing.fault(GOOD, 20, loop.spec) is None
    assert told in str(sharing.fault({**GOOD, name: value}, 20, loop.spec))
