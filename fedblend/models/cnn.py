"""Small convolutional networks for images and signals, most of them the papers', and a multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedblend.core.registry import Count, Float, Fraction, part
from fedblend.models.layers import Norm, Normed, Staged, head, input_shape

Widths = Annotated[tuple[Count, ...], Field(min_length=1)]
"""Channels of each block; at least one block."""


@part("model", "lenet5")
class LeNet5:
    """LeNet-5 (LeCun et al. 1998) as FedMix uses it: 5x5 convolutions 6 and 16, max pools, 120-84-outputs.

    Inputs of 28x28 are padded by 2, so the first dense layer has inputs of 16x5x5, as for 32x32.
    """

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 12x12."""
        channels, height, width = input_shape(shape, "lenet5", 2, 12)
        padding = 2 if height < 32 else 0
        side = [((s + 2 * padding - 4) // 2 - 4) // 2 for s in (height, width)]
        return Staged(
            nn.Sequential(nn.Conv2d(channels, 6, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(16 * side[0] * side[1], 120), nn.ReLU()),
            nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, outputs),
        )


@part("model", "fedmix-vgg")
class FedMixVGG:
    """FedMix's VGG (appendix B): 3x3 convolutions 32-64-128-128-256-256 with a max pool after every second.

    Then three dense layers of hidden size 512; dropout 0.1 after the second and third pool and before the
    last dense layer; no batch norm.
    """

    dropout: Fraction = 0.1
    """Probability of dropout."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 8x8."""
        channels, height, width = input_shape(shape, "fedmix-vgg", 2, 8)
        stages: list[nn.Module] = []
        for i, (a, b) in enumerate(pairwise((channels, 32, 64, 128, 128, 256, 256))):
            after = [nn.MaxPool2d(2)] * (i % 2) + [nn.Dropout(self.dropout)] * (i in (3, 5))
            stages.append(nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *after))
        return Staged(
            *stages,
            nn.Sequential(nn.Flatten(), nn.Linear(256 * (height // 8) * (width // 8), 512), nn.ReLU()),
            nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(self.dropout)),
            nn.Linear(512, outputs),
        )


@part("model", "cnn")
class CNN(Normed):
    """Blocks of convolution, norm, ReLU and max pool, then dense layers (AggEnhance, section 4.2).

    AggEnhance's networks are ``channels = [16, 32, 32]`` for CIFAR-10, ``[16, 64, 256]`` for PASCAL VOC, both
    without norm, and ``[16, 32, 64, 64]`` with ``norm = "group"`` for FER. The paper gives neither sizes of kernels
    and pools nor dense layers. Here, convolutions keep the image's size, 2x2 max pools halve it, rounded down, and one
    dense layer follows.
    """

    norm: Norm = "none"
    """Normalisation between each convolution and its ReLU; "batch" needs the engine "loop"."""
    channels: Widths = (16, 32, 32)
    """Channels of each block; each block halves the image."""
    kernel: Literal[1, 3, 5, 7] = 3
    """Height and width of the kernels in pixels; images are padded to keep their size."""
    hidden: tuple[Count, ...] = ()
    """Widths of the hidden dense layers; may be empty."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 2^blocks in both."""
        scale = 2 ** len(self.channels)
        inputs, height, width = input_shape(shape, self.name, 2, scale)
        flat = self.channels[-1] * (height // scale) * (width // scale)
        return Staged(*self.halving(inputs, self.channels, self.kernel), *head(flat, self.hidden, outputs))


@part("model", "cnn1d")
class CNN1d(Normed):
    """A small 1-D network for windows of signals, such as UCI HAR's 9 channels of 128 time steps.

    Blocks of a convolution over time that keeps its length, norm, ReLU and a max pool that halves it, rounded
    down; then dense layers. It is not from a paper.
    """

    norm: Norm = "none"
    """Normalisation between each convolution and its ReLU; "batch" needs the engine "loop"."""
    channels: Widths = (32, 64)
    """Channels of each block; each block halves the time."""
    kernel: Literal[1, 3, 5, 7, 9] = 5
    """Length of the kernels in time steps; windows are padded to keep their length."""
    hidden: tuple[Count, ...] = (128,)
    """Widths of the hidden dense layers; may be empty."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, time), with a time of at least 2^blocks."""
        scale = 2 ** len(self.channels)
        inputs, time = input_shape(shape, self.name, 1, scale)
        blocks = self.halving(inputs, self.channels, self.kernel, dimensions=1)
        return Staged(*blocks, *head(self.channels[-1] * (time // scale), self.hidden, outputs))


@part("model", "mix2fld-cnn")
class Mix2FLDCNN:
    """Mix2FLD's network (section IV): 3x3 convolutions 12 and 6, one 2x2 max pool, one dense layer.

    The paper gives three layers and N_mod = 12,544 weights, but no widths. These widths give that number for 28x28
    images and ten labels, with biases: (9 + 1) 12 + (108 + 1) 6 + (1176 + 1) 10. So a model is 32 x 12,544 bits.
    """

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 2x2."""
        channels, height, width = input_shape(shape, "mix2fld-cnn", 2, 2)
        return Staged(
            nn.Sequential(nn.Conv2d(channels, 12, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *head(6 * (height // 2) * (width // 2), (), outputs),
        )


@part("model", "xormixfl-cnn")
class XorMixFLCNN:
    """XorMixFL's network: two convolutions, each with ReLU and a 2x2 max pool, then dense layers.

    The paper describes no network. The default is 5x5 convolutions of 6 channels and one dense layer: 2,032 weights
    for 28x28 images. The authors' published code has one network of 1,135,074 weights for all methods: ``channels = 56,
    kernel = 3, hidden = [784]``.
    """

    channels: Count = 6
    """Channels of both convolutions."""
    kernel: Literal[3, 5] = 5
    """Height and width of the kernels in pixels; without padding, each convolution takes kernel - 1 pixels."""
    hidden: tuple[Count, ...] = ()
    """Widths of the hidden dense layers; may be empty."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 10x10 (kernel 5: 16x16)."""
        lost = self.kernel - 1
        # The smallest side whose second pool has two pixels.
        inputs, height, width = input_shape(shape, "xormixfl-cnn", 2, 2 * (2 + lost) + lost)
        side = [((s - lost) // 2 - lost) // 2 for s in (height, width)]
        return Staged(
            nn.Sequential(nn.Conv2d(inputs, self.channels, self.kernel), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(self.channels, self.channels, self.kernel), nn.ReLU(), nn.MaxPool2d(2)),
            *head(self.channels * side[0] * side[1], self.hidden, outputs),
        )


@part("model", "mlp")
class MLP:
    """A multilayer perceptron with ReLU; ``hidden = []`` is a linear (softmax regression) model.

    AggEnhance trains one on MNIST (section 4.2) and does not give its widths.
    """

    hidden: tuple[Count, ...] = (200, 100)
    """Widths of the hidden layers; an empty list is a linear model."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropout after each hidden layer."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of any ``shape``, which are flattened."""
        widths = [math.prod(shape), *self.hidden]
        stages: list[nn.Module] = []
        for a, b in pairwise(widths):
            drop = [nn.Dropout(self.dropout)] if self.dropout else []
            stages.append(nn.Sequential(nn.Linear(a, b), nn.ReLU(), *drop))
        stages.append(nn.Linear(widths[-1], outputs))
        stages[0] = nn.Sequential(nn.Flatten(), stages[0])
        return Staged(*stages)
