"""A network as an objective calls it: with its own weights, or with others."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedblend.core.module import evaluating
from fedblend.core.trees import Tensors


class _ModuleNet:
    """What nets of a module share."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def with_weights(self, weights: Tensors, training: bool = True) -> FunctionalNet:
        """Return the model with other weights, and copies of their buffers, which batch norm changes in training."""
        buffers = {name: weights[name].clone() for name, _ in self.model.named_buffers() if name in weights}
        # Of a tensor that layers share, the first name alone.
        parameters = {name: weights[name] for name, _ in self.model.named_parameters() if name in weights}
        return FunctionalNet(self.model, {**parameters, **buffers}, training)

    @property
    def layers(self) -> int:
        """Layers of a staged model; 0 of any other."""
        return len(getattr(self.model, "stages", ()))


class EagerNet(_ModuleNet):
    """A module as :class:`fedblend.core.context.Net`, differentiated by autograd."""

    @property
    def weights(self) -> Tensors:
        """The module's own trained parameters."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the model's outputs, or hidden states of a staged model."""
        return self.model(x) if start == 0 and stop is None else self.model(x, start, stop)

    def input_gradient(
        self, scalar: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return d value / d x, value and aux; the weights' gradient flows through all three."""
        x = x.detach().requires_grad_()
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused attention has no second derivative
            value, aux = scalar(x)
        (gradient,) = torch.autograd.grad(value, x, create_graph=True)
        return gradient, value, aux


class FunctionalNet(_ModuleNet):
    """A module with given weights as :class:`fedblend.core.context.Net`, differentiated by ``torch.func``."""

    def __init__(self, model: nn.Module, weights: Tensors, training: bool = True) -> None:
        super().__init__(model)
        self.weights, self.training = dict(weights), training

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Return the model's outputs, or hidden states of a staged model."""
        inputs = (x,) if start == 0 and stop is None else (x, start, stop)
        if self.training:
            return functional_call(self.model, self.weights, inputs)
        with evaluating(self.model) as model:
            return functional_call(model, self.weights, inputs)

    def input_gradient(
        self, scalar: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return d value / d x, value and aux, all differentiable."""
        with sdpa_kernel(SDPBackend.MATH):
            gradient, (value, aux) = torch.func.grad_and_value(scalar, has_aux=True)(x)
        return gradient, value, aux
