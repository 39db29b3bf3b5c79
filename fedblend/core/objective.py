"""The loss of a task, on class indices or on mixed targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.core.registry import Part, part


@dataclass(frozen=True)
class Task:
    """What is predicted, and the loss it is scored with; both losses are means over the batch.

    - classification: cross-entropy of logits [B, C] with class indices [B], a distribution [C] that
      the whole batch shares, or one a sample [B, C];
    - regression: squared error, summed over the outputs [B, q] (FedMix, footnotes 1 and 2).
    """

    kind: Literal["classification", "regression"]
    outputs: int

    def loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch; a target without batch dimension stands for every sample."""
        if self.kind == "regression":
            return (outputs - target).square().sum(-1).mean()
        if not target.is_floating_point():
            # F.cross_entropy but for targets to leave out, which cost a traced step a dozen operations.
            return -F.log_softmax(outputs, -1).gather(-1, target[:, None]).mean()
        # A shared distribution broadcasts, so no [B, C] copy of it is made.
        return -(F.log_softmax(outputs, -1) * target).sum(-1).mean()

    def encode(self, target: torch.Tensor) -> torch.Tensor:
        """Targets as float vectors [n, outputs]: one-hot classes, or the numbers themselves."""
        if self.kind == "regression":
            return target.float()
        return F.one_hot(target.long(), self.outputs).float()


Tensors = Mapping[str, torch.Tensor]


class Batch(NamedTuple):
    """One batch: inputs [B, ...] on the model's scale (float32) and targets as stored."""

    x: torch.Tensor
    y: torch.Tensor


class Net(Protocol):
    """A model as an objective sees it: a function, and a derivative with respect to its input.

    Engines bring their own: plain autograd in the loop, ``torch.func`` where clients are stacked.
    """

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Outputs for inputs ``x``; ``start`` and ``stop`` pick layers of a staged model."""
        ...

    def input_gradient(
        self, scalar: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For ``scalar(x) -> (value, aux)`` return d value / d x, value and aux, all differentiable."""
        ...


class Scale(Protocol):
    """What turns stored samples into inputs, with the way to pictures and back (:mod:`fedblend.data.scale`)."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Inputs of stored samples."""
        ...

    def to_unit(self, scaled: torch.Tensor, /) -> torch.Tensor:
        """Pictures of inputs: [0, 1], ink as 1."""
        ...

    def from_unit(self, unit: torch.Tensor, /) -> torch.Tensor:
        """Inputs of pictures."""
        ...

    def diameter(self, shape: Sequence[int], /) -> float:
        """The largest L2 distance of two inputs of ``shape``."""
        ...

    def to(self, device: torch.device | str, /) -> Any:
        """The same scale with its numbers on ``device``."""
        ...

    def describe(self) -> dict[str, Any]:
        """The scale in plain numbers, for the run's record."""
        ...


@dataclass(frozen=True)
class Context:
    """What an objective may use beside the batch; the same for all steps of a client's round.

    ``pool`` is what sharing gave this client, ``start`` the round's global weights, ``scale`` turns
    stored samples into inputs, ``said`` is what the server says beside a model (mean outputs [C, C] by label).
    """

    task: Task
    scale: Scale
    pool: Tensors = field(default_factory=dict)
    start: Tensors = field(default_factory=dict)
    said: Tensors = field(default_factory=dict)


class StepPlan(NamedTuple):
    """A client's steps of one round, known before any is made: what the random half is drawn for.

    ``sizes`` int64 [steps] are the batch sizes, ``width`` the largest; ``own`` marks the entries of
    the pool that came from this client, bool [entries].
    """

    sizes: np.ndarray
    width: int
    round: int
    own: np.ndarray | None = None
    entries: int = 0


class Objective(Part):
    """Base of all objectives. A method author overrides :meth:`loss`, and :meth:`draw` if it is random.

    ``needs`` names the tensors that sharing must bring (checked before the first round): a class attribute, mostly.
    """

    breaks_privacy: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        """Nothing, unless an objective says so."""
        return ()

    @property
    def copies(self) -> int:
        """How many times a batch's samples go through the model in the largest forward pass.

        Dropout draws a mask for each of them.
        """
        return 1

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """The random half: arrays with one row a step, drawn from the client's stream of the round."""
        return {}

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """The pure half: the scalar loss of one batch, given one row of what was drawn."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def alone(self) -> Objective:
        """What a client minimises that has nothing to mix with, where the objective needs something: the task's loss.

        Only then is it asked for.
        """
        return Plain()

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        """The losses that one batch is stepped on, in turn; nearly always just :meth:`loss`.

        Terms are added to the last.
        """
        return (self.loss,)


class Term(Part):
    """Base of the terms that add to any objective (FedProx's proximal term, distillation).

    ``uses_outputs`` says that a term needs the server to say mean outputs by label.
    """

    uses_outputs: bool = False

    @property
    def pull(self) -> float:
        """mu of a term that is mu / 2 ||w - w_t||^2 and nothing else: steps of SGD may then add mu (w - w_t) at once.

        0 for any other term, which is differentiated.
        """
        return 0.0

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """A scalar added to the loss of the objective's last phase (nearly always the only one)."""
        raise TypeError(f"{type(self).__name__} defines no loss")


@part("objective", "plain")
class Plain(Objective):
    """The task's loss on the client's own batch: cross-entropy, or squared error (FedMix, Algorithm 3)."""

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch."""
        return context.task.loss(net(batch.x), batch.y)
