"""Traced programs equal their functions, or the function itself is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import draw, each
from torch.fx import GraphModule
from torch.nn import functional as F

from fedblend._kernels.simplify import TracedFunction, simplify
from fedblend._kernels.tracing import trace

Function = Callable[..., torch.Tensor]


def written_zeros(x: torch.Tensor) -> torch.Tensor:
    zeros = torch.zeros_like(x)
    zeros[:, 0] = 3.0
    return zeros + x


def added_to_zeros(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x) + x
    made[0] = 5.0
    return made + x


def once_and_written(x: torch.Tensor) -> torch.Tensor:
    made = x * 1
    made[0] = 5.0
    return made + x


def read_in_two_shapes(x: torch.Tensor) -> torch.Tensor:
    made = x[None].expand(2, -1, -1) @ torch.eye(4)
    return F.relu(made).flatten() + made.view(-1).tanh()


def overwritten(x: torch.Tensor) -> torch.Tensor:
    made = x.exp()
    made[0] = 0
    view = made[1:]
    view.add_(1)
    return made.relu_() - made.cumsum(0)


def looked_up(x: torch.Tensor) -> torch.Tensor:
    return x[torch.tensor([2, 0, 0])] + x.gather(0, x.argsort(0))[:3]


def masked(x: torch.Tensor) -> torch.Tensor:
    made = x.clone()
    made[x > 0] = 7.0
    return made


def mean_of_positive(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0].mean()


def places(x: torch.Tensor) -> torch.Tensor:
    return x.nonzero()[:1].float() + len(x[x > 0.5])


def number_read_as_list(x: torch.Tensor) -> torch.Tensor:
    return x * sum(x.flatten().tolist())


def number_read_by_numpy(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.numpy().max())


def made_of_numbers(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([x[0, 0], 1.0, 2.0, 3.0])


FUNCTIONS = (
    *(written_zeros, added_to_zeros, once_and_written, read_in_two_shapes, overwritten, looked_up, masked),
    *(mean_of_positive, places, number_read_as_list, number_read_by_numpy, made_of_numbers),
)


@each("function", FUNCTIONS)
def test_a_program_computes_what_its_function_does(function: Function) -> None:
    program = TracedFunction(function)
    for seed in range(4):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.allclose(program(x.clone()), function(x.clone()))


def test_tensors_of_one_shape_with_other_strides() -> None:
    program = TracedFunction(lambda x: x.view(-1) * 2 if x.is_contiguous() else x.reshape(-1) * 2)
    x = torch.arange(6.0).view(2, 3)
    assert program(x).tolist() == [0, 2, 4, 6, 8, 10]
    assert program(torch.arange(6.0).view(3, 2).t()).tolist() == [0, 4, 8, 2, 6, 10]


def test_a_function_changes_its_argument_once_a_call() -> None:
    program = TracedFunction(lambda x: x.add_(1) * 2)
    x = torch.zeros(2)
    assert [program(x).tolist() for _ in range(4)] == [[2, 2], [4, 4], [6, 6], [8, 8]]


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(RuntimeError, match="size of tensor a"):
        TracedFunction(lambda x: x + torch.zeros(3))(torch.zeros(4))


def test_a_program_that_is_not_its_function_is_not_used() -> None:
    program = TracedFunction(lambda x: x * 2)
    x = torch.ones(3)
    program(x)
    (kind,) = program.programs
    program.programs[kind] = lambda x: x * 2.1

    assert program(x).tolist() == [2, 2, 2]
    assert program.programs[kind] is program.function


Functions = Callable[[torch.Tensor], list[torch.Tensor]]


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


def made_twice(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.exp() + 1, x.exp() * 2]


def two_zeros(x: torch.Tensor) -> list[torch.Tensor]:
    first, second = torch.zeros_like(x), torch.zeros_like(x)
    return [first.add_(x), second]


def simplified(function: Functions) -> GraphModule:
    graph = trace(function, draw(3, 4))
    simplify(graph, factors=False)
    return graph


def called(function: Functions) -> list[str]:
    return [str(n.target) for n in simplified(function).graph.nodes if n.op == "call_function"]


@each(
    "function",
    [of_a_view, read_twice, shown_and_changed, made_wider, given_back, gradient, chained, made_twice, two_zeros],
)
def test_only_what_nothing_else_reads_is_overwritten(function: Functions) -> None:
    graph, x = simplified(function), draw(3, 4, seed=1)
    for _ in range(2):
        for got, wanted in zip(graph(x), function(x), strict=True):
            assert torch.equal(got, wanted)
        assert torch.equal(x, draw(3, 4, seed=1))


def test_a_chain_of_elementwise_operations_works_in_one_tensor() -> None:
    assert called(chained) == ["aten.mul.Tensor", "aten.add_.Tensor", "aten.relu_.default", "aten.add_.Tensor"]


def test_what_is_made_twice_is_made_once() -> None:
    assert called(made_twice).count("aten.exp.default") == 1
    assert called(lambda x: [torch.rand_like(x), torch.rand_like(x)]).count("aten.rand_like.default") == 2
