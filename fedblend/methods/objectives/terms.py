"""Terms that are added to an objective: FedProx's proximal term, and federated distillation."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedblend.core.objective import Batch, Context, Net, Tensors, Term
from fedblend.core.registry import NonNegative, part


@part("term", "proximal")
class Proximal(Term):
    """Add mu / 2 ||w - w_t||^2, which keeps a client near the round's global weights (FedProx, Li et al. 2020)."""

    mu: NonNegative = 0.1
    """Weight of the term."""

    @property
    def proximal_mu(self) -> float:
        """``mu``, unless a subclass has another loss."""
        return self.mu if type(self).loss is Proximal.loss else 0.0

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """The penalty on the distance to the weights that the round began with."""
        # Tensor by tensor, because fused list operations cannot be stacked over clients.
        squares = ((param - context.start[name]).square().sum() for name, param in params.items())
        return 0.5 * self.mu * torch.stack(list(squares)).sum()


@part("term", "distill")
class Distill(Term):
    """Add beta psi(F, G_n), psi = -sum_m G_{n,m} log F_m: cross-entropy with the global mean output of a label.

    Mix2FLD, equation 3 (Oh et al. 2020). Its psi lacks the minus that a cross-entropy needs; with the minus the
    gradient at the logits is (F - L) + beta (F - G_n). Nothing is added before the server has sent outputs, nor for a
    label of which no client has had samples.
    """

    uses_outputs = True

    beta: NonNegative = 0.01
    """Weight of the term."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        outputs = net(batch.x)
        if "outputs" not in context.global_outputs:
            return 0.0 * outputs.sum()
        teacher = context.task.encode(batch.y) @ context.global_outputs["outputs"]
        return -self.beta * (teacher * F.log_softmax(outputs, -1)).sum(-1).mean()
