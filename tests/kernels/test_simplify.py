"""Traced programs equal their functions, or the function itself is called."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from helpers import each
from torch.nn import functional as F

from fedblend._kernels.simplify import TracedFunction

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
