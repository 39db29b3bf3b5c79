"""Mixup of samples (LocalMix, Global Mixup) and with averaged data (NaiveMix, FedMix), also of hidden states."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedblend.core.objective import Batch, Context, Net, Objective, StepPlan, Tensors
from fedblend.core.registry import Count, Fraction, Int, NonNegative, Positive, part
from fedblend.methods.objectives.output_cache import NetAround

FAILED = "taylor_failed"  # Name of the share of samples whose loss FedMix's Taylor term predicts below 0


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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class SampleMix(Objective):
    """Base of the mixup of samples."""

    numeric_inputs = True

    lam: Fraction | None = None
    """Mixing ratio (default: drawn from Beta(alpha, alpha) at each step)."""
    alpha: Positive = 1.0
    """Both parameters of the Beta distribution."""

    def ratios(self, rng: np.random.Generator, steps: int) -> np.ndarray:
        """One mixing ratio for each step, float32 [steps]."""
        ratios = rng.beta(self.alpha, self.alpha, steps) if self.lam is None else np.full(steps, self.lam)
        return ratios.astype(np.float32)


@part("objective", "localmix")
class LocalMix(SampleMix):
    """Mix samples within the client's own batch (FedMix, figure 1b).

    Each sample x_i is mixed with a sample x_j of its batch, drawn as a permutation: x~ = (1 - lambda) x_i + lambda x_j.
    """

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """``lam`` float32 [steps], and ``partner`` int64 [steps, width]: a permutation of each batch."""
        steps = len(plan.sizes)
        order = rng.random((steps, plan.width))
        # Places beyond a short batch are sorted last, so the first `size` entries permute the batch itself.
        order[np.arange(plan.width) >= plan.sizes[:, None]] = 2.0
        return {"lam": self.ratios(rng, steps), "partner": order.argsort(1)}

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        partner = drawn["partner"][: len(batch.y)]
        return mixed_loss(net, batch, batch.x[partner], batch.y[partner], drawn["lam"], context)


@part("objective", "global-mixup")
class GlobalMixup(SampleMix):
    """Mix with raw samples of all clients (FedMix, equations 2 and 3): an upper bound that breaks privacy.

    Needs the sharing ``raw``, and ``unsafe = true`` in the experiment. Each sample is mixed with one drawn uniformly
    from the samples of all clients.
    """

    needs = ("x", "y")
    reads = ("raw",)

    exclude_own: bool = False
    """Use no samples of the client itself; without samples of other clients its batches are plain."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """``lam`` float32 [steps], and ``partner`` int64 [steps, width]: entries of the shared samples."""
        steps = len(plan.sizes)
        ratio = self.ratios(rng, steps)
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


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class MeanMix(Objective):
    """Base of NaiveMix and FedMix: an entry (x_g, y_g) for each batch or sample, and a small lambda."""

    needs = ("x", "y")
    numeric_inputs = True

    lam: Fraction = 0.1
    """Mixing ratio: the share of the mean in a mixed sample."""
    entries: Literal["batch", "sample"] = "batch"
    """One entry for all samples of a batch, as in the paper, or one for each sample."""
    spread: NonNegative = 0.0
    """How much lambda varies from batch to batch, around ``lambda`` as its mean: 0 for not at all. It is drawn from
    Beta(lambda / spread, (1 - lambda) / spread).
    """
    mixed_share: Fraction = 1.0
    """Share of the batches that are mixed; the other batches are plain (lambda = 0)."""
    warmup: Annotated[Int, Field(ge=0)] = 0
    """Rounds over which lambda rises linearly to its value."""
    exclude_own: bool = False
    """Use no means of the client itself; without means of other clients its batches are plain."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """``lam`` float32 [steps] (0 where a batch stays plain) and ``entry`` int64 [steps] or [steps, width]."""
        steps = len(plan.sizes)
        shape = (steps,) if self.entries == "batch" else (steps, plan.width)
        entry = draw_entries(rng, plan, shape, self.exclude_own)
        rise = min(1.0, (plan.round + 1) / (self.warmup + 1))
        mixed = (rng.random(steps) < self.mixed_share) & has_partner(plan, self.exclude_own)
        ratio = np.full(steps, self.lam)
        if self.spread and 0 < self.lam < 1:
            ratio = rng.beta(self.lam / self.spread, (1 - self.lam) / self.spread, steps)
        return {"lam": np.where(mixed, ratio * rise, 0.0).astype(np.float32), "entry": entry}

    def entry_of(self, drawn: Tensors, batch: Batch, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Averaged samples x_g and targets y_g: one of each, or one for each sample of the batch."""
        # index_select, because indexing with a scalar tensor would synchronise with the device.
        rows = drawn["entry"].reshape(1) if self.entries == "batch" else drawn["entry"][: len(batch.y)]
        x_g, y_g = (context.pool[name].index_select(0, rows) for name in ("x", "y"))
        return (x_g[0], y_g[0]) if self.entries == "batch" else (x_g, y_g)


@part("objective", "naivemix")
class NaiveMix(MeanMix):
    """Mix each batch with averaged data of other clients, as in plain mixup (FedMix, equation 1)."""

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        x_g, y_g = self.entry_of(drawn, batch, context)
        return mixed_loss(net, batch, x_g, y_g, drawn["lam"], context)


@part("objective", "fedmix")
class FedMix(MeanMix):
    r"""Approximate Global Mixup by a Taylor term on averaged data (FedMix, equation 5, Algorithm 2).

    With z = (1 - lambda) x and l the task's loss,

        (1 - lambda) l(f(z), y)  +  lambda l(f(z), y_g)  +  c * mean_b < d l(f(z_b), y_b) / d z_b , x_g >

    The derivative is taken at z, with respect to z, and is itself differentiated. One forward pass computes all
    three terms, so dropout draws one mask. ``taylor`` and ``average`` select readings of the paper.

    The first and the last term together predict (1 - lambda) l(f(x~_b), y_b) at the mixed sample x~ = z + lambda x_g.
    That loss is at least 0, but its prediction has no bound: a model that grows its input gradients lowers it without
    end, which is how FedMix collapses. ``remedy`` says what a sample does whose prediction is wrong:

    - "second" adds the second order, (1 - lambda) lambda^2 / 2 <x_g, H x_g> with the Hessian H of the loss at z. The
      product lambda H x_g is the difference of the gradients at x~ and at z, which is exact for a quadratic loss.
    - "drop" leaves the Taylor term out where the prediction is below 0.
    - "check" takes the larger of the prediction and the loss at x~, which a second forward pass gives, and the entry's
      term at x~ too. FedMix approximates Global Mixup, the mean of that loss over the raw samples behind x_g. Where the
      loss is convex in x, the mean is at least the loss at x_g (Jensen), and this is at least its tangent at z, the
      prediction. So both are bounds from below, and the larger one is nearer.
    """

    taylor: Literal["algorithm", "proposition"] = "algorithm"
    """Coefficient c: lambda (1 - lambda) as in Algorithm 2, or lambda as in Proposition 1; they differ by O(lambda^2).
    """
    average: Literal["sample", "twice"] = "sample"
    """Average the inner products over the batch (equation 5), or divide by its size twice, as public implementations
    do, which is not FedMix.
    """
    taylor_weight: NonNegative = 1.0
    """Factor on c; 0 removes the Taylor term, for ablations."""
    remedy: Literal["none", "second", "drop", "check"] = "none"
    """What is done about wrong predictions: nothing ("none", the paper), the "second" order, a "drop" or a "check"."""

    measures = (FAILED,)

    def warning(self, measured: Mapping[str, float]) -> str:
        share = measured.get(FAILED, 0.0)
        if self.remedy != "none" or share <= 0.1:
            return ""
        fails = f"the Taylor prediction fails for {100 * share:.0f} % of the samples"
        return f"{fails}: accuracy may collapse; see `fedmix-checked`"

    @pydantic.model_validator(mode="after")
    def _require_one_average(self) -> FedMix:
        if self.remedy != "none" and self.average == "twice":
            raise ValueError(f'remedy: "{self.remedy}" needs predictions of losses; valid with average "twice": "none"')
        return self

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        task, lam = context.task, drawn["lam"]
        x_g, y_g = self.entry_of(drawn, batch, context)

        def own(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            outputs = net(z)
            return task.loss(outputs, batch.y), outputs

        gradient, own_loss, outputs = net.input_gradient(own, (1 - lam) * batch.x)
        factor = self.taylor_weight * (lam * (1 - lam) if self.taylor == "algorithm" else lam)
        shared_loss = lam * task.loss(outputs, y_g)

        def predict(outputs: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """The loss of each sample at z, and predicted at the mixed sample; both times 1 - lambda."""
            unmixed = (1 - lam) * task.losses(outputs, batch.y)
            return unmixed, unmixed + len(batch.y) * factor * (gradient * x_g).flatten(1).sum(1)

        # `gradient` is the gradient of the batch mean, so the sum is already the mean over the batch.
        if self.remedy in ("none", "second"):
            if self.remedy == "second":
                gradient = (gradient + net.input_gradient(own, mixed_inputs(batch.x, x_g, lam))[0]) / 2
            context.count(FAILED, (predict(outputs.detach(), gradient.detach())[1] < 0).sum())
            taylor = (gradient * x_g).sum()
            if self.average == "twice":
                taylor = taylor / len(batch.y)
            return (1 - lam) * own_loss + shared_loss + factor * taylor
        unmixed, predicted = predict(outputs, gradient)
        context.count(FAILED, (predicted < 0).sum())
        if self.remedy == "drop":
            return torch.where(predicted > 0, predicted, unmixed).mean() + shared_loss
        outputs = net(mixed_inputs(batch.x, x_g, lam))
        actual = (1 - lam) * task.losses(outputs, batch.y)
        return torch.maximum(predicted, actual).mean() + lam * task.loss(outputs, y_g)


class Tail(NetAround):
    """The layers of a staged model from ``start`` on, as a model whose inputs are hidden states."""

    def __init__(self, net: Net, start: int) -> None:
        super().__init__(net)
        self.first = start

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        return self.net(x, self.first + start, None if stop is None else self.first + stop)

    def with_weights(self, weights: Tensors, training: bool = True) -> Tail:
        return Tail(self.net.with_weights(weights, training), self.first)

    @property
    def layers(self) -> int:
        return self.net.layers - self.first


@part("objective", "hidden-mix")
class HiddenMix(MeanMix):
    """Apply FedMix or NaiveMix to the hidden states after ``layer`` layers (FedMix, appendix E).

    Needs the sharing ``hidden-means`` of the same layer. Each batch takes two steps. The mixing step treats the
    client's hidden states as constants, and so updates only the layers after ``layer``. A plain step then updates all
    layers; terms such as FedProx's are added to this step only.
    """

    numeric_inputs = False
    reads = ("hidden",)

    layer: Count = 2
    """Layers before the hidden states that are mixed; the sharing must have the same."""
    form: Literal["fedmix", "naivemix"] = "fedmix"
    """The loss on the hidden states."""

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        return (self.mix, self.plain)

    def mix(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        hidden = net(batch.x, 0, self.layer).detach()
        inner: Objective = (FedMix if self.form == "fedmix" else NaiveMix)(lam=self.lam, entries=self.entries)
        return inner.loss(Tail(net, self.layer), Batch(hidden, batch.y), drawn, context)

    def plain(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        return context.task.loss(net(batch.x), batch.y)
