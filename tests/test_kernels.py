"""The C++ kernels against PyTorch's own layers: values, first and second derivatives, alone and stacked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedblend.kernels import Convolution, MaxPool, build, conv, max_pool, operators

pytestmark = pytest.mark.skipif(build.library() is None, reason=build.missing() or "no kernels")

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal but for the order in which float32 sums are made."""
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(b.abs().max()) + 1e-7)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(6, 21), st.integers(6, 21)),
    outputs=st.integers(1, 17),
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 5), (2, 4), (6, 1)]),
    padding=st.integers(0, 2),
)
@examples(60)
def test_the_three_forms_of_a_convolution(
    shape: tuple[int, int, int, int, int], outputs: int, kernel: tuple[int, int], padding: int
) -> None:
    x, w = draw(*shape), draw(shape[0], outputs, shape[2], *kernel, seed=1)
    wanted = torch.stack([F.conv2d(a, b, padding=padding) for a, b in zip(x, w, strict=True)])
    g = draw(*wanted.shape, seed=2)

    close(operators.run_conv(x, w, padding), wanted)
    for k in range(len(x)):
        a, b = x[k].clone().requires_grad_(), w[k].clone().requires_grad_()
        by_x, by_w = torch.autograd.grad(F.conv2d(a, b, padding=padding), (a, b), g[k])
        close(operators.run_conv_input(g, w, padding, *shape[3:])[k], by_x)
        close(operators.run_conv_weight(x, g, padding, *kernel)[k], by_w)


@given(
    planes=st.integers(1, 5),
    height=st.integers(2, 37),
    width=st.integers(2, 37),
    ties=st.booleans(),
)
@examples(80)
def test_max_pools_and_where_their_gradients_go(planes: int, height: int, width: int, ties: bool) -> None:
    x = draw(1, planes, height, width, seed=height)
    x = x.round() if ties else x
    reference = x.clone().requires_grad_()
    wanted = F.max_pool2d(reference, 2)
    g = draw(*wanted.shape, seed=3)

    y, which = operators.run_pool(x)

    assert torch.equal(y, wanted)
    assert torch.equal(operators.run_pick(x, which), wanted)
    assert torch.equal(operators.run_spread(g, which, height, width), torch.autograd.grad(wanted, reference, g)[0])


def second_order(layer: Layer) -> Layer:
    """A number whose derivatives hold second derivatives of the layer in both arguments, as FedMix's loss does."""

    def number(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def inner(z: torch.Tensor) -> torch.Tensor:
            return layer(z, w).sin().sum()

        return inner(x) + (torch.func.grad(inner)(x) * x.cos()).square().sum()

    return number


def test_second_derivatives_of_a_stack() -> None:
    x, w = draw(3, 2, 4, 9, 8).requires_grad_(), draw(3, 5, 4, 3, 3, seed=1).requires_grad_()
    ours = second_order(lambda x, w: max_pool(conv(x, w, 1)))
    theirs = second_order(lambda x, w: F.max_pool2d(F.conv2d(x, w, padding=1), 2))

    stacked = torch.vmap(ours)(x, w)
    wanted = torch.stack([theirs(a, b) for a, b in zip(x, w, strict=True)])

    close(stacked, wanted)
    for a, b in zip(torch.autograd.grad(stacked.sum(), (x, w)), torch.autograd.grad(wanted.sum(), (x, w)), strict=True):
        close(a, b)


@pytest.mark.parametrize("order", [(nn.ReLU(), nn.MaxPool2d(2)), (nn.MaxPool2d(2), nn.ReLU())])
def test_a_convolution_with_relu_and_pool_in_either_order(order: tuple[nn.Module, nn.Module]) -> None:
    like = nn.Conv2d(3, 5, 3, padding=1)
    x = draw(4, 3, 11, 10).requires_grad_()
    ours = Convolution(like, pooled=True)

    wanted = nn.Sequential(like, *order)(x)

    close(ours(x), wanted)
    given = [x, like.weight, like.bias]
    for a, b in zip(torch.autograd.grad(ours(x).sum(), given), torch.autograd.grad(wanted.sum(), given), strict=True):
        close(a, b)


def test_layers_that_look_like_pytorchs() -> None:
    like = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = draw(4, 2, 6, 6)

    close(Convolution(like)(x), like(x))
    assert torch.equal(MaxPool()(x), nn.MaxPool2d(2)(x))


def test_kernels_are_built_where_the_cache_is_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    build.library.cache_clear()
    try:
        assert build.library() is not None
        (built,) = (tmp_path / "fedblend").iterdir()
        before = built.stat().st_mtime_ns
        build.library.cache_clear()
        assert build.library() is not None
        assert built.stat().st_mtime_ns == before
    finally:
        build.library.cache_clear()


def test_without_a_compiler_there_are_no_kernels_but_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nothing-here"))
    build.library.cache_clear()
    try:
        assert build.library() is None
        assert "compiler" in build.missing()
    finally:
        build.library.cache_clear()
