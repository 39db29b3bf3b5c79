"""Convolutional networks made of blocks whose widths are options: for images, and for windows of signals."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.models.images import image_shape
from fedblend.models.norms import Norm, Normed
from fedblend.models.staged import Staged

Widths = Annotated[tuple[Count, ...], Field(min_length=1)]
"""Channels of each block, of which there is at least one."""


def head(inputs: int, hidden: Sequence[int], outputs: int, dropout: float = 0.0) -> list[nn.Module]:
    """Dense stages for inputs that are flattened first: ``hidden`` ones with ReLU and dropout, then the outputs."""
    widths = [inputs, *hidden]
    stages: list[list[nn.Module]] = []
    for a, b in pairwise(widths):
        drop = [nn.Dropout(dropout)] if dropout else []
        stages.append([nn.Linear(a, b), nn.ReLU(), *drop])
    stages.append([nn.Linear(widths[-1], outputs)])
    stages[0].insert(0, nn.Flatten())
    return [nn.Sequential(*layers) for layers in stages]


def signal_shape(shape: Sequence[int], model: str, least: int) -> tuple[int, int]:
    """(channels, time) of an input, or :class:`FedblendError` if it is no window of signals that long."""
    if len(shape) != 2 or shape[1] < least:
        raise FedblendError(
            f"model.name: '{model}' takes windows of signals (channels x time) of at least {least} time steps; this "
            f"data set's samples are of shape {list(shape)}, which 'mlp' takes, as any"
        )
    return shape[0], shape[1]


@part("model", "cnn")
class CNN(Normed):
    """Blocks of convolution, norm, ReLU and max pool, then dense layers (AggEnhance, section 4.2).

    AggEnhance's networks are ``channels = [16, 32, 32]`` for CIFAR-10, ``[16, 64, 256]`` for PASCAL VOC, both
    without norm, and ``[16, 32, 64, 64]`` with ``norm = "group"`` for FER. The paper gives neither sizes of kernels
    and pools nor dense layers. Ours are convolutions that keep the image's size, 2x2 max pools that halve it,
    rounded down, and one dense layer.
    """

    norm: Norm = "none"
    """What stands between each convolution and its ReLU; "batch" needs the engine "loop"."""
    channels: Widths = (16, 32, 32)
    """Channels of each block; each block halves the image."""
    kernel: Literal[1, 3, 5, 7] = 3
    """Height and width of the kernels in pixels; images are padded to keep their size."""
    hidden: tuple[Count, ...] = ()
    """Widths of the dense layers before the last; none leaves one dense layer."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The network for inputs of ``shape`` = (channels, height, width), at least 2^blocks in both."""
        scale = 2 ** len(self.channels)
        inputs, height, width = image_shape(shape, self.name, scale)
        stages: list[nn.Module] = []
        for a, b in pairwise((inputs, *self.channels)):
            layer = nn.Conv2d(a, b, self.kernel, padding=self.kernel // 2)
            stages.append(nn.Sequential(layer, *self.norms(b), nn.ReLU(), nn.MaxPool2d(2)))
        flat = self.channels[-1] * (height // scale) * (width // scale)
        return Staged(*stages, *head(flat, self.hidden, outputs))


@part("model", "cnn1d")
class CNN1d(Normed):
    """A small 1-D network for windows of signals, such as UCI HAR's 9 channels of 128 time steps.

    Blocks of a convolution over time that keeps its length, norm, ReLU and a max pool that halves it, rounded
    down; then dense layers. It is no paper's.
    """

    norm: Norm = "none"
    """What stands between each convolution and its ReLU; "batch" needs the engine "loop"."""
    channels: Widths = (32, 64)
    """Channels of each block; each block halves the time."""
    kernel: Literal[1, 3, 5, 7, 9] = 5
    """Length of the kernels in time steps; windows are padded to keep their length."""
    hidden: tuple[Count, ...] = (128,)
    """Widths of the dense layers before the last; none leaves one dense layer."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The network for inputs of ``shape`` = (channels, time), with a time of at least 2^blocks."""
        scale = 2 ** len(self.channels)
        inputs, time = signal_shape(shape, self.name, scale)
        stages: list[nn.Module] = []
        for a, b in pairwise((inputs, *self.channels)):
            layer = nn.Conv1d(a, b, self.kernel, padding=self.kernel // 2)
            stages.append(nn.Sequential(layer, *self.norms(b, dimensions=1), nn.ReLU(), nn.MaxPool1d(2)))
        return Staged(*stages, *head(self.channels[-1] * (time // scale), self.hidden, outputs))
