"""Gradient inversion: costs between updates, attacks that search for images of the least cost, labels read off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
import pydantic
import torch
from pydantic import ConfigDict
from torch import nn

from fedblend.analysis.attacks.victim import Victim
from fedblend.core.errors import FedblendError, or_valid
from fedblend.core.registry import Count, NonNegative, Positive, explain
from fedblend.core.trees import Tensors

# The attacks ---------------------------------------------------------------------------------------------------


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


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
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


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
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


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class DLG(Attack):
    """Deep leakage from gradients (Zhu et al. 2019): squared cost by L-BFGS, over images and soft labels together.

    Each iteration is one L-BFGS step with up to ``inner`` updates. Given labels stay fixed.
    """

    searches_labels = True
    lr: Positive = 1.0
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


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class IDLG(DLG):
    """Improved DLG (Zhao et al. 2020): the label is inferred first, and only the images are optimised."""

    searches_labels = False


# An attack from several starting points; the result of the least cost is kept ----------------------------------


ATTACKS: dict[str, type[Attack]] = {"invgrad": InvGrad, "dlg": DLG, "idlg": IDLG}  # The attacks by name

Progress = Callable[[int, int, torch.Tensor], None]
"""Called after each iteration with the number of the starting point, of the iteration, and the cost."""


@dataclass(frozen=True)
class Reconstruction:
    """The images of the least cost that an attack found."""

    x: torch.Tensor
    """Images [B, ...] on the model's scale."""
    y: torch.Tensor
    """Labels int64 [B]: given, inferred, or the likeliest found."""
    cost: float
    curve: np.ndarray
    """Costs of all iterations from starting point ``restart``, float64 [iterations + 1]."""
    restart: int
    """Number of the starting point that led to the images."""
    costs: tuple[float, ...]
    """Least cost from each starting point."""
    stopped: bool = False
    """Whether the attack was interrupted."""


@dataclass
class Restart:
    """The search from one starting point."""

    best: Iterate
    """Images of the least cost so far, labels and cost; one tuple, so an interruption keeps them together."""
    curve: list[torch.Tensor]

    def update(self, iterate: Iterate) -> None:
        """Keep an iterate if it costs less. The comparison stays on the device, to avoid a synchronisation."""
        better = iterate[2] < self.best[2]
        x, y, cost = (torch.where(better, new, old) for new, old in zip(iterate, self.best, strict=True))
        self.best = x, y, cost
        self.curve.append(iterate[2])


def invert(
    victim: Victim,
    observed: Tensors,
    shape: Sequence[int],
    attack: Attack,
    *,
    labels: torch.Tensor | None = None,
    rng: np.random.Generator,
    progress: Progress | None = None,
) -> Reconstruction:
    """Rebuild images of ``shape`` (B, channels, height, width) from a victim's gradient or update.

    ``observed`` are tensors by name, as :meth:`Victim.sent` returns them: a gradient, or an update. ``labels`` int64
    [B] are the true labels if known. Otherwise DLG searches for them and the other attacks infer them
    (:func:`infer_labels`). Starting points are standard normal, from ``rng``. An interruption (Ctrl-C) ends the attack
    with the best images so far.

    Raises :class:`FedblendError` for invalid observations or labels.
    """
    start = victim.start()
    _require_fitting(observed, start, shape, labels)
    like = next(iter(start.values()))
    seen = {name: observed[name].detach().to(like) for name in start}
    box = _pixel_range(victim, shape, like)
    known = _known_labels(victim, seen, shape, attack) if labels is None else labels.to(like.device)
    trials: list[Restart] = []
    stopped = False
    try:
        for restart in range(attack.restarts):
            x = torch.from_numpy(rng.standard_normal(tuple(shape))).to(like)
            y = known
            if y is None:
                y = torch.from_numpy(rng.standard_normal((shape[0], victim.context.task.outputs))).to(like)
            for number, iterate in enumerate(attack.search(victim, seen, x, y, box)):
                if number:
                    trials[restart].update(iterate)
                else:
                    images, targets, cost = iterate
                    # A NaN cost counts as infinite.
                    trials.append(Restart((images.clone(), targets.clone(), cost.nan_to_num(torch.inf)), [cost]))
                if progress is not None:
                    progress(restart, number, iterate[2])
    except KeyboardInterrupt:
        if not trials:
            raise
        stopped = True
    return _best_result(trials, stopped)


def make_attack(attack: str, options: Mapping[str, Any]) -> Attack:
    """Return the attack with this name and these options. Raises :class:`FedblendError` for unknown ones."""
    if attack not in ATTACKS:
        raise FedblendError(f"attack: unknown attack '{attack}'{or_valid(attack, ATTACKS)}")
    try:
        return ATTACKS[attack](**options)
    except pydantic.ValidationError as error:
        raise FedblendError(explain(error, f"attack {attack}")) from None


def _require_fitting(observed: Tensors, start: Tensors, shape: Sequence[int], labels: torch.Tensor | None) -> None:
    for name, weight in start.items():
        if name not in observed:
            raise FedblendError(f"observed: '{name}' is missing; valid: a tensor for each of {', '.join(start)}")
        if observed[name].shape != weight.shape:
            raise FedblendError(
                f"observed: '{name}' has shape {list(observed[name].shape)}; valid: {list(weight.shape)}"
            )
        if not bool(observed[name].isfinite().all()):
            raise FedblendError(f"observed: '{name}' contains NaN or infinity; all values must be finite")
    if len(shape) != 4 or min(shape) < 1:
        raise FedblendError(f"shape: {list(shape)} is not valid: it must be [images, channels, height, width]")
    if labels is not None and (labels.shape != (shape[0],) or labels.is_floating_point()):
        raise FedblendError(
            f"labels: {labels.dtype} of shape {list(labels.shape)} is not valid; valid: integers of shape [{shape[0]}]"
        )


def _pixel_range(victim: Victim, shape: Sequence[int], like: torch.Tensor) -> Box:
    """Return the least and the greatest pixel value on the model's scale, [1, C, H, W] each."""
    ends = [victim.context.scale.from_unit(torch.full((1, *shape[1:]), unit).to(like)) for unit in (0.0, 1.0)]
    return torch.minimum(*ends), torch.maximum(*ends)


def _known_labels(victim: Victim, observed: Tensors, shape: Sequence[int], attack: Attack) -> torch.Tensor | None:
    """Return labels inferred before the search, or ``None`` if the attack searches for labels."""
    if attack.searches_labels:
        return None
    # An update is about -lr times the gradient at each step.
    factor = 1.0 if victim.steps is None else -1 / (victim.steps.lr * victim.steps.count)
    return infer_labels(victim.model, {name: factor * tensor for name, tensor in observed.items()}, shape[0])


def _best_result(trials: Sequence[Restart], stopped: bool) -> Reconstruction:
    costs = tuple(float(trial.best[2]) for trial in trials)
    restart = int(np.argmin(costs))
    x, y, _ = trials[restart].best
    y = y.argmax(-1) if y.is_floating_point() else y
    curve = torch.stack(trials[restart].curve).double().cpu().numpy()
    return Reconstruction(x, y, costs[restart], curve, restart, costs, stopped)


def infer_labels(model: nn.Module, gradient: Mapping[str, torch.Tensor], count: int = 1) -> torch.Tensor:
    """Return labels int64 [count], sorted, from the last linear layer's gradient (iDLG, Zhao et al. 2020).

    The gradient at an output is the mean of p - y over the batch. For one image it is negative only at the true label,
    so the result is exact. Without a bias, the sum of a row of weights replaces the bias gradient; its sign is the same
    if the layer's inputs are not negative. For several images, the label of the most negative gradient is taken and
    1 / count is added to it, ``count`` times; this is exact while p is small compared with 1 / count. For an update
    over several steps the result is an estimate. Raises :class:`FedblendError` if the model ends in no linear layer.
    """
    last = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)][-1:]
    before = f"{last[0]}." if last and last[0] else ""
    if not last or f"{before}weight" not in gradient:
        raise FedblendError(
            "labels: cannot be inferred, because the model ends in no linear layer whose gradient was sent; "
            "give them, or use the attack 'dlg'"
        )
    bias = gradient.get(f"{before}bias")
    remaining = (gradient[f"{before}weight"].sum(1) if bias is None else bias).clone()
    # Without a bias the scale of the gradient is unknown; it is estimated from the negative rows.
    unit = 1 / count if bias is not None else float(remaining.clamp(max=0).abs().sum()) / count
    found = []
    for _ in range(count):
        found.append(int(remaining.argmin()))
        remaining[found[-1]] += unit
    return torch.tensor(sorted(found), device=remaining.device)
