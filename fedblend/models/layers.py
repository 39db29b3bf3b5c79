"""Pieces of several networks: stages, normalisation, dense layers, and checks of the input's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn
from torch.func import functional_call

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count


class Staged(nn.Module):
    """A model as a sequence of stages; ``forward(x, start, stop)`` runs stages ``start`` to ``stop`` - 1.

    So the hidden states after k stages can be read and changed: ``forward(forward(x, 0, k), k)`` equals ``forward(x)``.
    """

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Run stages ``start`` to ``stop`` - 1; by default all."""
        for stage in list(self.stages)[start:stop]:
            x = stage(x)
        return x


Norm = Literal["group", "batch", "none"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Normed:
    """A network with an optional normalisation after each convolution.

    AggEnhance (section 4.2) takes group norm (Wu and He 2018) with four groups instead of batch norm, because
    statistics of a batch mislead when clients have different labels. Batch norm also has running statistics, so a model
    with batch norm needs the loop engine, and batches of at least two samples.
    """

    name: ClassVar[str]

    norm: Norm = "group"
    """Normalisation after each convolution; "batch" needs the engine "loop"."""
    groups: Count = 4
    """Groups of channels in a group norm; must divide the channels of every convolution."""

    def norms(self, channels: int, dimensions: int = 2) -> list[nn.Module]:
        """The layers after a convolution with ``channels`` outputs: one normalisation, or none."""
        if self.norm == "group" and channels % self.groups:
            valid = ", ".join(str(n) for n in range(1, channels + 1) if channels % n == 0)
            found = f"{self.groups} does not divide the {channels} channels of a convolution of '{self.name}'"
            raise FedblendError(f"model.groups: {found}; valid: {valid}")
        if self.norm == "group":
            return [nn.GroupNorm(self.groups, channels)]
        batch = nn.BatchNorm2d if dimensions == 2 else nn.BatchNorm1d
        return [batch(channels)] if self.norm == "batch" else []

    def halving(self, inputs: int, channels: Sequence[int], kernel: int, dimensions: int = 2) -> list[nn.Module]:
        """Convolutions that keep the size, each with norm, ReLU and a max pool that halves it, rounded down."""
        layer, pool = (nn.Conv2d, nn.MaxPool2d) if dimensions == 2 else (nn.Conv1d, nn.MaxPool1d)
        return [
            nn.Sequential(layer(a, b, kernel, padding=kernel // 2), *self.norms(b, dimensions), nn.ReLU(), pool(2))
            for a, b in pairwise((inputs, *channels))
        ]


def head(inputs: int, hidden: Sequence[int], outputs: int, dropout: float = 0.0) -> list[nn.Module]:
    """Dense stages after a flattening: ``hidden`` layers with ReLU and dropout, then ``outputs`` units."""
    widths = [inputs, *hidden]
    stages: list[list[nn.Module]] = []
    for a, b in pairwise(widths):
        drop = [nn.Dropout(dropout)] if dropout else []
        stages.append([nn.Linear(a, b), nn.ReLU(), *drop])
    stages.append([nn.Linear(widths[-1], outputs)])
    stages[0].insert(0, nn.Flatten())
    return [nn.Sequential(*layers) for layers in stages]


def input_shape(shape: Sequence[int], model: str, axes: int, least: int) -> Sequence[int]:
    """``shape`` itself: channels, and ``axes`` sides of at least ``least``. Raises :class:`FedblendError` otherwise."""
    if len(shape) != 1 + axes or min(shape[1:]) < least:
        images, windows = f"images of at least {least}x{least} pixels", f"windows of at least {least} time steps"
        found = f"this data set's samples have shape {list(shape)}"
        takes = f"'{model}' takes {images if axes == 2 else windows}"
        raise FedblendError(f"model.name: {takes}; {found}; 'mlp' takes any shape")
    return shape


def last_layer(model: nn.Module) -> tuple[str, nn.Module]:
    """The last layer of a model with weights of its own, in the order in which the model declares them, by name."""
    layers = [(name, layer) for name, layer in model.named_modules() if [*layer.parameters(recurse=False)]]
    if not layers:
        raise FedblendError("model: it has no weights, and so no last layer")
    return layers[-1]


def with_features(
    model: nn.Module, x: torch.Tensor, weights: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A model's outputs, and its features [n, d]: the inputs of its last layer with weights, flattened.

    ``weights`` by name stand in place of its own. Gradients flow through both. Raises :class:`FedblendError` where that
    layer is not called once.
    """
    name, layer = last_layer(model)
    read: list[torch.Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    try:
        outputs = functional_call(model, dict(weights or {}), (x,))
    finally:
        handle.remove()
    if len(read) != 1:
        found = f"its last layer with weights, '{name}', is called {len(read)} times for an input"
        raise FedblendError(f"model: {found}; its inputs are the features, so that it must be called once")
    return outputs, read[0].flatten(1)
