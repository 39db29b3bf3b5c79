"""The C++ kernels against PyTorch's own layers: values, first and second derivatives, alone and stacked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from helpers import draw, examples
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedblend._kernels import build, dropout_masks, operators
from fedblend._kernels.dropout_masks import Streams
from fedblend._kernels.lowrank import LowRank
from fedblend._kernels.operators import Convolution, MaxPool, conv, max_pool
from fedblend._kernels.simplify import simplify
from fedblend._kernels.tracing import trace

pytestmark = pytest.mark.skipif(build.library() is None, reason=build.missing() or "no kernels")

Layer = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal up to the order of float32 sums."""
    torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5 * float(b.detach().abs().max()) + 1e-7)


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.integers(6, 21), st.integers(6, 21)),
    outputs=st.integers(1, 17),
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 5), (2, 4), (4, 2), (6, 1)]),
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
    shape=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(3, 12), st.integers(3, 35)),
    outputs=st.integers(1, 20),
    padding=st.integers(0, 2),
    side=st.sampled_from([2, 4]),
)
@examples(60)
def test_winograds_three_forms_have_at_most_four_times_the_direct_ones_error(
    shape: tuple[int, int, int, int, int], outputs: int, padding: int, side: int
) -> None:
    x, w = draw(*shape), draw(shape[0], outputs, shape[2], 3, 3, seed=1)
    g = draw(*torch.stack([F.conv2d(a, b, padding=padding) for a, b in zip(x, w, strict=True)]).shape, seed=2)

    def forms(x: torch.Tensor, w: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        """Outputs and both derivatives, in double precision."""
        x, w = x.double().requires_grad_(), w.double().requires_grad_()
        y = torch.stack([F.conv2d(a, b, padding=padding) for a, b in zip(x, w, strict=True)])
        return [y.detach(), *torch.autograd.grad(y, (x, w), g.double())]

    # Errors are shares of the root of the summed squares of all products: a sum may be near 0 by chance, its error is
    # as large then. Sums of few numbers are nearly exact in the direct way; transforms of larger tiles round more. Its
    # derivative by the weights sums in blocks, so transforms cannot be as exact: 3e-7 and 1e-6 were seen.
    floor, by_weights = {2: 1e-7, 4: 1e-6}[side], {2: 1e-6, 4: 3e-6}[side]
    ways = (
        (lambda way: operators.run_conv(x, w, padding, way), floor),
        (lambda way: operators.run_conv_input(g, w, padding, *shape[3:], winograd=way), floor),
        (lambda way: operators.run_conv_weight(x, g, padding, 3, 3, winograd=way), by_weights),
    )
    for (form, least), exact, squares in zip(ways, forms(x, w, g), forms(x**2, w**2, g**2), strict=True):
        error, direct = (float((form(way) - exact).norm() / squares.sum().sqrt()) for way in (side, 0))
        assert error <= 4 * direct + least


@given(planes=st.integers(1, 5), height=st.integers(2, 37), width=st.integers(2, 37), ties=st.booleans())
@examples(80)
def test_max_pools_and_their_gradients(planes: int, height: int, width: int, ties: bool) -> None:
    x = draw(1, planes, height, width, seed=height)
    x = x.round() if ties else x
    reference = x.clone().requires_grad_()
    wanted = F.max_pool2d(reference, 2)
    g = draw(*wanted.shape, seed=3)

    y, which = operators.run_pool(x)

    assert torch.equal(y, wanted)
    assert torch.equal(operators.run_pick(x, which), wanted)
    assert torch.equal(operators.run_spread(g, which, height, width), torch.autograd.grad(wanted, reference, g)[0])


@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 12), st.integers(1, 4), st.integers(4, 40), st.integers(4, 40)),
    outputs=st.integers(1, 9),
    kernel=st.sampled_from([(1, 1), (3, 3), (2, 4)]),
    padding=st.integers(0, 1),
)
@example(shape=(1, 1, 2, 26, 4), outputs=5, kernel=(2, 4), padding=0)  # of which no pool is left
@examples(60)
def test_fused_pools_equal_separate_pools(
    shape: tuple[int, int, int, int, int], outputs: int, kernel: tuple[int, int], padding: int
) -> None:
    x, w = draw(*shape), draw(shape[0], outputs, shape[2], *kernel, seed=1)
    y = operators.run_conv(x, w, padding)
    values, places = operators.run_pool(y)
    g = draw(*values.shape, seed=2).relu()  # half of them zeros, as a ReLU leaves them
    spread = operators.run_spread(g, places, *y.shape[-2:])

    pooled, which = operators.run_conv_pool(x, w, padding)

    assert torch.equal(pooled, values)
    assert torch.equal(which, places)
    by_input = operators.run_conv_input(spread, w, padding, *shape[3:])
    close(operators.run_conv_input(g, w, padding, *shape[3:], which), by_input)
    by_weight = operators.run_conv_weight(x, spread, padding, *kernel)
    close(operators.run_conv_weight(x, g, padding, *kernel, which), by_weight)


def test_winograds_way_through_a_pool_for_few_and_for_many_gradients() -> None:
    x, w = draw(2, 3, 16, 12, 12), draw(2, 24, 16, 3, 3, seed=1)
    pooled, which = operators.run_conv_pool(x, w, 1)
    g = draw(*pooled.shape, seed=2)
    for share in (0.1, 1.0):
        some = g * (draw(*g.shape, seed=3).abs() < 2 * share)
        assert operators._is_dense(some, 4, 12, 12) == (share == 1.0)
        close(
            operators.run_conv_input(some, w, 1, 12, 12, which, 4), operators.run_conv_input(some, w, 1, 12, 12, which)
        )


@given(
    data=st.data(),
    clients=st.integers(1, 4),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 600)),
    shared=st.booleans(),
)
@examples(60)
def test_low_rank_updates_equal_the_weights(
    data: st.DataObject, clients: int, shape: tuple[int, int], shared: bool
) -> None:
    outputs, inputs = shape
    first = draw(1 if shared else clients, outputs, inputs).expand(clients, outputs, inputs)
    kept, weights, before = LowRank(first), first.double().clone(), first.clone()
    for seed in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, clients - 1))
        rows = slice(start, data.draw(st.integers(start + 1, clients)))
        some, few = rows.stop - start, data.draw(st.integers(1, 7))
        a, x = draw(some, outputs, few, seed=3 * seed), draw(some, few, inputs, seed=3 * seed + 1)
        kept[rows].add(a, x, -0.5)
        weights[rows] -= 0.5 * torch.bmm(a.double(), x.double())
        if data.draw(st.booleans()):
            active = data.draw(st.none() | st.lists(st.booleans(), min_size=some, max_size=some).map(torch.tensor))
            kept[rows].lerp_towards(first[rows], 0.25, active)
            moves = rows if active is None else torch.arange(clients)[rows][active]
            weights[moves] -= 0.25 * (weights[moves] - first[moves])
        g = draw(some, 2, outputs, seed=3 * seed + 2)
        close(kept[rows].times(x, transposed=True), torch.bmm(x.double(), weights[rows].transpose(1, 2)).float())
        close(kept[rows].times(g, transposed=False), torch.bmm(g.double(), weights[rows]).float())
        if data.draw(st.booleans()):
            close(kept[rows].tensor(), weights[rows].float())

    close(kept.make(), weights.float())
    assert torch.equal(first, before)
    kept.make().zero_()
    assert torch.equal(first, before)


@given(seed=st.integers(0, 2**32 - 1), sizes=st.lists(st.integers(1, 1500), max_size=4), p=st.floats(0.001, 0.999))
@examples(60)
def test_masks_are_those_of_pytorchs_generators(seed: int, sizes: list[int], p: float) -> None:
    if not dropout_masks.is_usable() and torch.__version__ < "2.13" and torch.backends.mkl.is_available():
        pytest.skip("this PyTorch draws masks by MKL, which dropout.cpp does not copy; engines then use PyTorch")
    streams, generator = Streams([seed ^ 1, seed]), torch.Generator().manual_seed(seed)
    for size in sizes:
        ours, theirs = torch.empty(size), torch.ones(size).bernoulli_(1 - p, generator=generator)
        streams.draw(1, ours, p)
        assert torch.equal(ours, theirs.div_(1 - p))


@pytest.mark.parametrize("winograd", [0, 2, 4])
def test_a_traced_step_fuses_calls(winograd: int) -> None:
    x, w, v = draw(2, 3, 2, 9, 8), draw(2, 4, 2, 3, 3, seed=1), draw(2, 5, 4 * 4 * 4, seed=2)

    def step(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().requires_grad_() for t in (x, w, v)]
        hidden = torch.vmap(lambda a, b: max_pool(conv(a, b, 1, winograd)))(*leaves[:2]).flatten(2)
        return list(torch.autograd.grad(torch.bmm(hidden, leaves[2].transpose(1, 2)).square().sum(), leaves))

    graph = trace(step, x, w, v)
    simplify(graph, factors=False)

    called = [n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"]
    assert {"run_conv_pool", "run_conv_input", "run_conv_weight"} <= set(called)
    assert not {"run_conv", "run_pool", "run_spread"} & set(called)
    for ours, wanted in zip(graph(x, w, v), step(x, w, v), strict=True):
        close(ours, wanted)


def test_a_convolution_with_other_readers_is_not_fused() -> None:
    x, w = draw(2, 3, 2, 9, 8), draw(2, 4, 2, 3, 3, seed=1)

    def read_twice(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        made = torch.vmap(lambda a, b: conv(a, b, 1))(x, w)
        return [made, torch.vmap(max_pool)(made)]

    graph = trace(read_twice, x, w)
    simplify(graph, factors=False)

    for ours, wanted in zip(graph(x, w), read_twice(x, w), strict=True):
        assert torch.equal(ours, wanted)


def test_a_spread_that_is_a_convolutions_input_is_not_fused() -> None:
    small, g = draw(1, 2, 3, 4, 4), draw(1, 2, 5, 6, 6, seed=1)
    which = torch.randint(0, 4, small.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(2))

    def read(small: torch.Tensor, which: torch.Tensor, g: torch.Tensor) -> list[torch.Tensor]:
        image = torch.ops.fedblend.spread(small, which, 8, 8)
        return [torch.ops.fedblend.conv_weight(image, g, 0, 3, 3)]

    graph = trace(read, small, which, g)
    simplify(graph, factors=False)

    assert torch.equal(graph(small, which, g)[0], read(small, which, g)[0])


def second_order(layer: Layer) -> Layer:
    """A number whose derivatives hold second derivatives of the layer in both arguments, as FedMix's loss does."""

    def number(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        def inner(z: torch.Tensor) -> torch.Tensor:
            return layer(z, w).sin().sum()

        return inner(x) + (torch.func.grad(inner)(x) * x.cos()).square().sum()

    return number


@pytest.mark.parametrize("winograd", [0, 2, 4])
def test_second_derivatives_of_a_stack(winograd: int) -> None:
    x, w = draw(3, 2, 4, 9, 8).requires_grad_(), draw(3, 5, 4, 3, 3, seed=1).requires_grad_()
    ours = second_order(lambda x, w: max_pool(conv(x, w, 1, winograd)))
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
    ours = partial(Convolution(like), pooled=True)

    wanted = nn.Sequential(like, *order)(x)

    close(ours(x), wanted)
    given = [x, like.weight, like.bias]
    for a, b in zip(torch.autograd.grad(ours(x).sum(), given), torch.autograd.grad(wanted.sum(), given), strict=True):
        close(a, b)


def test_a_maximum_is_nan_where_one_of_its_numbers_is() -> None:
    x = torch.randn(2, 3, 6, 40)
    x.view(-1)[torch.randperm(x.numel())[:30]] = float("nan")
    assert torch.equal(operators.run_pool(x)[0].nan_to_num(99), F.max_pool2d(x, 2).nan_to_num(99))


def test_layers_equal_pytorchs() -> None:
    like = nn.Conv2d(2, 3, 3, padding=1, bias=False)
    x = draw(4, 2, 6, 6)
    close(Convolution(like)(x), like(x))
    assert torch.equal(MaxPool()(x), nn.MaxPool2d(2)(x))
