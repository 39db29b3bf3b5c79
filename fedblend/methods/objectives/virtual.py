"""Training on shared means as if they were samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import BeforeValidator, Field, WithJsonSchema

from fedblend.core.objective import Batch, Context, Net, Objective, StepPlan, Tensors, WithBase
from fedblend.core.registry import Count, NonNegative, build, part
from fedblend.methods.objectives.mixup import draw_entries, has_partner


def _build_base(spec: Any) -> Any:
    return build("objective", spec, "method.objective.base")


@part("objective", "virtual-samples")
class VirtualSamples(WithBase):
    """Add the task's loss on shared entries to the loss on the client's own batch.

    Each step draws ``entries`` of the pool and takes each as one sample:

        l_base(batch)  +  weight * mean_g l(f(x_g), y_g)

    With means within a class (``split = "class"``) a client sees something of the classes that it lacks, so that its
    steps do not push these classes away.
    """

    base: Annotated[Any, BeforeValidator(_build_base), WithJsonSchema({"part": "objective"})] = Field(
        default="plain", validate_default=True
    )
    """The objective whose loss is taken on the batch, with its options."""
    entries: Count = 32
    """Shared entries in a step."""
    weight: NonNegative = 1.0
    """Weight of their loss."""
    exclude_own: bool = False
    """Use no entries of the client itself; without entries of other clients only the base's loss is taken."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Inputs and targets, and the needs of the base."""
        return tuple(dict.fromkeys(("x", "y", *self.base.needs)))

    def fallback(self) -> Objective:
        """The base, or its fallback where the base needs something too."""
        fallback: Objective = self.base.fallback() if self.base.needs else self.base
        return fallback

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """What the base draws; ``virtual`` int64 [steps, entries]; its weight ``virtual_weight`` float32 [steps]."""
        steps = len(plan.sizes)
        weight = self.weight if has_partner(plan, self.exclude_own) else 0.0
        return {
            **self.base.draw(rng, plan),
            "virtual": draw_entries(rng, plan, (steps, self.entries), self.exclude_own),
            "virtual_weight": np.full(steps, weight, np.float32),
        }

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        """The phases of the base; the loss on the entries is added to the last."""
        return (*self.base.phases()[:-1], self.loss)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch, and of the step's entries."""
        *_, base = self.base.phases()
        own = base(net, batch, drawn, context)
        x, y = (context.pool[name].index_select(0, drawn["virtual"]) for name in ("x", "y"))
        return own + drawn["virtual_weight"] * context.task.loss(net(x, self.layer or 0), y)
