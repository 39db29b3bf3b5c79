"""The attacks: cost functions between an attacker's update and the observed one, and searches that minimise them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass

from fedblend.analysis.attacks.victim import Victim
from fedblend.core.registry import Count, NonNegative, Positive
from fedblend.core.trees import Tensors


def squared_distance(candidate: Tensors, observed: Tensors) -> torch.Tensor:
    """sum ||candidate - observed||^2 over all tensors (DLG, Zhu et al. 2019, equation 4)."""
    return torch.stack([(candidate[name] - seen).square().sum() for name, seen in observed.items()]).sum()


def cosine_distance(candidate: Tensors, observed: Tensors) -> torch.Tensor:
    """1 - <candidate, observed> / (||candidate|| ||observed||), all tensors as one vector (Geiping et al. 2020)."""
    inner = torch.stack([(candidate[name] * seen).sum() for name, seen in observed.items()]).sum()
    lengths = [torch.stack([t[name].square().sum() for name in observed]).sum() for t in (candidate, observed)]
    return 1 - inner / (lengths[0] * lengths[1]).clamp(min=torch.finfo(inner.dtype).tiny).sqrt()


def total_variation(x: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbours, down plus across, of images [..., H, W]."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()


Box = tuple[torch.Tensor, torch.Tensor]
Iterate = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Images, their targets and their cost, detached."""

COSTS = {"cosine": cosine_distance, "squared": squared_distance}
DECAY_AT = (3 / 8, 5 / 8, 7 / 8)  # Fractions of the iterations after which InvGrad's learning rate is divided by ten


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Attack:
    """Base class of the attacks."""

    searches_labels: ClassVar[bool] = False
    """Whether unknown labels are optimised with the images, as logits, instead of inferred before."""

    iterations: Count = 300
    """Iterations from each starting point."""
    restarts: Count = 1
    """Number of starting points; the result of the least cost is kept."""
    cost: Literal["cosine", "squared"] = "squared"
    """Distance between the observed update and the update of the attacker's images."""

    def search(
        self, victim: Victim, observed: Tensors, x: torch.Tensor, y: torch.Tensor, box: Box | None
    ) -> Iterator[Iterate]:
        """Yield iterates from ``x`` [B, ...]; ``y`` are labels int64 [B], or initial logits [B, classes]."""
        raise TypeError(f"{type(self).__name__} defines no search")

    def distance(self, victim: Victim, observed: Tensors, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cost of images with these targets, without regularisation; 0 at the true ones.

        Noise of a protection makes it larger, and objectives with random numbers that the attacker guesses.
        """
        return COSTS[self.cost](victim.sent(x, y), observed)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class InvGrad(Attack):
    """Inverting gradients (Geiping et al. 2020): cosine cost and total variation, signed Adam, boxed, step decay."""

    iterations: Count = 2500
    cost: Literal["cosine", "squared"] = "cosine"
    lr: Positive = 0.1
    """Learning rate of Adam, on the model's scale."""
    total_variation: NonNegative = 1e-6
    """Weight of the images' total variation in the cost."""
    signed: bool = True
    """Pass only the sign of the gradient to Adam."""
    boxed: bool = True
    """Clamp pixels to the range of valid images, if ``box`` gives it."""

    def search(
        self, victim: Victim, observed: Tensors, x: torch.Tensor, y: torch.Tensor, box: Box | None
    ) -> Iterator[Iterate]:
        x = self._within(box, x.clone()).requires_grad_()
        optimizer = torch.optim.Adam([x], self.lr)
        milestones = [round(share * self.iterations) for share in DECAY_AT]
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones, 0.1)
        for number in range(self.iterations + 1):
            cost = self.distance(victim, observed, x, y) + self.total_variation * total_variation(x)
            yield x.detach(), y, cost.detach()
            if number == self.iterations:
                return
            (gradient,) = torch.autograd.grad(cost, x)
            x.grad = (gradient.sign() if self.signed else gradient).nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
            schedule.step()
            with torch.no_grad():
                x.copy_(self._within(box, x))

    def _within(self, box: Box | None, x: torch.Tensor) -> torch.Tensor:
        return x if box is None or not self.boxed else torch.minimum(torch.maximum(x, box[0]), box[1])


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DLG(Attack):
    """Deep leakage from gradients (Zhu et al. 2019): squared cost by L-BFGS, over images and soft labels together.

    Each iteration is one L-BFGS step with up to ``inner`` updates. Given labels stay fixed.
    """

    searches_labels = True
    lr: Positive = 1.0
    """Learning rate of L-BFGS."""
    inner: Count = 20
    """Updates of L-BFGS in one iteration."""

    def search(
        self, victim: Victim, observed: Tensors, x: torch.Tensor, y: torch.Tensor, box: Box | None
    ) -> Iterator[Iterate]:
        """Yield the starting point and the point after each iteration. The search ends at a cost that is not finite."""
        searched = [x.clone().requires_grad_()]
        if y.is_floating_point():
            searched.append(y.clone().requires_grad_())
        optimizer = torch.optim.LBFGS(searched, self.lr, self.inner, history_size=100)

        def point() -> tuple[torch.Tensor, torch.Tensor]:
            return searched[0], searched[1].softmax(-1) if len(searched) > 1 else y

        def closure() -> torch.Tensor:
            cost = self.distance(victim, observed, *point())
            for tensor, gradient in zip(searched, torch.autograd.grad(cost, searched), strict=True):
                tensor.grad = gradient
            return cost.detach()

        for number in range(self.iterations + 1):
            images, labels = (t.detach().clone() for t in point())
            cost = self.distance(victim, observed, images, labels).detach()
            yield images, labels, cost
            if number == self.iterations or not bool(torch.isfinite(cost)):
                return
            optimizer.step(closure)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class IDLG(DLG):
    """Improved DLG (Zhao et al. 2020): the label is inferred first, and only the images are optimised."""

    searches_labels = False
