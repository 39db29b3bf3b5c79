"""A model whose outputs for one batch are computed once; and mean outputs by label."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedblend.core.objective import Net
from fedblend.core.trees import Tensors


class OutputCache:
    """A net whose outputs for one input are kept: to be noted, and to be used again by terms that ask for the same.

    Only what is computed with the same weights may be used again, so there is one for each phase of a step.
    """

    def __init__(self, net: Net, x: torch.Tensor) -> None:
        self.net, self.x = net, x
        self.outputs: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """The model's outputs, computed once for the input that is watched."""
        if x is not self.x or start != 0 or stop is not None:
            return self.net(x, start, stop)
        if self.outputs is None:
            self.outputs = self.net(x)
        return self.outputs

    def input_gradient(
        self, scalar: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The net's own."""
        return self.net.input_gradient(scalar, x)

    def with_weights(self, weights: Tensors) -> Net:
        """The net with other weights, without a cache."""
        return self.net.with_weights(weights)

    @property
    def layers(self) -> int:
        """The net's layers."""
        return self.net.layers

    def distribution(self) -> torch.Tensor:
        """Softmax outputs [B, C] for the input that is watched."""
        outputs = self(self.x)
        return outputs.detach().softmax(-1)


class LabelMeans:
    """Mean outputs by label of one client or of a stack of them, added up on the device."""

    def __init__(self, classes: int, device: torch.device, clients: int = 1) -> None:
        self.classes = classes
        self.sums = torch.zeros(clients * classes, classes, device=device)
        self.counts = torch.zeros(clients * classes, device=device)

    def add(
        self,
        outputs: torch.Tensor,
        labels: torch.Tensor,
        first: int | torch.Tensor = 0,
        active: torch.Tensor | None = None,
    ) -> None:
        """Add softmax outputs [K, B, C] of samples with labels [K, B], of the clients from ``first`` (int64 [1]) on.

        Where ``active`` bool [K] is given and false, a client counts for nothing.
        """
        number = first + torch.arange(len(labels), device=labels.device)
        rows = (labels + self.classes * number[:, None]).flatten()
        ones = torch.ones_like(labels, dtype=torch.float32)
        if active is not None:
            # Not a product with 0: what is held still may have gone to infinity.
            outputs, ones = outputs.where(active[:, None, None], 0.0), ones.where(active[:, None], 0.0)
        self.sums.index_add_(0, rows, outputs.flatten(0, 1).float())
        self.counts.index_add_(0, rows, ones.flatten())

    def of(self, client: int = 0) -> torch.Tensor:
        """Mean outputs by label of a client of the stack [C, C]; zeros for a label that never came."""
        return self.all()[client]

    def all(self) -> torch.Tensor:
        """Mean outputs by label of every client of the stack [K, C, C], at the host."""
        means = self.sums / self.counts.clamp(min=1)[:, None]
        return means.view(-1, self.classes, self.classes).cpu()

    def clear(self) -> None:
        """Forget all."""
        self.sums.zero_()
        self.counts.zero_()
