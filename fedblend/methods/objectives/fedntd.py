"""FedNTD: distillation of the global model's outputs for the classes that a sample does not have."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, Net, Term
from fedblend.core.registry import NonNegative, Positive, part
from fedblend.core.trees import Tensors

EXCLUDED = -1e30
"""Logit of a class that a softmax leaves out: its probability is 0, and so is its summand."""


@part("term", "fedntd")
class FedNTD(Term):
    """Add beta tau^2 KL(q_g || q_l) over the classes that are not a sample's own (Lee et al. 2022, equations 3 and 4).

    q(c) = exp(z_c / tau) / sum_{c' != y} exp(z_c' / tau) for the logits z of the round's global model (q_g) and of the
    model in training (q_l), without the sample's class y; the mean over the batch. No gradient flows into the global
    model, which is in evaluation mode. The factor tau^2, in the authors' code and not in equation 3, keeps the
    gradients' size for every tau. Each step takes one further forward pass.
    """

    beta: NonNegative = 1.0
    """Weight of the term."""
    tau: Positive = 1.0
    """Temperature."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """beta times the mean divergence of the batch. Raises :class:`FedblendError` for data without classes."""
        require_classes(context, "method.terms: 'fedntd' leaves out a sample's class")
        own = context.task.encode(batch.y) * EXCLUDED
        with torch.no_grad():
            teacher = F.log_softmax((net.with_weights(context.start, training=False)(batch.x) + own) / self.tau, -1)
        student = F.log_softmax((net(batch.x) + own) / self.tau, -1)
        return self.beta * self.tau**2 * (teacher.exp() * (teacher - student)).sum(-1).mean()


def require_classes(context: Context, why: str) -> None:
    """Raise :class:`FedblendError` for data without classes; ``why`` names the field, and what it needs classes for."""
    if context.task.kind != "classification":
        raise FedblendError(f"{why}, but the targets are no classes; valid: data with classes")
