"""Training on shared entries as if they were samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional as F

from fedblend.core.objective import Base, Batch, Context, Net, Objective, StepPlan, Tensors, WithBase
from fedblend.core.registry import Count, NonNegative, Positive, part
from fedblend.methods.objectives.fedmix import draw_entries, has_partner
from fedblend.methods.objectives.terms import representation
from fedblend.methods.requirements import require_classes


@part("objective", "virtual-samples")
class VirtualSamples(WithBase):
    """Add the task's loss on shared entries to the loss on the client's own batch.

    Each step draws ``entries`` of the pool and takes each as one sample:

        l_base(batch)  +  weight * mean_g l(f(x_g), y_g)

    With means within a class (``split = "class"``) a client sees something of the classes that it lacks, so that its
    steps do not push these classes away. Entries may also be samples as stored, raw or made of seeds (``raw-seeds``,
    ``mixed-seeds``, ``xor-seeds``), which are then scaled. Every client downloads them once.
    """

    base: Base = Field(default="plain", validate_default=True)
    """The objective whose loss is taken on the batch, with its options."""
    entries: Count = 32
    """Shared entries in a step."""
    weight: NonNegative = 1.0
    """Weight of their loss."""
    exclude_own: bool = False
    """Use no entries of the client itself; without entries of other clients only the base's loss is taken."""

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(dict.fromkeys(("x", "y", *self.base.needs)))

    @property
    def reads(self) -> tuple[str, ...]:  # type: ignore[override]
        """Inputs and samples as stored, where the base mixes with nothing; else the forms that the base uses."""
        return tuple(self.base.reads) if self.base.needs else ("inputs", "stored", "seeds", "raw")

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
        return (*self.base.phases()[:-1], self.loss)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        *_, base = self.base.phases()
        own = base(net, batch, drawn, context)
        x, y = context.entries(drawn["virtual"])
        return own + drawn["virtual_weight"] * context.task.loss(net(x, self.layer or 0), y)


@part("objective", "virtual-homogeneity")
class VirtualHomogeneity(VirtualSamples):
    """Train on shared virtual samples, and align features of natural samples with theirs (VHL, Tang et al. 2022).

    Each step draws ``entries`` virtual samples v of the pool and adds two losses to that of the client's own batch:

        l_base(batch)  +  weight * mean_v l(f(x_v), y_v)  +  lambda * mean_i a_i

    The last is the supervised contrastive loss (Khosla et al. 2020) over natural and virtual samples together:

        a_i = -mean_{j != i, y_j = y_i} log( exp(z_i z_j / tau) / sum_{k != i} exp(z_i z_k / tau) )

    with features z of length 1, the inputs of the network's last layer. As all clients hold the same virtual samples,
    these draw the features of a class to the same place at every client. For targets that are distributions y_j = y_i
    becomes the weight sum_c y_ic y_jc. A sample without another of its class has a_i = 0. The authors' code gives the
    virtual classes outputs of their own; here virtual class c is class c, as the network's outputs are fixed. Their
    code aligns in the first five local epochs only, here in all. In their runs no gradient of the alignment flows
    through virtual samples, and a tenth of the contrast among virtual samples alone is added. Each step takes two
    further forward passes.
    """

    weight: NonNegative = 0.5
    """Weight of the virtual samples' loss; the authors' default, while their scripts set 1."""
    lam: NonNegative = 1.0
    """Weight of the alignment, lambda."""
    tau: Positive = 0.07
    """Temperature of the alignment; the value of the authors' code."""

    def require_possible(self, method: Any, train: Any) -> None:
        """Raise ``ValueError`` for a base that mixes hidden states."""
        if self.layer is not None:
            raise ValueError(
                f"method.objective.base: '{self.base.name}' mixes hidden states, but '{self.name}' aligns features of "
                "inputs; valid: plain, or a base that mixes inputs"
            )

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """What `virtual-samples` draws, and ``align`` float32 [steps]: lambda, or 0 without virtual samples."""
        weight = self.lam if has_partner(plan, self.exclude_own) else 0.0
        return {**super().draw(rng, plan), "align": np.full(len(plan.sizes), weight, np.float32)}

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """The loss of the batch and the virtual samples, with the alignment of features.

        Raises :class:`FedblendError` for data without classes.
        """
        task = context.task
        require_classes(self, task, "virtual-samples")
        x, y = context.entries(drawn["virtual"])
        z = torch.cat([representation(net, batch.x), representation(net, x)])
        labels = torch.cat([task.encode(batch.y), y if y.is_floating_point() else task.encode(y)])
        own = super().loss(net, batch, drawn, context)
        return own + drawn["align"] * supervised_contrast(z, labels, self.tau)


def supervised_contrast(z: torch.Tensor, labels: torch.Tensor, tau: float) -> torch.Tensor:
    """The mean supervised contrastive loss of features z [n, d] with ``labels`` [n, C], one-hot or distributions."""
    z = F.normalize(z, dim=1)
    self_pair = torch.eye(len(z), dtype=torch.bool, device=z.device)
    log_share = F.log_softmax((z @ z.T / tau).masked_fill(self_pair, -torch.inf), dim=1).masked_fill(self_pair, 0.0)
    weight = (labels @ labels.T).masked_fill(self_pair, 0.0)
    total = weight.sum(1)
    return -((weight * log_share).sum(1) / total.where(total > 0, 1.0)).mean()
