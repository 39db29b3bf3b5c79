"""AugMix with Jensen-Shannon consistency (Fed-AugMix)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, Field
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Base, Batch, Context, Net, Objective, Scale, StepPlan, Tensors, WithBase, with_bases
from fedblend.core.registry import Count, Float, NonNegative, Positive, part
from fedblend.methods.augment.augmix import VIEWS, augmix, draw_augmix
from fedblend.methods.objectives.output_cache import OutputCache
from fedblend.methods.requirements import require_classes, require_images

LEAST_SHARE = 1e-7  # Least probability of the mixture in its logarithm, as in AugMix's own code
LOWEST_LOG = -1e4  # Logarithm of a probability of zero: its exponential is zero, and so is zero times it
LARGE = "large_lambda"  # Name of the note whether a batch took the large lambda
DRAWN = ("operation", "level", "mix")  # Names of the arrays that are drawn for the views


def _require_other(base: Objective) -> Objective:
    if any(isinstance(one, AugMix) for one in with_bases(base)):
        raise FedblendError(
            "method.objective.base: 'augmix' cannot be its own base; valid: plain, and the objectives that mix"
        )
    return base


@part("objective", "augmix")
class AugMix(WithBase):
    """Add lambda times the divergence of the outputs for an image and two augmented views to a loss on the image.

    L = L_c(p_orig, y) + lambda D_JS(p_orig; p_augmix1; p_augmix2) (Fed-AugMix, equation 5), where D_JS is the
    Jensen-Shannon divergence in nats, at most log 3. AugMix (Algorithm 2) makes new views at each step, on grey levels
    of images with ink as 1. One forward pass computes all three outputs.

    L_c is cross-entropy, or the loss of another objective, given as ``base``, such as NaiveMix or FedMix. The
    divergence is always that of the client's own image and its views. For a base of several phases (hidden-mix) the
    divergence is added to the last phase.

    With ``loss_scaling`` (section IV-E) lambda is ``large_lambda`` for a batch with L_c > ``threshold`` * D_JS. This
    occurs early in training, when outputs hardly differ, so that their divergence alone would hide nothing in the
    gradient.
    """

    numeric_inputs = True

    severity: Annotated[Float, Field(ge=0, le=10)] = 3.0
    """Severity s of the operations: levels are drawn from U(0.1, s) of 10; 0 gives plain cross-entropy.

    The paper tries 2 to 10 and states no default; 3 is the default of AugMix's own code.
    """
    lam: NonNegative = 50.0
    """Weight of the divergence."""
    loss_scaling: bool = True
    """Whether batches with a small divergence use `large_lambda` instead."""
    threshold: NonNegative = 5e4
    """Factor on the divergence in its comparison with the cross-entropy (the paper's Scale)."""
    large_lambda: NonNegative = 5e3
    """Weight of the divergence in a batch whose cross-entropy is above that product (the paper's LargeVal)."""
    chains: Count = 3
    """Chains of operations that are mixed into a view."""
    depth: Count = 3
    """Operations in the longest chain; lengths are uniform from 1 to this."""
    alpha: Positive = 1.0
    """Parameter of the Dirichlet and Beta distributions of the mixing weights."""
    base: Annotated[Base, AfterValidator(_require_other)] = Field(default="plain", validate_default=True)
    """The objective of the loss L_c, with its options; the method's sharing must provide the data that it needs."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """The arrays of :func:`.draw_augmix`, one row a step [steps, width, 2, ...], then those of the base.

        In this order the views are the same for any base. Raises :class:`FedblendError` if both draw an array of the
        same name.
        """
        drawn: dict[str, np.ndarray] = {}
        if self.severity:
            shape = (len(plan.sizes), plan.width)
            drawn = draw_augmix(rng, shape, self.severity, self.chains, self.depth, self.alpha)
        drawn_by_base = self.base.draw(rng, plan)
        if both := sorted(drawn.keys() & drawn_by_base.keys()):
            raise FedblendError(
                f"method.objective.base: '{self.base.name}' draws {', '.join(both)}, as 'augmix' does; valid: an "
                "objective that draws under other names"
            )
        return drawn | drawn_by_base

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        return (*self.base.phases()[:-1], self.loss)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch. Raises :class:`FedblendError` for data that are no images or have no classes."""
        *_, base = self.base.phases()
        if not self.severity:
            return base(net, batch, drawn, context)
        require_images(self, batch.x.shape[1:], "plain, and the objectives that mix")
        require_classes(self, context.task, "plain, and the objectives that mix")
        size = len(batch.y)
        views = self.views(batch.x, {name: drawn[name][:size] for name in DRAWN}, context.scale)
        outputs = net(torch.cat([batch.x, views.flatten(0, 1)]))
        # A base that uses the outputs for the images themselves need not compute them again.
        cache = OutputCache(net, batch.x)
        cache.outputs = outputs[:size]
        own = base(cache, batch, drawn, context)
        # Float64, because the outputs of an untrained model hardly differ, and lambda is large.
        log_shares = F.log_softmax(outputs.double(), -1).unflatten(0, (1 + VIEWS, size))
        divergence = jensen_shannon(log_shares).to(own.dtype)
        if context.note is not None:
            context.note(LARGE, own.detach() > self.threshold * divergence.detach())
        return own + self.weight(own.detach(), divergence.detach()) * divergence

    def views(self, x: torch.Tensor, drawn: Tensors, scale: Scale) -> torch.Tensor:
        """Two augmented views of images [B, C, H, W] on the model's scale, [2, B, C, H, W]."""
        return scale.from_unit(augmix(scale.to_unit(x), drawn))

    def weight(self, own: torch.Tensor, divergence: torch.Tensor) -> torch.Tensor:
        """lambda of a batch (section IV-E): ``large_lambda`` if L_c > Scale * D_JS, otherwise ``lambda``."""
        large = self.large_lambda if self.loss_scaling else self.lam
        return torch.where(own > self.threshold * divergence, torch.full_like(own, large), self.lam)


def jensen_shannon(log_shares: torch.Tensor) -> torch.Tensor:
    """Mean Jensen-Shannon divergence in nats (equation 6) of distributions given as logarithms, [views, B, classes].

    The divergence of each sample's views is the mean of their Kullback-Leibler divergences from their mean.
    Probabilities of the mean are at least 1e-7.
    """
    log_shares = log_shares.clamp(min=LOWEST_LOG)
    shares = log_shares.exp()
    mixture = shares.mean(0).clamp(min=LEAST_SHARE).log()
    return (shares * (log_shares - mixture)).sum(-1).mean()
