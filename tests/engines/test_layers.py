"""The papers' networks: their weights counted by hand, their layers restated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from helpers import each, images, run, setup
from models_helpers import SMALL, Spec, built, samples, small
from torch import nn
from torch.nn import functional as F

from fedblend.core import registry
from fedblend.models.layers import Staged

STAGES = {
    "cnn": 3,
    "cnn1d": 4,
    "mix2fld-cnn": 3,
    "xormixfl-cnn": 4,
    "vgg16": 16,
    "convnet": 9,
    "resnet18": 11,
    "resnet50": 19,
}
"""The number of stages of each model; a stage is a convolution, a residual block or a dense layer."""


def conv(inputs: int, outputs: int, kernel: int = 3) -> int:
    """Weights of a convolution: a square kernel for each pair of channels, and a bias for each output."""
    return (inputs * kernel * kernel + 1) * outputs


def dense(inputs: int, outputs: int) -> int:
    return (inputs + 1) * outputs


def norm(*channels: int) -> int:
    """Weights of norms: a factor and a bias for each channel."""
    return 2 * sum(channels)


def bottleneck(inputs: int, width: int) -> int:
    """Weights of a bottleneck: three convolutions without biases, and their norms."""
    return inputs * width + 9 * width * width + width * 4 * width + norm(width, width, 4 * width)


COUNTS: list[tuple[str | Spec, tuple[int, ...], int, int, int]] = [
    # 32x32 halved three times leaves 4x4.
    ("cnn", (3, 32, 32), 10, 19_466, conv(3, 16) + conv(16, 32) + conv(32, 32) + dense(32 * 4 * 4, 10)),
    (
        {"name": "cnn", "channels": [16, 64, 256]},  # 64x64 leaves 8x8
        (3, 64, 64),
        20,
        485_140,
        conv(3, 16) + conv(16, 64) + conv(64, 256) + dense(256 * 8 * 8, 20),
    ),
    (
        {"name": "cnn", "channels": [16, 32, 64, 64], "norm": "group"},  # 48x48 halved four times leaves 3x3
        (1, 48, 48),
        7,
        64_615,
        conv(1, 16) + conv(16, 32) + conv(32, 64) + conv(64, 64) + norm(16, 32, 64, 64) + dense(64 * 3 * 3, 7),
    ),
    # 128 time steps halved twice leave 32; a kernel of 5 steps for each pair of channels.
    ("cnn1d", (9, 128), 6, 274_822, (9 * 5 + 1) * 32 + (32 * 5 + 1) * 64 + dense(64 * 32, 128) + dense(128, 6)),
    # N_mod of the paper: 120 + 654 + 11,770.
    ("mix2fld-cnn", (1, 28, 28), 10, 12_544, conv(1, 12) + conv(12, 6) + dense(6 * 14 * 14, 10)),
    # 28 - 4 = 24, halved 12, - 4 = 8, halved 4.
    ("xormixfl-cnn", (1, 28, 28), 10, 2_032, conv(1, 6, 5) + conv(6, 6, 5) + dense(6 * 4 * 4, 10)),
    # As in the authors' published code: 28 - 2 = 26, halved 13, - 2 = 11, halved 5.
    (
        {"name": "xormixfl-cnn", "channels": 56, "kernel": 3, "hidden": [784]},
        (1, 28, 28),
        10,
        1_135_074,
        conv(1, 56) + conv(56, 56) + dense(56 * 5 * 5, 784) + dense(784, 10),
    ),
    # Geiping et al.'s ConvNet64: 32 divided by 3 twice leaves 3.
    (
        "convnet",
        (3, 32, 32),
        10,
        2_904_970,
        (conv(3, 64) + conv(64, 128) + conv(128, 128) + conv(128, 256) + 4 * conv(256, 256))
        + (norm(64, 128, 128) + 5 * norm(256) + dense(256 * 3 * 3, 10)),
    ),
    # 14,714,688 in the convolutions, as in every VGG-16.
    (
        "vgg16",
        (3, 32, 32),
        10,
        15_253_578,
        (conv(3, 64) + conv(64, 64) + conv(64, 128) + conv(128, 128) + conv(128, 256) + 2 * conv(256, 256))
        + (conv(256, 512) + 5 * conv(512, 512) + norm(*[64, 128] * 2, *[256] * 3, *[512] * 6))
        + (2 * dense(512, 512) + dense(512, 10)),
    ),
    # A block of equal widths c has 18 c^2 weights; one that doubles them 9 c 2c + 9 (2c)^2, and c 2c on its shortcut.
    (
        "resnet18",
        (3, 32, 32),
        10,
        11_173_962,
        (9 * 3 * 64 + 36 * 64**2 + sum(9 * 2 * c * c + 27 * 4 * c * c + 2 * c * c for c in (64, 128, 256)))
        + (norm(64, *[64] * 4, *[128] * 5, *[256] * 5, *[512] * 5) + dense(512, 10)),
    ),
    # Without norms each of these 4,800 channels has a bias instead of a factor and a bias.
    ({"name": "resnet18", "norm": "none"}, (3, 32, 32), 10, 11_169_162, 11_173_962 - 4_800),
    # A stage of n bottlenecks: the first on the last stage's channels, n - 1 on its own, and the first's shortcut.
    (
        "resnet50",
        (3, 32, 32),
        10,
        23_520_842,
        9 * 3 * 64
        + norm(64)
        + sum(
            bottleneck(a, w) + (n - 1) * bottleneck(4 * w, w) + a * 4 * w + norm(4 * w)
            for n, a, w in ((3, 64, 64), (4, 256, 128), (6, 512, 256), (3, 1024, 512))
        )
        + dense(2048, 10),
    ),
]


@each(("spec", "shape", "outputs", "number", "by_hand"), COUNTS)
def test_networks_have_as_many_weights_as_counted_by_hand(
    spec: str | Spec, shape: tuple[int, ...], outputs: int, number: int, by_hand: int
) -> None:
    with torch.device("meta"):
        model = registry.build("model", spec).build(shape, outputs)
    assert sum(p.numel() for p in model.parameters()) == number == by_hand


def test_a_model_of_mix2fld_is_sent_in_the_papers_number_of_bits() -> None:
    made = setup(images(side=28, classes=10), model="mix2fld-cnn", train={"cohort": 2})
    _, (record,) = run(made, 1)
    assert 8 * record["bytes_up"]["weights"] == 2 * 32 * 12_544


def normalised(x: torch.Tensor, over: tuple[int, ...], factor: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """(x - mean) / deviation over some axes, then an affine map of each channel."""
    centred = (x - x.mean(over, keepdim=True)) / (x.var(over, correction=0, keepdim=True) + 1e-5).sqrt()
    centred = centred if x.dim() == len(over) + 1 else centred.flatten(1, 2)
    axes = (-1, *[1] * (centred.dim() - 2))
    return centred * factor.view(axes) + bias.view(axes)


def batch_norm(x: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return normalised(x, (0, *range(2, x.dim())), factor, bias)


def group_norm(x: torch.Tensor, factor: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Four groups of channels."""
    grouped = x.unflatten(1, (4, -1))
    return normalised(grouped, tuple(range(2, grouped.dim())), factor, bias)


def restated(model: nn.Module, x: torch.Tensor, layers: str) -> torch.Tensor:
    """Compute the named ``layers`` with the model's weights, in order; the layers must use all weights."""
    weights = iter(model.parameters())
    for layer in layers.split():
        if layer in ("conv", "valid"):
            kernel = next(weights)
            convolve = F.conv2d if kernel.dim() == 4 else F.conv1d
            x = convolve(x, kernel, next(weights), padding=kernel.shape[-1] // 2 if layer == "conv" else 0)
        elif layer == "group":
            x = group_norm(x, next(weights), next(weights))
        elif layer == "batch":
            x = batch_norm(x, next(weights), next(weights))
        elif layer == "dense":
            x = x.flatten(1) @ next(weights).T + next(weights)
        elif layer == "relu":
            x = x.clamp(min=0)
        else:
            pool = F.max_pool2d if x.dim() == 4 else F.max_pool1d
            x = pool(x, int(layer.removeprefix("pool")))
    assert next(weights, None) is None
    return x


def vgg(run: int) -> str:
    return "conv group relu " * run + "pool2 "


LAYERS = {
    "cnn": "conv relu pool2 conv relu pool2 dense",
    "cnn, group norm": "conv group relu pool2 conv group relu pool2 dense relu dense",
    "cnn1d": "conv relu pool2 conv relu pool2 dense relu dense",
    "cnn1d, group norm": "conv group relu pool2 conv group relu pool2 dense",
    "mix2fld-cnn": "conv relu conv relu pool2 dense",
    "xormixfl-cnn": "valid relu pool2 valid relu pool2 dense relu dense",
    "vgg16": vgg(2) + vgg(2) + vgg(3) + vgg(3) + vgg(3) + "dense relu dense relu dense",
    "convnet": "conv group relu " * 6 + "pool3 " + "conv group relu " * 2 + "pool3 dense",
}


@each("name", LAYERS)
def test_networks_are_their_layers_restated(name: str) -> None:
    spec, shape = SMALL[name]
    model, x = built(spec, shape), samples(shape)
    torch.testing.assert_close(model(x), restated(model, x, LAYERS[name]), rtol=1e-9, atol=1e-9)


def test_convnet_has_batch_norm_unless_asked_otherwise() -> None:
    model, x = built({"name": "convnet", "width": 4}, (3, 18, 18)), samples((3, 18, 18), 4)
    assert model.training
    torch.testing.assert_close(
        model(x), restated(model, x, LAYERS["convnet"].replace("group", "batch")), rtol=1e-9, atol=1e-9
    )


def resnet(
    weights: Iterator[torch.Tensor],
    x: torch.Tensor,
    stages: tuple[int, ...],
    kernels: tuple[int, ...],
    after: Callable[..., torch.Tensor],
) -> torch.Tensor:
    """A residual network (He et al. 2016, figures 3 and 5) from its weights; ``kernels`` are the sizes in one block."""

    def convolved(x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        kernel = next(weights)
        if after is biased:
            return F.conv2d(x, kernel, next(weights), stride, kernel.shape[-1] // 2)
        return after(F.conv2d(x, kernel, None, stride, kernel.shape[-1] // 2), next(weights), next(weights))

    x = convolved(x).clamp(min=0)
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            halve = 2 if stage > 0 and block == 0 else 1
            # The block's first 3x3 convolution has the stride.
            y = convolved(x, halve if kernels[0] == 3 else 1)
            for i, kernel in enumerate(kernels[1:], 1):
                y = convolved(y.clamp(min=0), halve if kernel == 3 and 3 not in kernels[:i] else 1)
            shortcut = x if y.shape == x.shape else convolved(x, halve)
            x = (y + shortcut).clamp(min=0)
    return x.mean((2, 3)) @ next(weights).T + next(weights)


def biased(*_: torch.Tensor) -> torch.Tensor:
    """Stands for no norm: the convolution has a bias instead."""
    raise AssertionError


@pytest.mark.parametrize(("kind", "after"), [("group", group_norm), ("batch", batch_norm), ("none", biased)])
@pytest.mark.parametrize(
    ("name", "stages", "kernels"), [("resnet18", (2, 2, 2, 2), (3, 3)), ("resnet50", (3, 4, 6, 3), (1, 3, 1))]
)
def test_residual_networks_are_the_papers_restated(
    name: str, stages: tuple[int, ...], kernels: tuple[int, ...], kind: str, after: Callable[..., torch.Tensor]
) -> None:
    model = built({"name": name, "width": 8, "norm": kind}, (3, 16, 16))
    x, weights = samples((3, 16, 16)), iter(model.parameters())
    wanted = resnet(weights, x, stages, kernels, after)
    assert next(weights, None) is None
    torch.testing.assert_close(model(x), wanted, rtol=1e-8, atol=1e-8)


@small
def test_hidden_states_can_be_read_and_continued_from(spec: Spec, shape: tuple[int, ...]) -> None:
    model, x = built(spec, shape), samples(shape)
    whole = model(x)
    assert isinstance(model, Staged)
    assert whole.shape == (3, 3)
    for layer in range(len(model.stages) + 1):
        assert torch.equal(model(model(x, 0, layer), layer), whole)


@each(("name", "stages"), STAGES.items())
def test_a_stage_is_a_convolution_a_block_a_mean_over_the_image_or_a_dense_layer(name: str, stages: int) -> None:
    model = built(*SMALL[name])
    assert isinstance(model, Staged)
    assert len(model.stages) == stages
