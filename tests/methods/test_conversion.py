"""The server's conversion as a flat list of operations: the same steps as autograd's, and nothing overwritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import each, images, same, setup
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fedblend._kernels.simplify import simplify
from fedblend._kernels.tracing import trace
from fedblend.core.server_step import ServerContext
from fedblend.core.setup import Setup, model_spec
from fedblend.core.sharing import Pool
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.methods.server_steps.distill import DistillToModel

CLASSES, STEPS, SIZE, BETA, LR = 3, 6, 2, 0.5, 0.2


def server_of(made: Setup, model: nn.Module, teacher: torch.Tensor, soft: bool = False) -> ServerContext:
    """A server with ten seeds, whose draws are always the same."""
    x, y = made.data.train.x[:10].float(), made.data.train.y[:10]
    pool = Pool({"x": x, "y": labels_of(made) if soft else y}, np.full(10, -1))
    known = vars(model_spec(made, model))
    return ServerContext(
        **known, round=0, lr=LR, rng=np.random.default_rng(5), global_outputs={"outputs": teacher}, pool=pool
    )


def labels_of(made: Setup) -> torch.Tensor:
    """Soft labels of the seeds, each of two classes."""
    hot = F.one_hot(made.data.train.y[:10], CLASSES).float()
    return 0.9 * hot + 0.1 * hot.roll(1, 1)


def by_autograd(made: Setup, teacher: torch.Tensor, soft: bool) -> dict[str, torch.Tensor]:
    """The same steps by the book: a module, its loss of two terms, backward."""
    weights = {name: t.clone().requires_grad_() for name, t in made.weights().items()}
    x, hard = made.scale(made.data.train.x[:10].float()), F.one_hot(made.data.train.y[:10], CLASSES).float()
    labels = labels_of(made) if soft else hard
    for rows in torch.from_numpy(np.random.default_rng(5).integers(10, size=(STEPS, SIZE))):
        log = F.log_softmax(functional_call(made.model, weights, (x[rows],)), -1)
        loss = -((labels[rows] + BETA * labels[rows] @ teacher) * log).sum(-1).mean()
        slopes = torch.autograd.grad(loss, list(weights.values()))
        weights = {
            name: (t - LR * slope).detach().requires_grad_()
            for (name, t), slope in zip(weights.items(), slopes, strict=True)
        }
    return {name: t.detach() for name, t in weights.items()}


@pytest.mark.parametrize(("engine", "soft"), [(LoopEngine, False), (StackedEngine, False), (LoopEngine, True)])
def test_the_steps_are_those_of_autograd(engine: Any, soft: bool) -> None:
    made = setup(images(n=20, classes=CLASSES, side=6), model="mix2fld-cnn", scale="unit")
    teacher = torch.rand(CLASSES, CLASSES, generator=torch.Generator().manual_seed(0)).softmax(1)
    before = {name: t.clone() for name, t in made.weights().items()}

    step = DistillToModel(steps=STEPS, batch_size=SIZE, beta=BETA)
    server = server_of(made, engine(made).server_model(), teacher, soft)
    got, _ = step.refine(made.weights(), server)

    wanted = by_autograd(made, teacher, soft)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, atol=1e-5, rtol=1e-4)
        assert not torch.equal(got[name], before[name])
    assert same(made.weights(), before)
    empty = replace(server, pool=Pool({}, np.empty(0, np.int64)))
    assert same(DistillToModel().refine(before, empty)[0], before)


class Wavering(nn.Module):
    """A network whose work depends on the numbers that it sees, which no trace can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(x.flatten(1))
        return made * 2 if bool(x.mean() > 0.3) else made


def test_a_model_that_cannot_be_traced_is_converted_all_the_same() -> None:
    made = setup(images(n=20, classes=CLASSES), model={"name": "mlp", "hidden": []}, scale="unit")
    net, teacher = Wavering(), torch.full((CLASSES, CLASSES), 1 / CLASSES)
    weights = {name: t.detach().clone() for name, t in net.named_parameters()}
    server = server_of(made, net, teacher)
    x = server.scale(made.data.train.x[:10].float())
    assert {bool(one.mean() > 0.3) for one in x} == {True, False}
    server = ServerContext(**{**vars(server), "trained": list(weights)})

    got, _ = DistillToModel(steps=1).refine(weights, server)

    row = int(np.random.default_rng(5).integers(10, size=(1, 1))[0, 0])
    factor = 2 if bool(x[row].mean() > 0.3) else 1
    said = (factor * (x[row].flatten() @ weights["last.weight"].T + weights["last.bias"])).softmax(0)
    label = F.one_hot(made.data.train.y[row], CLASSES)
    slope = factor * ((said - label) + 0.01 * (said - 1 / CLASSES))
    torch.testing.assert_close(got["last.bias"], weights["last.bias"] - LR * slope)


def of_a_view(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.view(-1).relu() + 1]


def read_twice(x: torch.Tensor) -> list[torch.Tensor]:
    made = x * 2
    return [made.relu() + made]


def shown_and_changed(x: torch.Tensor) -> list[torch.Tensor]:
    made = x * 2
    return [made.view(-1), made.relu()]


def made_wider(x: torch.Tensor) -> list[torch.Tensor]:
    return [(x[:, :1] * 2) + x]


def given_back(x: torch.Tensor) -> list[torch.Tensor]:
    made = x * 2
    return [made, made.relu()]


def gradient(x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().requires_grad_()
    return list(torch.autograd.grad(((leaf * 3 + 1).relu() * leaf).relu().sum(), [leaf]))


def chained(x: torch.Tensor) -> list[torch.Tensor]:
    return [((x * 2) + 1).relu() + x]


@each("function", [of_a_view, read_twice, shown_and_changed, made_wider, given_back, gradient, chained])
def test_only_what_nothing_else_reads_is_overwritten(function: Callable[..., list[torch.Tensor]]) -> None:
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1))
    kept = x.clone()
    graph = trace(function, x)
    simplify(graph, factors=False)

    for _ in range(2):
        for got, wanted in zip(graph(x), function(x), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(x, kept)


def test_a_chain_of_elementwise_operations_works_in_one_tensor() -> None:
    graph = trace(chained, torch.randn(3, 4))
    simplify(graph, factors=False)

    assert [str(n.target) for n in graph.graph.nodes if n.op == "call_function"] == [
        "aten.mul.Tensor",
        "aten.add_.Tensor",
        "aten.relu_.default",
        "aten.add_.Tensor",
    ]


def test_what_is_made_twice_is_made_once() -> None:
    def twice(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.exp() + 1, x.exp() * 2, torch.rand_like(x), torch.rand_like(x)]

    graph = trace(twice, torch.randn(3, 4))
    simplify(graph, factors=False)

    called = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert called.count("aten.exp.default") == 1
    assert called.count("aten.rand_like.default") == 2
    x = torch.randn(3, 4)
    for got, wanted in zip(graph(x)[:2], twice(x)[:2], strict=True):
        assert torch.equal(got, wanted)


def test_tensors_that_are_changed_stay_two() -> None:
    def changed(x: torch.Tensor) -> list[torch.Tensor]:
        first, second = torch.zeros_like(x), torch.zeros_like(x)
        return [first.add_(x), second]

    graph = trace(changed, torch.randn(3))
    simplify(graph, factors=False)

    x = torch.randn(3)
    assert torch.equal(graph(x)[0], x)
    assert torch.equal(graph(x)[1], torch.zeros(3))
