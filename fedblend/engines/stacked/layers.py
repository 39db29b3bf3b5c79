"""A model made ready for stacks: dropout with masks from outside, and layers in our kernels where those are faster.

Only layers that are PyTorch's own are replaced: a subclass or a hook may compute something else.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from fedblend import _kernels
from fedblend._kernels import build, tiles
from fedblend.engines.sgd import Precision

MOST_CHANNELS = 16
"""Input channels up to which our plain convolution is faster than oneDNN's (measured: benchmarks/kernels.py)."""

BLOCKS = {(_kernels.Convolution, nn.ReLU, _kernels.MaxPool), (_kernels.Convolution, _kernels.MaxPool, nn.ReLU)}
"""Kinds of layers in a row that are computed as one."""


class CannotStack(Exception):
    """Why clients of a model cannot be stacked, in words that go after "cannot be used here: "."""


class MaskedDropout(nn.Module):
    """Dropout whose mask is given: float32 with the input's shape, 0 or 1 / (1 - p).

    A mask may have rows for a larger pass; a smaller one takes the first.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x * mask; x itself where no mask is set. Raises :class:`ValueError` where the mask does not fit."""
        if self.mask is None:
            return x
        if self.mask.shape[1:] != x.shape[1:] or len(self.mask) < len(x):
            raise ValueError(f"a dropout layer's input is {list(x.shape)}, its mask {list(self.mask.shape)}")
        return x * (self.mask if len(self.mask) == len(x) else self.mask[: len(x)])


class JoinedRow(nn.Sequential):
    """A row of layers that computes convolution, ReLU and max pool in one go; its layers can still be called singly."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the layers give one after another."""
        layers, i = list(self), 0
        while i < len(layers):
            if _is_block(layers[i : i + 3]):
                x, i = layers[i](x, pooled=True), i + 3
            else:
                x, i = layers[i](x), i + 1
        return x


def prepare_model(model: nn.Module, device: torch.device, precision: Precision = "float32") -> nn.Module:
    """A copy of a model for stacks, in training mode on ``device``."""
    made = copy.deepcopy(model).to(device).train()
    for layer in list(made.modules()):
        for name, child in list(layer.named_children()):
            if _is(child, nn.Dropout):
                setattr(layer, name, MaskedDropout(child.p))  # type: ignore[arg-type]
    if device.type == "cpu" and build.library() is not None:
        for layer in list(made.modules()):
            for name, child in list(layer.named_children()):
                if _is(child, nn.Conv2d) and _is_ours(child, precision):  # type: ignore[arg-type]
                    setattr(layer, name, _kernels.Convolution(child))  # type: ignore[arg-type]
                elif _is(child, nn.MaxPool2d) and _is_two_by_two(child):  # type: ignore[arg-type]
                    setattr(layer, name, _kernels.MaxPool())
            if type(layer) is nn.Sequential:
                layer.__class__ = JoinedRow
    return made


def dropouts(model: nn.Module) -> dict[str, MaskedDropout]:
    """The dropout layers of a prepared model that drop anything, by name, in the model's order."""
    return {name: m for name, m in model.named_modules() if isinstance(m, MaskedDropout) and m.p > 0}


def _is(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a layer is of exactly this kind, and does nothing else beside."""
    return type(layer) is kind and not _is_watched(layer)


def _is_watched(layer: nn.Module) -> bool:
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks)


def _is_block(layers: list[nn.Module]) -> bool:
    """Whether layers are a block that is computed as one, and each is nothing else beside."""
    kinds = [type(layer) for layer in layers]
    is_one = kinds[:1] == [_kernels.Convolution] and kinds[1:] in (
        [nn.ReLU, _kernels.MaxPool],
        [_kernels.MaxPool, nn.ReLU],
    )
    return is_one and not any(map(_is_watched, layers))


def _is_ours(layer: nn.Conv2d, precision: Precision) -> bool:
    plain = layer.stride == (1, 1) and layer.dilation == (1, 1) and layer.groups == 1
    zeros = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    if not (plain and zeros and layer.padding[0] == layer.padding[1]):
        return False
    # oneDNN runs bfloat16 on the same units, and only once for each product.
    exact = precision != "bfloat16"
    large = exact and tiles.take(layer.in_channels, layer.out_channels, layer.kernel_size, int(layer.padding[0]))
    return large or layer.in_channels <= MOST_CHANNELS


def _is_two_by_two(layer: nn.MaxPool2d) -> bool:
    settings = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    return settings in ((2, 2, 0, 1), ((2, 2), (2, 2), 0, 1)) and not layer.ceil_mode and not layer.return_indices
