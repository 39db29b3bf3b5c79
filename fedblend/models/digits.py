"""The small convolutional networks of Mix2FLD and XorMixFL, for 28x28 digits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import nn

from fedblend.core.registry import Count, part
from fedblend.models.blocks import head
from fedblend.models.images import image_shape
from fedblend.models.staged import Staged


@part("model", "mix2fld-cnn")
class Mix2FLDCNN:
    """Mix2FLD's network (section IV): 3x3 convolutions 12 and 6, one 2x2 max pool, one dense layer.

    The paper gives three layers and N_mod = 12,544, no widths. These give that number for 28x28 images and ten
    labels, biases among them: (9 + 1) 12 + (108 + 1) 6 + (1176 + 1) 10. So a model is 32 x 12,544 bits.
    """

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The network for inputs of ``shape`` = (channels, height, width), at least 2x2."""
        channels, height, width = image_shape(shape, "mix2fld-cnn", 2)
        return Staged(
            nn.Sequential(nn.Conv2d(channels, 12, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(12, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *head(6 * (height // 2) * (width // 2), (), outputs),
        )


@part("model", "xormixfl-cnn")
class XorMixFLCNN:
    """XorMixFL's network: two convolutions, each with ReLU and a 2x2 max pool, then dense layers.

    The paper describes none. By default 5x5 convolutions of 6 channels and one dense layer: 2,032 weights for digits.
    The authors' published code has one network for all methods, of 1,135,074: ``channels = 56, kernel = 3,
    hidden = [784]``.
    """

    channels: Count = 6
    """Channels of both convolutions."""
    kernel: Literal[3, 5] = 5
    """Height and width of the kernels in pixels; images are not padded, and so lose kernel - 1."""
    hidden: tuple[Count, ...] = ()
    """Widths of the dense layers before the last; none leaves one dense layer."""

    def build(self, shape: Sequence[int], outputs: int) -> nn.Module:
        """The network for inputs of ``shape`` = (channels, height, width), at least 10x10, or 16x16 of 5x5 kernels."""
        lost = self.kernel - 1
        # The least side that leaves one pixel: the second pool needs two.
        inputs, height, width = image_shape(shape, "xormixfl-cnn", 2 * (2 + lost) + lost)
        side = [((s - lost) // 2 - lost) // 2 for s in (height, width)]
        return Staged(
            nn.Sequential(nn.Conv2d(inputs, self.channels, self.kernel), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(self.channels, self.channels, self.kernel), nn.ReLU(), nn.MaxPool2d(2)),
            *head(self.channels * side[0] * side[1], self.hidden, outputs),
        )
