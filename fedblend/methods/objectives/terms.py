"""FedProx's proximal term."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedblend.core.objective import Batch, Context, Net, Tensors, Term
from fedblend.core.registry import NonNegative, part


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


@part("term", "distill")
class Distill(Term):
    """beta psi(F, G_n), psi = -sum_m G_{n,m} log F_m: cross-entropy with the global mean output for a sample's label.

    Mix2FLD, equation 3, whose psi lacks the minus (Oh et al. 2020): a cross-entropy needs it, and with it the gradient
    at the logits is (F - L) + beta (F - G_n). Nothing is added before the server has outputs to give, nor for a label
    that no client ever saw.
    """

    uses_outputs = True

    beta: NonNegative = 0.01
    """Weight of the term."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """The mean over the batch."""
        outputs = net(batch.x)
        if "outputs" not in context.global_outputs:
            return 0.0 * outputs.sum()
        teacher = context.task.encode(batch.y) @ context.global_outputs["outputs"]
        return -self.beta * (teacher * F.log_softmax(outputs, -1)).sum(-1).mean()
