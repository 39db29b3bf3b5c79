"""One attack from several starting points, of which the best result is kept."""

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
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.core.registry import explain
from fedblend.core.trees import Tensors

ATTACKS: dict[str, type[Attack]] = {"invgrad": InvGrad, "dlg": DLG, "idlg": IDLG}
"""The attacks by name."""

Progress = Callable[[int, int, torch.Tensor], None]
"""Called after each iteration with the number of the starting point, of the iteration, and the cost."""


@dataclass(frozen=True)
class Reconstruction:
    """What an attack has rebuilt: images [B, ...] on the model's scale that cost least of all it has seen.

    ``y`` are their labels int64 [B], given, inferred, or the likeliest found. ``curve`` float64 [iterations + 1] are
    the costs of the starting point that led to them, number ``restart``; ``costs`` the least of each starting point.
    ``stopped`` says that the attack was interrupted.
    """

    x: torch.Tensor
    y: torch.Tensor
    cost: float
    curve: np.ndarray
    restart: int
    costs: tuple[float, ...]
    stopped: bool = False


@dataclass
class Restart:
    """What one starting point has led to: the images that cost least so far, with their labels and cost, and all costs.

    The three are one value, so that an interruption between two statements leaves none of them behind the others.
    """

    best: Iterate
    curve: list[torch.Tensor] = field(default_factory=list)

    @staticmethod
    def begin(iterate: Iterate) -> Restart:
        """Begin with an iterate; a cost that is no number counts as infinite."""
        x, y, cost = iterate
        return Restart((x.clone(), y.clone(), cost.nan_to_num(torch.inf)), [cost])

    def update(self, iterate: Iterate) -> None:
        """Keep an iterate if it costs less; without asking the device, which would have to be waited for."""
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
    """Rebuild images of ``shape`` (B, channels, height, width) from what a victim sent.

    ``observed`` are tensors by name, as :meth:`Victim.sent` gives them: a gradient, or an update. ``attack`` is a name
    with its ``options`` (``iterations``, ``restarts``, ``lr``, ...), or an attack ready made. ``labels`` int64 [B] are
    used where they are known; else DLG searches for them and the others infer them (:func:`infer_labels`). Starting
    points are standard normal, from ``rng``. An interruption (Ctrl-C) ends the attack with what it has found so far.

    Raises :class:`FedblendError` for unknown attacks and options, and for observations or labels that do not fit.
    """
    made = make_attack(attack, options)
    start = victim.start()
    _require_fitting(observed, start, shape, labels)
    like = next(iter(start.values()))
    seen = {name: observed[name].detach().to(like) for name in start}
    box = _pixel_range(victim, shape, like)
    known = _known_labels(victim, seen, shape, made) if labels is None else labels.to(like.device)
    trials: list[Restart] = []
    stopped = False
    try:
        for restart in range(made.restarts):
            x = torch.from_numpy(rng.standard_normal(tuple(shape))).to(like)
            y = known
            if y is None:
                y = torch.from_numpy(rng.standard_normal((shape[0], victim.context.task.outputs))).to(like)
            for number, iterate in enumerate(made.search(victim, seen, x, y, box)):
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
    """An attack by its name with its options, or one made already. Raises :class:`FedblendError` for unknown ones."""
    if isinstance(attack, Attack):
        if options:
            raise FedblendError(f"attack: options {', '.join(options)} belong to a name; this attack is made already")
        return attack
    if attack not in ATTACKS:
        raise FedblendError(
            f"attack: unknown attack '{attack}'{did_you_mean(attack, ATTACKS)}; valid: {', '.join(ATTACKS)}"
        )
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
                f"observed: '{name}' is of shape {list(observed[name].shape)}; valid: {list(weight.shape)}"
            )
        if not bool(observed[name].isfinite().all()):
            raise FedblendError(f"observed: '{name}' holds NaN or infinity; all numbers must be finite")
    if len(shape) != 4 or min(shape) < 1:
        raise FedblendError(f"shape: {list(shape)} is not valid: it must be [images, channels, height, width]")
    if labels is not None and (labels.shape != (shape[0],) or labels.is_floating_point()):
        raise FedblendError(
            f"labels: {labels.dtype} of shape {list(labels.shape)}; valid: whole numbers of shape [{shape[0]}]"
        )


def _pixel_range(victim: Victim, shape: Sequence[int], like: torch.Tensor) -> Box:
    """The least and the greatest value that a picture's pixels can have on the model's scale, [1, C, H, W] both."""
    ends = [victim.context.scale.from_unit(torch.full((1, *shape[1:]), unit).to(like)) for unit in (0.0, 1.0)]
    return torch.minimum(*ends), torch.maximum(*ends)


def _known_labels(victim: Victim, observed: Tensors, shape: Sequence[int], attack: Attack) -> torch.Tensor | None:
    """Labels that are inferred before the search; none where it searches for them."""
    if attack.searches_labels():
        return None
    # An update goes against the gradient, by about the learning rate at each step.
    factor = 1.0 if victim.steps is None else -1 / (victim.steps.lr * victim.steps.count)
    return infer_labels(victim.model, {name: factor * tensor for name, tensor in observed.items()}, shape[0])


def _best_result(trials: Sequence[Restart], stopped: bool) -> Reconstruction:
    costs = tuple(float(trial.best[2]) for trial in trials)
    restart = int(np.argmin(costs))
    x, y, _ = trials[restart].best
    y = y.argmax(-1) if y.is_floating_point() else y
    curve = torch.stack(trials[restart].curve).double().cpu().numpy()
    return Reconstruction(x, y, costs[restart], curve, restart, costs, stopped)
