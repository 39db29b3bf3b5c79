"""Mixup of samples: within a client (LocalMix), or with the raw samples of all clients (Global Mixup)."""

from __future__ import annotations

import numpy as np
import torch

from fedblend.core.objective import Batch, Context, Net, Objective, StepPlan, Tensors
from fedblend.core.registry import Fraction, Positive, part


def mixed_inputs(x: torch.Tensor, x_other: torch.Tensor, lam: torch.Tensor) -> torch.Tensor:
    """x~ = (1 - lam) x + lam x_other; ``x_other`` may lack the batch dimension."""
    return torch.lerp(x, x_other.expand_as(x), lam)


def mixed_loss(
    net: Net, batch: Batch, x_other: torch.Tensor, y_other: torch.Tensor, lam: torch.Tensor, context: Context
) -> torch.Tensor:
    """(1 - lam) l(f(x~), y) + lam l(f(x~), y_other) at the mixed samples x~.

    This is l(f(x~), y~) of FedMix's equation 3 up to a constant, because the loss is linear in the target
    (footnote 2). ``x_other`` and ``y_other`` may lack the batch dimension.
    """
    outputs = net(mixed_inputs(batch.x, x_other, lam))
    return (1 - lam) * context.task.loss(outputs, batch.y) + lam * context.task.loss(outputs, y_other)


def draw_ratio(rng: np.random.Generator, steps: int, lam: float | None, alpha: float) -> np.ndarray:
    """One mixing ratio for each step, float32 [steps]: from Beta(alpha, alpha), or ``lam`` where it is fixed."""
    ratios = rng.beta(alpha, alpha, steps) if lam is None else np.full(steps, lam)
    return ratios.astype(np.float32)


@part("objective", "localmix")
class LocalMix(Objective):
    """Mix samples within the client's own batch (FedMix, figure 1b).

    Each sample x_i is mixed with a sample x_j of its batch, drawn as a permutation: x~ = (1 - lambda) x_i + lambda x_j.
    """

    numeric_inputs = True

    lam: Fraction | None = None
    """Mixing ratio (default: drawn from Beta(alpha, alpha) at each step)."""
    alpha: Positive = 1.0
    """Both parameters of the Beta distribution."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """``lam`` float32 [steps], and ``partner`` int64 [steps, width]: a permutation of each batch."""
        steps = len(plan.sizes)
        order = rng.random((steps, plan.width))
        # Places beyond a short batch are sorted last, so the first `size` entries permute the batch itself.
        order[np.arange(plan.width) >= plan.sizes[:, None]] = 2.0
        return {"lam": draw_ratio(rng, steps, self.lam, self.alpha), "partner": order.argsort(1)}

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        partner = drawn["partner"][: len(batch.y)]
        return mixed_loss(net, batch, batch.x[partner], batch.y[partner], drawn["lam"], context)


@part("objective", "global-mixup")
class GlobalMixup(Objective):
    """Mix with raw samples of all clients (FedMix, equations 2 and 3): an upper bound that breaks privacy.

    Needs the sharing ``raw``, and ``unsafe = true`` in the experiment. Each sample is mixed with one drawn uniformly
    from the samples of all clients.
    """

    needs = ("x", "y")
    reads = ("raw",)
    numeric_inputs = True

    lam: Fraction | None = None
    """Mixing ratio, as in Table 5 (default: drawn from Beta(alpha, alpha) at each step)."""
    alpha: Positive = 1.0
    """Both parameters of the Beta distribution."""
    exclude_own: bool = False
    """Use no samples of the client itself; without samples of other clients its batches are plain."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """``lam`` float32 [steps], and ``partner`` int64 [steps, width]: entries of the shared samples."""
        steps = len(plan.sizes)
        ratio = draw_ratio(rng, steps, self.lam, self.alpha)
        return {
            "lam": ratio if has_partner(plan, self.exclude_own) else np.zeros_like(ratio),
            "partner": draw_entries(rng, plan, (steps, plan.width), self.exclude_own),
        }

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        partner = drawn["partner"][: len(batch.y)]
        return mixed_loss(net, batch, *context.entries(partner), drawn["lam"], context)


def draw_entries(rng: np.random.Generator, plan: StepPlan, shape: tuple[int, ...], exclude_own: bool) -> np.ndarray:
    """Draw entries of the pool, uniformly with replacement: int64 of ``shape``."""
    if exclude_own and plan.own is not None and not plan.own.all():
        of_others = np.flatnonzero(~plan.own)
        return of_others[rng.integers(len(of_others), size=shape)]
    return rng.integers(plan.entries, size=shape)


def has_partner(plan: StepPlan, exclude_own: bool) -> bool:
    """Whether there is an entry to mix with: there is none if all are the client's own and these are excluded."""
    return not exclude_own or plan.own is None or not plan.own.all()
