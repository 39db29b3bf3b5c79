"""The kernels for GPUs: Triton's interpreter runs them on the processor, and on a GPU they are compiled."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from helpers import draw, examples, images, run, same_up_to_rounding, setup
from hypothesis import example, given
from hypothesis import strategies as st
from torch.nn import functional as F

from fedblend._kernels import kernel_layers, operators
from fedblend.core.loop import RoundLoop
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.engine import StackedEngine

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.fixture(scope="module")
def gpu() -> Iterator[ModuleType]:
    """The kernels: compiled where there is a GPU, otherwise interpreted."""
    pytest.importorskip("triton", reason="the kernels for GPUs need Triton, which comes with PyTorch for GPUs")
    with pytest.MonkeyPatch.context() as patch:
        if HAS_GPU:
            patch.setattr(torch.backends.cudnn, "allow_tf32", False)
            yield importlib.import_module("fedblend._kernels.gpu")
            return
        module = importlib.import_module("fedblend._kernels.gpu")
        patch.setattr(module, "_is_exact", lambda: True)
        patch.setattr(module, "LEAST_STEPS", 1)
        yield module


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    """Equal up to the rounding of float32."""
    torch.testing.assert_close(a.cpu(), b, rtol=2e-5, atol=2e-5 * float(b.detach().abs().max()) + 1e-7)


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 40), st.integers(4, 9), st.integers(4, 9)),
    outputs=st.integers(1, 140),
    kernel=st.sampled_from([(1, 1), (3, 3), (5, 5), (2, 4), (6, 1)]),
    padding=st.integers(0, 2),
    last=st.booleans(),
)
@example(shape=(2, 2, 3, 9, 9), outputs=5, kernel=(7, 7), padding=2, last=True)
@examples(4 if HAS_GPU else 15)  # each shape is compiled
def test_the_three_forms_of_a_convolution(
    gpu: ModuleType, shape: tuple[int, ...], outputs: int, kernel: tuple[int, int], padding: int, last: bool
) -> None:
    if min(shape[3] + 2 * padding - kernel[0], shape[4] + 2 * padding - kernel[1]) < 0:
        return
    x, w = draw(*shape), draw(shape[0], outputs, shape[2], *kernel, seed=1)
    wanted = torch.stack([F.conv2d(a, b, padding=padding) for a, b in zip(x, w, strict=True)])
    g = draw(*wanted.shape, seed=2)
    by_x, by_w = [], []
    for a, b, c in zip(x, w, g, strict=True):
        a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
        first, second = torch.autograd.grad(F.conv2d(a, b, padding=padding), (a, b), c)
        by_x.append(first)
        by_w.append(second)

    x, w, g = (in_memory(t, last).to(DEVICE) for t in (x, w, g))

    close(gpu.conv(x, w, padding), wanted)
    close(gpu.conv_input(g, w, padding), torch.stack(by_x))
    close(gpu.conv_weight(x, g, padding, *kernel), torch.stack(by_w))


@pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter cannot multiply bfloat16 numbers")
def test_rounded_factors_keep_sixteen_bits(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = draw(2, 3, 32, 8, 8), draw(2, 40, 32, 3, 3, seed=1)
    wanted = torch.stack([F.conv2d(a, b, padding=1) for a, b in zip(x.double(), w.double(), strict=True)])
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    y = gpu.conv(x.to(DEVICE), w.to(DEVICE), 1).cpu().double()
    assert 1e-7 < float((y - wanted).norm() / wanted.norm()) < 2**-16


def in_memory(x: torch.Tensor, last: bool) -> torch.Tensor:
    """The same numbers in memory as PyTorch's default, or with the channels last."""
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3) if last else x


@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.integers(2, 9), st.integers(2, 9)),
    ties=st.booleans(),
)
@examples(4 if HAS_GPU else 25)
def test_the_forms_of_a_max_pool(gpu: ModuleType, shape: tuple[int, ...], ties: bool) -> None:
    x = draw(*shape).round() if ties else draw(*shape)
    x.view(-1)[x.numel() // 2] = torch.nan
    wanted, places = F.max_pool2d(x.flatten(0, 1), 2, return_indices=True)
    wanted, places = (t.unflatten(0, shape[:2]) for t in (wanted, places))
    g = draw(*wanted.shape, seed=1)
    spread = torch.zeros(shape).flatten(3).scatter(3, places.flatten(3), g.flatten(3)).view(shape)

    y, which = gpu.pool(x.to(DEVICE))

    assert torch.equal(y.cpu().nan_to_num(9.0), wanted.nan_to_num(9.0))
    assert torch.equal(gpu.spread(g.to(DEVICE), which, *shape[3:]).cpu(), spread)
    assert torch.equal(gpu.pick(x.to(DEVICE), which).cpu().nan_to_num(9.0), wanted.nan_to_num(9.0))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedmix"])
def test_clients_train_as_in_the_loop(gpu: ModuleType, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = setup(
        images(side=8),
        [list(range(0, 5)), list(range(5, 10)), list(range(10, 13))],
        method=method,
        model={"name": "cnn", "channels": [3, 17], "hidden": [5]},
        train={"cohort": 3, "epochs": 1, "batch_size": 5, "lr": 0.1},
        device=DEVICE,
    )
    if not HAS_GPU:
        monkeypatch.setattr(operators, "_is_on_gpu", lambda value: isinstance(value, torch.Tensor))
        monkeypatch.setattr(kernel_layers, "_way_on_cpu", kernel_layers._way_on_gpu)
    called = []
    conv_weight = gpu.conv_weight
    monkeypatch.setattr(gpu, "conv_weight", lambda *given: called.append(1) or conv_weight(*given))
    engine = StackedEngine(made, DEVICE, stack=3)
    engine.channels_last = True  # as on a GPU

    state, _ = run(RoundLoop(made, engine), 2)

    expected, _ = run(RoundLoop(made, LoopEngine(made, DEVICE)), 2)
    assert called
    # On a GPU the other order of sums adds up to more than one rounding a step.
    same_up_to_rounding(state.weights, expected.weights, steps=1000 if HAS_GPU else 12)
