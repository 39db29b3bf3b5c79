"""StatMix: a client's images with the channel statistics of other clients' images."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field

from fedblend.core.objective import Base, Batch, Context, Net, Objective, StepPlan, Tensors, WithBase
from fedblend.core.registry import Fraction, part
from fedblend.methods.objectives.fedmix import draw_entries, has_partner
from fedblend.methods.sharing.channel_statistics import channel_statistics

SMALLEST = 1e-6  # Smallest deviation of a channel that is divided by; a channel of one value stays of one value


@part("objective", "statmix")
class StatMix(WithBase):
    """Give images of a batch the channel statistics of other images (StatMix, Lewy et al. 2022; AdaIN).

    With ``probability`` each image is normalised by its own statistics, and gets those of an entry g of the pool:

        x~_c = sigma_g,c (x_c - mu_c) / sigma_c + mu_g,c      for each channel c

    The label stays. The base's loss is taken on the batch of these images. Needs the sharing ``channel-statistics``.
    """

    base: Base = Field(default="plain", validate_default=True)
    """The objective whose loss is taken on the batch, with its options; one that needs no shared data."""
    probability: Fraction = 0.5
    """Probability that an image gets other statistics."""
    exclude_own: bool = True
    """Use no statistics of the client's own images; without those of other clients the batch stays as it is."""

    needs = ("mean", "std")
    reads = ("statistics",)
    numeric_inputs = True

    def require_possible(self, method: Any, train: Any) -> None:
        """Raise ``ValueError`` for a base that needs shared data of its own."""
        if self.base.needs:
            raise ValueError(
                f"method.objective.base: '{self.base.name}' needs {', '.join(self.base.needs)}, which clients do not "
                "share beside channel statistics; valid: plain, localmix, augmix"
            )

    def fallback(self) -> Objective:
        base: Objective = self.base
        return base

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """What the base draws; ``style`` int64 [steps, width], an entry an image; ``styled`` bool, who gets one."""
        shape, drawn = (len(plan.sizes), plan.width), self.base.draw(rng, plan)
        styled = rng.random(shape) < (self.probability if has_partner(plan, self.exclude_own) else 0.0)
        style = draw_entries(rng, plan, shape, self.exclude_own)
        return {**drawn, "style": style, "styled": styled}

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        return tuple(partial(self._on_changed, phase) for phase in self.base.phases())

    def _on_changed(
        self, phase: Callable[..., torch.Tensor], net: Net, batch: Batch, drawn: Tensors, context: Context
    ) -> torch.Tensor:
        return phase(net, self.changed(batch, drawn, context), drawn, context)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        return self.phases()[-1](net, batch, drawn, context)

    def changed(self, batch: Batch, drawn: Tensors, context: Context) -> Batch:
        rows, styled = (drawn[name][: len(batch.y)] for name in ("style", "styled"))
        own_mean, own_std = channel_statistics(batch.x)
        mean, std = (context.pool[name][rows] for name in ("mean", "std"))
        factor = std / own_std.clamp(min=SMALLEST)
        x = factor[..., None, None] * (batch.x - own_mean[..., None, None]) + mean[..., None, None]
        return Batch(torch.where(styled[:, None, None, None], x, batch.x), batch.y)
