"""FedProx's proximal term."""

from __future__ import annotations

import torch

from fedblend.objectives.base import Batch, Context, Net, Tensors, Term
from fedblend.parts import NonNegative, part


@part("term", "proximal")
class Proximal(Term):
    """mu / 2 ||w - w_t||^2, which keeps a client near the round's global weights (FedProx, Li et al. 2020)."""

    mu: NonNegative = 0.1
    """Weight of the term."""

    @property
    def pull(self) -> float:
        """``mu``, unless a subclass has another loss."""
        return self.mu if type(self).loss is Proximal.loss else 0.0

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """The penalty on the distance to the weights the round began with."""
        # Tensor by tensor: fused list operations cannot be stacked over clients.
        apart = ((param - context.start[name]).square().sum() for name, param in params.items())
        return 0.5 * self.mu * torch.stack(list(apart)).sum()
