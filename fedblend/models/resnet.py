"""Residual networks (He et al. 2016) for small images: ResNet-18 and ResNet-50."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from fedblend.core.registry import Count, part
from fedblend.models.layers import Normed, Staged, input_shape


class Residual(nn.Module):
    """relu(body(x) + shortcut(x)), for two modules with outputs of one shape."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body, self.shortcut = body, shortcut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, C, H, W] to [B, C', H', W']."""
        return torch.relu(self.body(x) + self.shortcut(x))


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ResNet(Normed):
    """A 3x3 convolution, four stages of residual blocks, a mean over the image, and a dense layer.

    The version for small images: the first convolution has a stride of 1 and no max pool follows it. The first block
    of each later stage halves the image and doubles the channels, with a 1x1 convolution on its shortcut.
    """

    blocks: ClassVar[tuple[int, ...]]
    expansion: ClassVar[int]

    width: Count = 64
    """Channels of the first stage (before a bottleneck's expansion); each later stage has twice as many."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 8x8."""
        channels, _, _ = input_shape(shape, self.name, 2, 8)
        stages: list[nn.Module] = [nn.Sequential(*self._convolution(channels, self.width, 3), nn.ReLU())]
        inputs = self.width
        for stage, count in enumerate(self.blocks):
            for block in range(count):
                width = self.width * 2**stage
                stages.append(self._block(inputs, width, stride=2 if stage and not block else 1))
                inputs = width * self.expansion
        return Staged(*stages, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()), nn.Linear(inputs, outputs))

    def _convolution(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
        # A norm subtracts the mean and has its own bias.
        bias = self.norm == "none"
        return [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=bias), *self.norms(outputs)]

    def _block(self, inputs: int, width: int, stride: int) -> Residual:
        outputs = width * self.expansion
        if self.expansion == 1:
            body = [*self._convolution(inputs, width, 3, stride), nn.ReLU(), *self._convolution(width, width, 3)]
        else:
            body = [
                *self._convolution(inputs, width, 1),
                nn.ReLU(),
                *self._convolution(width, width, 3, stride),
                nn.ReLU(),
                *self._convolution(width, outputs, 1),
            ]
        same = stride == 1 and inputs == outputs
        shortcut = nn.Identity() if same else nn.Sequential(*self._convolution(inputs, outputs, 1, stride))
        return Residual(nn.Sequential(*body), shortcut)


@part("model", "resnet18")
class ResNet18(ResNet):
    """ResNet-18 (He et al. 2016) for small images, as AggEnhance uses it (section 5.1).

    Stages of two blocks of two 3x3 convolutions, 64 to 512 channels. The first convolution is 3x3 with a stride of
    1 and without a max pool, the version for 32x32 images. The original has ``norm = "batch"``.
    """

    blocks = (2, 2, 2, 2)
    expansion = 1


@part("model", "resnet50")
class ResNet50(ResNet):
    """ResNet-50 (He et al. 2016) for small images, as Fed-AugMix uses it on CIFAR (section V-A).

    Stages of 3, 4, 6 and 3 bottlenecks: 1x1, 3x3 and 1x1 convolutions, the last with four times the channels, 256
    to 2048. The 3x3 convolution has the stride. The first convolution is 3x3 with a stride of 1 and without a max
    pool, the version for 32x32 images. The original has ``norm = "batch"``.
    """

    blocks = (3, 4, 6, 3)
    expansion = 4
