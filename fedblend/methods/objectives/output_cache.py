"""Outputs of a model on its training batches: cached for reuse within a step, and averaged by label."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fedblend.core.context import Net
from fedblend.core.trees import Tensors


class NetAround:
    """What a net around another net takes from it; its own are the outputs (``__call__``)."""

    def __init__(self, net: Net) -> None:
        self.net = net

    def input_gradient(
        self, scalar: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As :meth:`Net.input_gradient`; ``scalar`` calls this net."""
        return self.net.input_gradient(scalar, x)

    def with_weights(self, weights: Tensors, training: bool = True) -> Net:
        return self.net.with_weights(weights, training)

    @property
    def weights(self) -> Tensors:
        return self.net.weights

    @property
    def layers(self) -> int:
        return self.net.layers


class OutputCache(NetAround):
    """A net that caches its outputs for one input, so that several terms of a loss compute them once.

    The cache is valid for one set of weights, so each phase of a step needs a new one.
    """

    def __init__(self, net: Net, x: torch.Tensor) -> None:
        super().__init__(net)
        self.x, self.outputs = x, None  # type: torch.Tensor, torch.Tensor | None

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        if x is not self.x or start != 0 or stop is not None:
            return self.net(x, start, stop)
        if self.outputs is None:
            self.outputs = self.net(x)
        return self.outputs

    def distribution(self) -> torch.Tensor:
        """Softmax outputs [B, C] for the cached input."""
        outputs = self(self.x)
        # In float32 in every precision: rows that are rounded to bfloat16 do not sum to 1.
        return outputs.detach().float().softmax(-1)


class LabelMeans:
    """Mean outputs by label of one client or of a stack of clients, summed on the device."""

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
        """Add softmax outputs [K, B, C] of samples with labels [K, B], of K clients from ``first`` (int64 [1]) on.

        A client is ignored where ``active`` bool [K] is false.
        """
        number = first + torch.arange(len(labels), device=labels.device)
        rows = (labels + self.classes * number[:, None]).flatten()
        ones = torch.ones_like(labels, dtype=torch.float32)
        if active is not None:
            # Not a product with 0, because an inactive client's outputs may be infinite.
            outputs, ones = outputs.where(active[:, None, None], 0.0), ones.where(active[:, None], 0.0)
        self.sums.index_add_(0, rows, outputs.flatten(0, 1).float())
        self.counts.index_add_(0, rows, ones.flatten())

    def of(self, client: int = 0) -> torch.Tensor:
        """Mean outputs by label of a client of the stack [C, C]; zeros for a label without samples."""
        return self.all()[client]

    def all(self) -> torch.Tensor:
        """Mean outputs by label of every client of the stack [K, C, C], on the CPU."""
        means = self.sums / self.counts.clamp(min=1)[:, None]
        return means.view(-1, self.classes, self.classes).cpu()

    def clear(self) -> None:
        self.sums.zero_()
        self.counts.zero_()
