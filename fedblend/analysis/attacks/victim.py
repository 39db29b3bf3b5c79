"""A client's update as a differentiable function of its images and targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Batch, Context, Objective, Plain, Term
from fedblend.core.trees import Tensors
from fedblend.engines.nets import FunctionalNet


@dataclass(frozen=True)
class Steps:
    """A client's local steps of SGD, as ``train`` in an experiment describes them.

    ``batches`` are the rows of the images that each step takes, or a number of steps on all of them.
    """

    lr: float
    batches: int | Sequence[Sequence[int]]
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise FedblendError(f"steps.lr: {self.lr!r} is not valid: must be above 0")
        if self.count < 1:
            raise FedblendError(f"steps.batches: {self.batches!r} is not valid; valid: at least one step")

    @property
    def count(self) -> int:
        return self.batches if isinstance(self.batches, int) else len(self.batches)

    def rows(self, images: int) -> list[list[int]]:
        """Return the rows of each step among ``images`` images."""
        if isinstance(self.batches, int):
            return [list(range(images))] * self.batches
        return [list(rows) for rows in self.batches]


@dataclass(frozen=True)
class Victim:
    """A client under attack: its local computation from images to update.

    The client begins with ``weights`` (default: the model's) and minimises ``objective`` with ``terms`` in ``context``,
    with the random numbers ``drawn``, one row for each step. ``steps`` are its local steps; without them it sends the
    gradient of one batch. ``protect`` is the part of the protection that an attacker can repeat. Layers run in the
    model's current mode, training or evaluation.
    """

    model: nn.Module
    context: Context
    objective: Objective = field(default_factory=Plain)
    terms: Sequence[tuple[str, Term]] = ()
    drawn: Tensors = field(default_factory=dict)
    steps: Steps | None = None
    weights: Tensors | None = None
    protect: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None

    def start(self) -> dict[str, torch.Tensor]:
        """Return the trainable weights at the start of the round, by name."""
        own = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        return {name: (self.weights or own)[name].detach() for name in own}

    def sent(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the gradient or update w - w_t that the client sends for images ``x`` [B, ...] on the model's scale.

        ``y`` are classes int64 [B], or a distribution over classes for each image [B, classes]. The result is
        differentiable with respect to both, through all steps.
        """
        start = {name: weight.requires_grad_() for name, weight in self.start().items()}
        if self.steps is None:
            gradient = self._gradient(start, Batch(x, y), 0, -1)
            sent = {name: gradient.get(name, torch.zeros_like(weight)) for name, weight in start.items()}
        else:
            sent = self._update(start, x, y, self.steps)
        return self.protect(sent) if self.protect else sent

    def update_of(self, upload: Tensors) -> dict[str, torch.Tensor]:
        """Return an uploaded model's update: trainable weights minus those at the start of the round."""
        return {name: upload[name].to(weight.device) - weight for name, weight in self.start().items()}

    def observe(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return :meth:`sent` without its graph: the values that a server receives."""
        return {name: tensor.detach() for name, tensor in self.sent(x, y).items()}

    def _update(self, start: Tensors, x: torch.Tensor, y: torch.Tensor, steps: Steps) -> dict[str, torch.Tensor]:
        """Return the sum of all steps, kept apart from the weights: w - w_t would round small steps away."""
        moved = {name: torch.zeros_like(weight) for name, weight in start.items()}
        velocity: dict[str, torch.Tensor] = {}
        for number, rows in enumerate(steps.rows(len(x))):
            batch = Batch(x[rows], y[rows])
            for turn in range(len(self.objective.phases())):
                weights = {name: start[name] + moved[name] for name in start}
                gradient = self._gradient(weights, batch, number, turn)
                for name, step in _step_direction(gradient, weights, velocity, steps).items():
                    moved[name] = moved[name] - steps.lr * step
        return moved

    def _gradient(self, weights: Tensors, batch: Batch, step: int, turn: int) -> dict[str, torch.Tensor]:
        """The gradient of the objective's phase ``turn``; terms are added to the last phase, as in the engines."""
        net, phases = FunctionalNet(self.model, weights), self.objective.phases()
        row = {name: values[step] for name, values in self.drawn.items()}
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's fused attention has no second derivative
            loss = phases[turn](net, batch, row, self.context.of_part("objective"))
            for slot, term in self.terms if turn in (-1, len(phases) - 1) else ():
                loss = loss + term.loss(weights, net, batch, self.context.of_part(slot))
        gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True, allow_unused=True)
        return {name: gradient for name, gradient in zip(weights, gradients, strict=True) if gradient is not None}


def _step_direction(
    gradient: Tensors, weights: Tensors, velocity: dict[str, torch.Tensor], steps: Steps
) -> dict[str, torch.Tensor]:
    """A step's direction: clipping, weight decay, momentum, as in the engines; none for weights without a gradient."""
    direction = dict(gradient)
    if steps.clip_norm is not None:
        norm = torch.stack([g.norm() for g in direction.values()]).norm()
        direction = {name: g * (steps.clip_norm / (norm + 1e-6)).clamp(max=1.0) for name, g in direction.items()}
    if steps.weight_decay:
        direction = {name: g + steps.weight_decay * weights[name] for name, g in direction.items()}
    if steps.momentum:
        direction = {
            name: g + steps.momentum * velocity[name] if name in velocity else g for name, g in direction.items()
        }
        velocity.update(direction)
    return direction
