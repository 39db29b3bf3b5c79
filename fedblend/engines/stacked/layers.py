"""Preparation of a model for stacks: dropout with given masks, and fedblend's kernels where they are faster."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import nn

from fedblend._kernels.kernel_layers import is_exactly, use_kernels
from fedblend.engines.sgd import Precision


class CannotStack(Exception):
    """A model's clients cannot be stacked; the message is the reason, and follows "cannot be used here: "."""


class MaskedDropout(nn.Module):
    """Dropout by given masks: float32 with the input's shape, 0 or 1 / (1 - p).

    Without ``masks``, and in evaluation mode, it drops nothing.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.masks: Callable[[torch.Tensor, float], torch.Tensor] | None = None
        """A function of the layer's input and probability that gives the mask of this call."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times its mask."""
        return x if self.masks is None or not self.training else x * self.masks(x, self.p)


def prepare_model(
    model: nn.Module, device: torch.device, precision: Precision = "float32", kernels: Mapping[str, str] | None = None
) -> nn.Module:
    """Return a copy of a model for stacks on ``device``; ``kernels`` is that of `use_kernels`."""
    prepared = copy.deepcopy(model).to(device)
    for layer in list(prepared.modules()):
        # Not named_children, which gives a layer that a model uses in two places once.
        for name, child in list(layer._modules.items()):
            if isinstance(child, nn.Dropout) and is_exactly(child, nn.Dropout):
                setattr(layer, name, MaskedDropout(child.p))
    use_kernels(prepared, device, precision, kernels)
    return prepared


def dropouts(model: nn.Module) -> list[MaskedDropout]:
    """Return the dropout layers of a prepared model with p above 0."""
    return [m for m in model.modules() if isinstance(m, MaskedDropout) and m.p > 0]
