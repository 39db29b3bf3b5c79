"""A trace repeats the operations of a function for other values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedblend._kernels.tracing import trace, without_memory


def test_one_argument_given_twice_may_later_be_two() -> None:
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    graph = trace(lambda a, b: a - b, x, x)
    assert torch.equal(graph(x, y), x - y)


def test_inputs_and_outputs_are_flat_lists() -> None:
    x, y = torch.ones(2), torch.full((2,), 3.0)
    graph = trace(lambda pair, table: [pair[0] + table["y"], None, (table["y"] * 2,)], (x, y), {"y": y})
    first, none, second = graph(x, y, 2 * y)
    assert torch.equal(first, x + 2 * y)
    assert none is None
    assert torch.equal(second, 4 * y)


def test_operations_of_several_results_and_constants_from_outside() -> None:
    shift, x = torch.randn(4), torch.randn(1, 1, 4, 4)

    def pooled(x: torch.Tensor) -> list[torch.Tensor]:
        values, places = F.max_pool2d(x, 2, return_indices=True)
        return [values.flatten() + shift, *places.split(1, dim=2), x.new_tensor([1.0, 2.0])]

    graph = trace(pooled, torch.zeros_like(x))

    for got, wanted in zip(graph(x), pooled(x), strict=True):
        assert torch.equal(got, wanted)


def test_in_place_operations_are_repeated() -> None:
    def summed(x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(3)
        view = total[1:]
        total += x
        view.mul_(2)
        return total

    graph = trace(summed, torch.zeros(3))

    for _ in range(2):
        assert graph(torch.ones(3)).tolist() == [1, 2, 2]


def test_a_second_derivative_of_a_model_with_tensors_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).eval().double()
    x = torch.randn(5, 3, dtype=torch.float64)

    def slope(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        (first,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        return torch.autograd.grad(first.square().sum(), leaf)[0]

    graph = trace(slope, torch.zeros_like(x))

    torch.testing.assert_close(graph(x), slope(x))


def test_operations_that_need_values_are_errors() -> None:
    with pytest.raises(RuntimeError, match="needs the values of a tensor"):
        trace(lambda x: x * 2 if x.sum() > 0 else x, torch.ones(2))


def test_casts_of_an_earlier_step_are_not_reused() -> None:
    weights, x = torch.randn(4, 4, requires_grad=True), torch.randn(2, 4)
    with torch.autocast("cpu", torch.bfloat16):
        (x @ weights).sum().backward()  # which keeps the weights as bfloat16
        graph = trace(lambda x, w: x @ w, x, weights)
    assert "constant0" not in graph.code
    assert torch.equal(graph(x, 2 * weights), 2 * graph(x, weights))


def test_a_tensor_without_memory_keeps_its_shape() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.float64).view(4, 2, -1)[1:].transpose(0, 2)
    made = without_memory(tensor)
    for fact in ("shape", "dtype", "device"):
        assert getattr(made, fact) == getattr(tensor, fact)
    assert (made.stride(), made.storage_offset()) == (tensor.stride(), tensor.storage_offset())
    assert made.untyped_storage().size() == 0


STACKED = """
import sys, fedblend
model = {"name": "cnn", "channels": [4]}
settings = {"data": "digits", "partition": {"name": "iid", "clients": 4}, "engine": "stacked", "rounds": 1}
train = {"cohort": 4, "epochs": 1}
fedblend.run(fedblend.Experiment(**settings, model=model, method=sys.argv[1], train=train), out=sys.argv[2])
print(sorted({"torch._dynamo", "torch._inductor"} & set(sys.modules)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["aggenhance", "fed-augmix"])
def test_pytorchs_compiler_is_not_loaded(method: str, tmp_path: Path) -> None:
    # Without the warning of a machine without a compiler.
    command = [sys.executable, "-W", "ignore", "-c", STACKED, method, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[]")
