"""AugMix with Jensen-Shannon consistency (Fed-AugMix)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field, WithJsonSchema
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, Net, Objective, Scale, StepPlan, Tensors
from fedblend.core.registry import Count, Float, NonNegative, Positive, build, part
from fedblend.methods.augment import augmix
from fedblend.methods.augment.augmix import VIEWS, draw_augmix
from fedblend.methods.objectives.output_cache import OutputCache

LEAST_SHARE = 1e-7
"""What the mixture's probabilities are raised to before their logarithm is taken, as in AugMix's own code."""

LOWEST_LOG = -1e4
"""Logarithm that stands for that of a probability of zero: its exponential is zero, and zero times it is too."""


LARGE = "large_lambda"
"""Name of the note whether a batch took the large lambda."""

DRAWN = ("operation", "level", "mix")
"""Names of what the views draw."""


def _base(spec: Any) -> Any:
    where = "method.objective.base"
    made = build("objective", spec, where)
    if isinstance(made, AugMix):
        raise FedblendError(f"{where}: 'augmix' cannot stand on itself; valid: plain, and the objectives that mix")
    return made


Base = Annotated[Any, BeforeValidator(_base), WithJsonSchema({"part": "objective"})]


@part("objective", "augmix")
class AugMix(Objective):
    """A loss on the image, and lambda times the divergence of the outputs for it and two augmented views of it.

    L = L_c(p_orig, y) + lambda D_JS(p_orig; p_augmix1; p_augmix2) (Fed-AugMix, equation 5), where D_JS is the
    Jensen-Shannon divergence in nats, at most log 3. Views are made anew at each step by AugMix (Algorithm 2), on the
    grey levels of pictures with ink as 1. All three outputs come from one forward pass.

    L_c is cross-entropy, or any other objective's loss, given as ``base``: NaiveMix's or FedMix's, which then stands
    in its place as it is, while the divergence remains that of the client's own image and its views. Of an objective
    of several phases (hidden-mix) the divergence is added to the last.

    With ``loss_scaling`` (section IV-E) lambda is ``large_lambda`` for a batch with L_c > ``threshold`` * D_JS: early
    in training, when outputs hardly differ, so that their divergence alone would hide nothing in the gradient.
    """

    severity: Annotated[Float, Field(ge=0, le=10)] = 3.0
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
    base: Base = Field(default="plain", validate_default=True)
    """The objective whose loss L_c is, with its options; what it needs to be shared must be."""

    @property
    def needs(self) -> tuple[str, ...]:
        """What the base needs."""
        return tuple(self.base.needs)

    @property
    def views_per_sample(self) -> int:
        """The image and its views go through the model at once."""
        return max(1 + VIEWS if self.severity else 1, self.base.views_per_sample)

    @property
    def layer(self) -> int | None:
        """The layer whose hidden states the base mixes, if it does."""
        return getattr(self.base, "layer", None)

    @property
    def exclude_own(self) -> bool:
        """Whether the base mixes with nothing of the client's own."""
        return bool(getattr(self.base, "exclude_own", False))

    def fallback(self) -> Objective:
        """The same on cross-entropy."""
        return replace(self, base="plain")

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """What :func:`.draw_augmix` draws, one row a step: [steps, width, 2, ...]; then the base's.

        So the views are the same on any base. Raises :class:`FedblendError` if names of the two are alike.
        """
        drawn: dict[str, np.ndarray] = {}
        if self.severity:
            shape = (len(plan.sizes), plan.width)
            drawn = draw_augmix(rng, shape, self.severity, self.chains, self.depth, self.alpha)
        others = self.base.draw(rng, plan)
        if both := sorted(drawn.keys() & others.keys()):
            raise FedblendError(
                f"method.objective.base: '{self.base.name}' draws {', '.join(both)}, as 'augmix' does; valid: an "
                "objective that draws under other names"
            )
        return drawn | others

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        """The base's, to the last of which the divergence is added."""
        return (*self.base.phases()[:-1], self.loss)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch. Raises :class:`FedblendError` if it holds no images, or no classes."""
        *_, base = self.base.phases()
        if not self.severity:
            return base(net, batch, drawn, context)
        _require_images(batch.x, context)
        size = len(batch.y)
        views = self.views(batch.x, {name: drawn[name][:size] for name in DRAWN}, context.scale)
        outputs = net(torch.cat([batch.x, views.flatten(0, 1)]))
        # A base that asks for the outputs of the images themselves has them already.
        watching = OutputCache(net, batch.x)
        watching.outputs = outputs[:size]
        own = base(watching, batch, drawn, context)
        # An untrained model's outputs hardly differ, and lambda is large: float32 would round much of that away.
        log_shares = F.log_softmax(outputs.double(), -1).unflatten(0, (1 + VIEWS, size))
        divergence = jensen_shannon(log_shares).to(own.dtype)
        if context.note is not None:
            context.note(LARGE, own.detach() > self.threshold * divergence.detach())
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
