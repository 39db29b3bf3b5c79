"""FedProx's proximal term."""

from __future__ import annotations

import torch

from fedblend.objectives.base import Batch, Context, Net, Tensors, Term
from fedblend.parts import NonNegative, part


@part("term", "proximal")
class Proximal(Term):
    """mu / 2 ||w - w_t||^2, which keeps a client near the round's global weights (FedProx, Li et al. 2020)."""

    mu: NonNegative = 0.1

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """The penalty on the distance to the weights the round began with."""
        names = list(params)
        apart = torch._foreach_sub([params[n] for n in names], [context.start[n] for n in names])
        return 0.5 * self.mu * sum((d.square().sum() for d in apart), torch.zeros((), device=apart[0].device))
