"""Convolutions on a processor's matrix units, against PyTorch's in float64."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from helpers import draw, examples, images, pools_inside_equal_pools_after, run, setup
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from fedblend._kernels import operators, tiles
from fedblend._kernels.operators import Convolution, MaxPool, conv
from fedblend.core.loop import RoundLoop
from fedblend.engines.loop import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine
from fedblend.engines.stacked.layers import prepare_model

CPU = torch.device("cpu")
EXACT = 2e-6
"""Error of a sum, as a share of the largest there is. With three products of the six it is 1e-5 and more."""

needs_units = pytest.mark.skipif(not tiles.is_usable(), reason="this processor or system has no AMX units")


def close(ours: torch.Tensor, wanted: torch.Tensor, error: float = EXACT) -> None:
    """Equal to the float64 numbers up to float32 rounding."""
    assert ours.dtype == torch.float32
    ours, wanted = ours.detach(), wanted.detach()
    assert float((ours - wanted).abs().max()) <= error * float(wanted.abs().max())


@needs_units
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 70), st.integers(3, 12), st.integers(3, 19)),
    outputs=st.integers(1, 70),
    kernel=st.sampled_from([(3, 3), (3, 3), (2, 3), (1, 1), (3, 1)]),
    padding=st.integers(0, 2),
)
@examples(40)
def test_the_three_forms_are_as_exact_as_float32(
    shape: tuple[int, int, int, int, int], outputs: int, kernel: tuple[int, int], padding: int
) -> None:
    padding = min(padding, min(kernel) - 1)
    x, w = draw(*shape), draw(shape[0], outputs, shape[2], *kernel, seed=1)
    # However badly these channels fill the tiles.
    with patch.object(tiles, "FILLED", 0.0):
        assert tiles.take(shape[2], outputs, kernel, padding)
        y = operators.run_conv(x, w, padding)
        g = draw(*y.shape, seed=2)
        by_x = operators.run_conv_input(g, w, padding, *shape[3:])
        by_w = operators.run_conv_weight(x, g, padding, *kernel)

    for k in range(shape[0]):
        a, b = x[k].double().requires_grad_(), w[k].double().requires_grad_()
        wanted = F.conv2d(a, b, padding=padding)
        close(y[k], wanted)
        for ours, right in zip((by_x[k], by_w[k]), torch.autograd.grad(wanted, (a, b), g[k].double()), strict=True):
            close(ours, right)


@needs_units
@given(
    shape=st.tuples(st.integers(1, 2), st.integers(1, 5), st.integers(1, 40), st.integers(4, 13), st.integers(4, 36)),
    outputs=st.integers(1, 40),
    kernel=st.sampled_from([(3, 3), (2, 3), (1, 1)]),
    padding=st.integers(0, 1),
)
@examples(30)
def test_fused_pools_equal_separate_pools(
    shape: tuple[int, int, int, int, int], outputs: int, kernel: tuple[int, int], padding: int
) -> None:
    with patch.object(tiles, "FILLED", 0.0):
        pools_inside_equal_pools_after(shape, outputs, kernel, min(padding, min(kernel) - 1))


@needs_units
def test_a_single_product_has_float32s_precision() -> None:
    # One channel that is not zero: every output is one product of numbers between 1e-12 and 1e12.
    x, w = torch.zeros(1, 2, 32, 5, 5), torch.zeros(1, 32, 32, 1, 1)
    x[0, :, 7], w[0, :, 7] = draw(2, 5, 5) * 10 ** (4 * draw(2, 5, 5, seed=3)), draw(32, 1, 1, seed=1)

    y = operators.run_conv(x, w, 0)

    wanted = F.conv2d(x[0].double(), w[0].double())
    assert float(((y[0] - wanted) / wanted).abs().max()) < 2**-22


@needs_units
def test_clients_and_samples_are_independent() -> None:
    x, w, g = draw(3, 4, 27, 7, 7), draw(3, 28, 27, 3, 3, seed=1), draw(3, 4, 28, 7, 7, seed=2)

    def forms() -> list[torch.Tensor]:
        by_x, by_w = operators.run_conv_input(g, w, 1, 7, 7), operators.run_conv_weight(x, g, 1, 3, 3)
        return [operators.run_conv(x, w, 1), by_x, by_w]

    whole = forms()
    x[1], g[1], w[1] = torch.nan, torch.inf, torch.nan
    sick = forms()

    for a, b in zip(sick, whole, strict=True):
        assert torch.equal(a[::2], b[::2])
        assert not a[1].isfinite().any()


@needs_units
def test_second_derivatives_of_a_stack() -> None:
    def number(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def value(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            def inner(z: torch.Tensor) -> torch.Tensor:
                return (layer(z, w) / 8).sin().sum()

            return inner(x) + (torch.func.grad(inner)(x) * x.cos()).square().sum()

        return value

    x, w = draw(2, 2, 26, 6, 5).requires_grad_(), draw(2, 27, 26, 3, 3, seed=1).requires_grad_()
    stacked = torch.vmap(number(lambda x, w: conv(x, w, 1)))(x, w)
    a, b = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    theirs = number(lambda x, w: F.conv2d(x, w, padding=1))
    wanted = torch.stack([theirs(*pair) for pair in zip(a, b, strict=True)])

    close(stacked, wanted, 1e-5)
    given, right = torch.autograd.grad(stacked.sum(), (x, w)), torch.autograd.grad(wanted.sum(), (a, b))
    for one, other in zip(given, right, strict=True):
        close(one, other, 1e-5)


@needs_units
def test_pytorch_can_still_use_the_units() -> None:
    a, b = draw(64, 96).bfloat16(), draw(96, 80, seed=1).bfloat16()
    before = a @ b
    operators.run_conv(draw(1, 1, 32, 5, 5), draw(1, 32, 32, 3, 3), 0)
    assert torch.equal(a @ b, before)


class Row(nn.Sequential):
    """Layers with many channels; a ReLU and a pool follow one of them."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 28, 3, padding=1), nn.ReLU(), nn.Conv2d(28, 26, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(26 * 9, 3),
        )  # fmt: skip


@needs_units
@pytest.mark.parametrize("method", ["fedavg", "fedmix"])
def test_a_stack_gives_the_loops_weights(method: str) -> None:
    settings = {"cohort": 3, "epochs": 2, "batch_size": 4, "lr": 0.05}
    model = {"name": "module", "path": "test_tiles:Row"}
    made = setup(images(side=8), method=method, unsafe=True, train=settings, model=model)
    engine = StackedEngine(made, stack=3)
    assert isinstance(engine.stacked[2], Convolution)

    loop, stacked = (run(RoundLoop(made, one), 3)[0].weights for one in (LoopEngine(made), engine))

    assert max(float((stacked[n] - loop[n]).norm() / loop[n].norm()) for n in loop) < 1e-4


@needs_units
def test_which_layers_use_the_units() -> None:
    assert [type(layer) for layer in prepare_model(Row(), CPU)][2:5] == [Convolution, nn.ReLU, MaxPool]
    # The processor's bfloat16 is faster still, for those that ask for it.
    assert isinstance(prepare_model(Row(), CPU, "bfloat16")[2], nn.Conv2d)
    for channels, outputs in ((64, 32), (16, 32), (32, 16), (12, 64)):
        assert tiles.take(channels, outputs, (3, 3), 1)
    for channels, outputs, padding in ((17, 64, 1), (64, 33, 1), (11, 32, 1), (3, 16, 1), (64, 64, 3)):
        assert not tiles.take(channels, outputs, (3, 3), padding)


def test_without_units_the_layers_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "is_usable", lambda: False)

    assert isinstance(prepare_model(Row(), CPU)[2], nn.Conv2d)
