"""Deep networks of 3x3 convolutions: VGG-16 for small images, and the ConvNet of gradient inversion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field
from torch import nn

from fedblend.core.registry import Count, Float, part
from fedblend.models.layers import Norm, Normed, Staged, head, input_shape


def convolutions(network: Normed, inputs: int, runs: Sequence[Sequence[int]], pool: int) -> list[nn.Module]:
    """One stage for each padded 3x3 convolution, with norm and ReLU; each run of widths ends with a max pool."""
    stages: list[nn.Module] = []
    for widths in runs:
        for i, width in enumerate(widths):
            end = [nn.MaxPool2d(pool)] if i == len(widths) - 1 else []
            layer = nn.Conv2d(inputs, width, 3, padding=1)
            stages.append(nn.Sequential(layer, *network.norms(width), nn.ReLU(), *end))
            inputs = width
    return stages


@part("model", "vgg16")
class VGG16(Normed):
    """VGG-16 (Simonyan and Zisserman 2015, D) for small images, as AggEnhance uses it (section 5.1).

    Thirteen 3x3 convolutions, 64-64, 128-128, 256-256-256 and twice 512-512-512, each run with a 2x2 max pool at
    its end, then three dense layers. 32x32 images give 1x1x512, so the hidden dense layers have 512 units instead
    of the 4096 for 224x224; AggEnhance does not state them. The original has no norm: ``norm = "none"``.
    """

    width: Count = 64
    """Channels of the first run; later ones have 2, 4, 8 and 8 times as many."""
    hidden: tuple[Count, ...] = (512, 512)
    """Widths of the hidden dense layers."""
    dropout: Annotated[Float, Field(ge=0, lt=1)] = 0.5
    """Probability of dropout after each hidden dense layer."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 32x32."""
        channels, height, width = input_shape(shape, self.name, 2, 32)
        w = self.width
        runs = ([w] * 2, [2 * w] * 2, [4 * w] * 3, [8 * w] * 3, [8 * w] * 3)
        flat = 8 * w * (height // 32) * (width // 32)
        return Staged(*convolutions(self, channels, runs, 2), *head(flat, self.hidden, outputs, self.dropout))


@part("model", "convnet")
class ConvNet(Normed):
    """The ConvNet of 8 convolutions of the papers on gradient inversion (Geiping et al. 2020; Fed-AugMix).

    3x3 convolutions of w, 2w, 2w, 4w, 4w, 4w channels, a 3x3 max pool, two of 4w, a 3x3 max pool, one dense layer.
    Width 64 and batch norm are those of Geiping et al.'s published code.
    """

    norm: Norm = "batch"
    """Normalisation between each convolution and its ReLU; "batch" needs the engine "loop"."""
    width: Count = 64
    """Channels w of the first convolution."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """Build the network for inputs of ``shape`` = (channels, height, width), at least 9x9."""
        channels, height, width = input_shape(shape, self.name, 2, 9)
        w = self.width
        runs = ([w, 2 * w, 2 * w, 4 * w, 4 * w, 4 * w], [4 * w] * 2)
        return Staged(*convolutions(self, channels, runs, 3), *head(4 * w * (height // 9) * (width // 9), (), outputs))
