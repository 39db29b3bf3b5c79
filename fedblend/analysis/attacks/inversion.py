"""Gradient inversion from several starting points; the result of the least cost is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pydantic
import torch

from fedblend.analysis.attacks.labels import infer_labels
from fedblend.analysis.attacks.search import DLG, IDLG, Attack, Box, InvGrad, Iterate
from fedblend.analysis.attacks.victim import Victim
from fedblend.core.errors import FedblendError, or_valid
from fedblend.core.registry import explain
from fedblend.core.trees import Tensors

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
    """Their cost."""
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
    curve: list[torch.Tensor] = field(default_factory=list)
    """Costs of all iterations so far."""

    @staticmethod
    def begin(iterate: Iterate) -> Restart:
        """Return the search at its first iterate. A NaN cost counts as infinite."""
        x, y, cost = iterate
        return Restart((x.clone(), y.clone(), cost.nan_to_num(torch.inf)), [cost])

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
    *,
    attack: str | Attack = "invgrad",
    labels: torch.Tensor | None = None,
    rng: np.random.Generator,
    progress: Progress | None = None,
    **options: Any,
) -> Reconstruction:
    """Rebuild images of ``shape`` (B, channels, height, width) from a victim's gradient or update.

    ``observed`` are tensors by name, as :meth:`Victim.sent` returns them: a gradient, or an update. ``attack`` is a
    name with its ``options`` (``iterations``, ``restarts``, ``lr``, ...), or an :class:`Attack`. ``labels`` int64 [B]
    are the true labels if known. Otherwise DLG searches for them and the other attacks infer them
    (:func:`infer_labels`). Starting points are standard normal, from ``rng``. An interruption (Ctrl-C) ends the attack
    with the best images so far.

    Raises :class:`FedblendError` for unknown attacks and options, and for invalid observations or labels.
    """
    search = make_attack(attack, options)
    start = victim.start()
    _require_fitting(observed, start, shape, labels)
    like = next(iter(start.values()))
    seen = {name: observed[name].detach().to(like) for name in start}
    box = _pixel_range(victim, shape, like)
    known = _known_labels(victim, seen, shape, search) if labels is None else labels.to(like.device)
    trials: list[Restart] = []
    stopped = False
    try:
        for restart in range(search.restarts):
            x = torch.from_numpy(rng.standard_normal(tuple(shape))).to(like)
            y = known
            if y is None:
                y = torch.from_numpy(rng.standard_normal((shape[0], victim.context.task.outputs))).to(like)
            for number, iterate in enumerate(search.search(victim, seen, x, y, box)):
                if number:
                    trials[restart].update(iterate)
                else:
                    trials.append(Restart.begin(iterate))
                if progress is not None:
                    progress(restart, number, iterate[2])
    except KeyboardInterrupt:
        if not trials:
            raise
        stopped = True
    return _best_result(trials, stopped)


def make_attack(attack: str | Attack, options: Mapping[str, Any]) -> Attack:
    """Return the attack with this name and these options. Raises :class:`FedblendError` for unknown ones."""
    if isinstance(attack, Attack):
        if options:
            raise FedblendError(
                f"attack: options {', '.join(options)} are valid only with the name of an attack; "
                "set them as fields of the attack"
            )
        return attack
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
