"""AugMix with Jensen-Shannon consistency (Fed-AugMix)."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from fedblend.augment import VIEWS, augmix, draw_augmix
from fedblend.errors import FedblendError
from fedblend.objectives.base import Batch, Context, Net, Objective, Plan, Scale, Tensors
from fedblend.parts import Count, NonNegative, Positive, part

LEAST_SHARE = 1e-7
"""What the mixture's probabilities are raised to before their logarithm is taken, as in AugMix's own code."""

LOWEST_LOG = -1e4
"""Logarithm that stands for that of a probability of zero: its exponential is zero, and zero times it is too."""


@part("objective", "augmix")
class AugMix(Objective):
    """Cross-entropy on the image, and lambda times the divergence of the outputs for it and two augmented views of it.

    L = L_c(p_orig, y) + lambda D_JS(p_orig; p_augmix1; p_augmix2) (Fed-AugMix, equation 5), where D_JS is the
    Jensen-Shannon divergence in nats, at most log 3. Views are made anew at each step by AugMix (Algorithm 2), on the
    grey levels of pictures with ink as 1. All three outputs come from one forward pass.

    With ``loss_scaling`` (section IV-E) lambda is ``large_lambda`` for a batch with L_c > ``threshold`` * D_JS: early
    in training, when outputs hardly differ, so that their divergence alone would hide nothing in the gradient.
    """

    severity: Annotated[float, Field(ge=0, le=10)] = 3.0
    """Severity s of the operations: levels are drawn from U(0.1, s) of 10; 0 leaves plain cross-entropy.

    The paper tries 2 to 10 and names no default; 3 is that of AugMix's own code.
    """
    lam: NonNegative = 50.0
    """Weight of the divergence."""
    loss_scaling: bool = True
    """Whether batches of little divergence take `large_lambda` instead."""
    threshold: NonNegative = 5e4
    """What the divergence is multiplied by, to be compared with the cross-entropy (the paper's Scale)."""
    large_lambda: NonNegative = 5e3
    """Weight of the divergence in a batch whose cross-entropy is above that product (the paper's LargeVal)."""
    chains: Count = 3
    """Chains of operations that a view is mixed from."""
    depth: Count = 3
    """Operations in the longest chain; lengths are uniform from 1 to this."""
    alpha: Positive = 1.0
    """Parameter of the Dirichlet and Beta distributions of the mixing weights."""

    @property
    def copies(self) -> int:
        """The image and its views go through the model at once."""
        return 1 + VIEWS if self.severity else 1

    def draw(self, rng: np.random.Generator, plan: Plan) -> dict[str, np.ndarray]:
        """What :func:`~fedblend.augment.draw_augmix` draws, one row a step: [steps, width, 2, ...]."""
        if not self.severity:
            return {}
        return draw_augmix(rng, (len(plan.sizes), plan.width), self.severity, self.chains, self.depth, self.alpha)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch. Raises :class:`FedblendError` if it holds no images, or no classes."""
        if not self.severity:
            return context.task.loss(net(batch.x), batch.y)
        _require_images(batch.x, context)
        size = len(batch.y)
        views = self.views(batch.x, {name: values[:size] for name, values in drawn.items()}, context.scale)
        outputs = net(torch.cat([batch.x, views.flatten(0, 1)]))
        own = context.task.loss(outputs[:size], batch.y)
        # An untrained model's outputs hardly differ, and lambda is large: float32 would round much of that away.
        log_shares = F.log_softmax(outputs.double(), -1).unflatten(0, (1 + VIEWS, size))
        divergence = jensen_shannon(log_shares).to(own.dtype)
        return own + self.weight(own.detach(), divergence.detach()) * divergence

    def views(self, x: torch.Tensor, drawn: Tensors, scale: Scale) -> torch.Tensor:
        """Two augmented views of images [B, C, H, W] on the model's scale, [2, B, C, H, W]."""
        return scale.from_unit(augmix(scale.to_unit(x), drawn))

    def weight(self, own: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
        """lambda of a batch (section IV-E): ``large_lambda`` if L_c > Scale * D_JS, at equality ``lambda``."""
        large = self.large_lambda if self.loss_scaling else self.lam
        return torch.where(own > self.threshold * divergence, torch.full_like(own, large), self.lam)


def jensen_shannon(log_shares: torch.Tensor) -> torch.Tensor:
    """Mean Jensen-Shannon divergence in nats (equation 6) of distributions given as logarithms, [views, B, classes].

    The divergence of each sample's views is the mean of their Kullback-Leibler divergences from their mean, which is
    raised to at least 1e-7.
    """
    log_shares = log_shares.clamp(min=LOWEST_LOG)
    shares = log_shares.exp()
    mixture = shares.mean(0).clamp(min=LEAST_SHARE).log()
    return (shares * (log_shares - mixture)).sum(-1).mean()


def _require_images(x: torch.Tensor, context: Context) -> None:
    if x.dim() != 4:
        raise FedblendError(
            f"method.objective: 'augmix' augments images (channels x height x width); this data set's samples are of "
            f"shape {list(x.shape[1:])}; valid here: plain, and the objectives that mix"
        )
    if context.task.kind != "classification":
        raise FedblendError(
            "method.objective: 'augmix' compares probabilities of classes, but this data set's targets are numbers; "
            "valid here: plain, and the objectives that mix"
        )
