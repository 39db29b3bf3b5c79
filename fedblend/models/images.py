"""Convolutional networks for images, and a perceptron for anything flat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, Float, Fraction, part
from fedblend.models.staged import Staged


def image_shape(shape: Sequence[int], model: str, least: int) -> tuple[int, int, int]:
    """(channels, height, width) of an input, or :class:`FedblendError` if it is no image of that size."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise FedblendError(
            f"model.name: '{model}' takes images of at least {least}x{least} pixels; this data set's samples "
            f"are of shape {list(shape)}, which 'mlp' takes, as any"
        )
    return shape[0], shape[1], shape[2]


@part("model", "lenet5")
class LeNet5:
    """LeNet-5 (LeCun et al. 1998) as FedMix uses it: 5x5 convolutions 6 and 16, max pools, 120-84-outputs.

    Inputs of 28x28 are padded by 2, so that the first dense layer sees 16x5x5 as for 32x32.
    """

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The network for inputs of ``shape`` = (channels, height, width), at least 12x12."""
        channels, height, width = image_shape(shape, "lenet5", 12)
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
        """The network for inputs of ``shape`` = (channels, height, width), at least 8x8."""
        channels, height, width = image_shape(shape, "fedmix-vgg", 8)
        widths = (32, 64, 128, 128, 256, 256)
        stages: list[nn.Module] = []
        for i, (a, b) in enumerate(zip((channels, *widths[:-1]), widths, strict=True)):
            layers: list[nn.Module] = [nn.Conv2d(a, b, 3, padding=1), nn.ReLU()]
            if i % 2:
                layers.append(nn.MaxPool2d(2))
            if i in (3, 5):
                layers.append(nn.Dropout(self.dropout))
            stages.append(nn.Sequential(*layers))
        flat = 256 * (height // 8) * (width // 8)
        stages.append(nn.Sequential(nn.Flatten(), nn.Linear(flat, 512), nn.ReLU()))
        stages.append(nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Dropout(self.dropout)))
        stages.append(nn.Linear(512, outputs))
        return Staged(*stages)


@part("model", "mlp")
class MLP:
    """A multilayer perceptron with ReLU; ``hidden = []`` is a linear (softmax regression) model.

    AggEnhance trains one on MNIST (section 4.2) and does not give its widths.
    """

    hidden: tuple[Count, ...] = (200, 100)
    """Widths of the hidden layers; none makes a linear model."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropout after each hidden layer."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The network for inputs of any ``shape``; they are flattened."""
        widths = [math.prod(shape), *self.hidden]
        stages: list[nn.Module] = []
        for a, b in pairwise(widths):
            layers: list[nn.Module] = [nn.Linear(a, b), nn.ReLU()]
            if self.dropout:
                layers.append(nn.Dropout(self.dropout))
            stages.append(nn.Sequential(*layers))
        stages.append(nn.Linear(widths[-1], outputs))
        stages[0] = nn.Sequential(nn.Flatten(), stages[0])
        return Staged(*stages)
