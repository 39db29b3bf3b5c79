"""Optimisers of local training, and schedules of the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, Field

from fedblend.core.errors import FedblendError
from fedblend.core.optimizer import Optimizer, Schedule
from fedblend.core.registry import Count, Float, Fraction, Int, Positive, import_path, part, require_trusted


@part("optimizer", "sgd")
class SGD(Optimizer):
    """Stochastic gradient descent, with ``train.momentum`` and ``train.weight_decay``; as ``torch.optim.SGD``."""

    steps = "sgd"
    state_keys = ("momentum_buffer",)


@part("optimizer", "adam")
class Adam(Optimizer):
    """Adam (Kingma and Ba 2015, Algorithm 1), as ``torch.optim.Adam``.

    ``train.weight_decay`` is an L2 penalty: it is added to the gradient. A gradient that is 0 but for rounding moves a
    weight by up to a whole step, so that engines may differ in such weights; a larger ``eps`` prevents this.
    """

    state_keys = ("exp_avg", "exp_avg_sq", "step")
    decoupled = False

    beta1: Annotated[Float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[Float, Field(ge=0, lt=1)] = 0.999
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """Number that is added to the root of the mean of squared gradients."""


@part("optimizer", "adamw")
class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, Algorithm 2), as ``torch.optim.AdamW``.

    Each step multiplies the weights by 1 - lr times ``train.weight_decay``, which is 0 by default.
    """

    decoupled = True


def _of_torch(path: str) -> str:
    if not path.startswith(("torch.optim.", "torch.optim:")) or ":" not in path:
        raise ValueError("it is the path of an optimiser of PyTorch, as torch.optim:RMSprop")
    return require_trusted(path, "train.optimizer")


@part("optimizer", "torch")
class TorchOptimizer(Optimizer):
    """Any optimiser of ``torch.optim``, by its path; the loop engine trains with it, and ``engine = "auto"`` takes it.

    In a file the path may be the name: ``optimizer = { name = "torch.optim:RMSprop", alpha = 0.9 }``. Its state begins
    anew in each round.
    """

    steps = "torch"

    path: Annotated[str, AfterValidator(_of_torch)]
    """The class, as `torch.optim:RMSprop`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Its options, except the learning rate; among them momentum and weight decay."""

    def make(self, params: Sequence[torch.Tensor], lr: float) -> torch.optim.Optimizer:
        """The optimiser. Raises :class:`FedblendError` for a path that is none, and for options that it refuses."""
        cls = import_path(self.path, "train.optimizer")
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise FedblendError(f"train.optimizer: '{self.path}' is no subclass of torch.optim.Optimizer")
        closure = inspect.signature(cls.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise FedblendError(f"train.optimizer: '{self.path}' evaluates a loss several times a step; valid: another")
        try:
            return cls(list(params), **{"lr": lr, **self.options})
        except (TypeError, ValueError) as error:
            raise FedblendError(f"train.optimizer: '{self.path}' refuses its options: {error}") from None


@part("schedule", "constant")
class Constant(Schedule):
    """The same learning rate in all steps, after a linear warm-up."""

    warmup: Annotated[Int, Field(ge=0)] = 0
    """Rounds (or steps) before the full learning rate: in the first ones it is 1, 2, ... times lr / (warmup + 1)."""

    def factor(self, step: int, steps: int | None = None) -> float:
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        return self.after(step - self.warmup, None if steps is None else max(1, steps - self.warmup))

    def after(self, step: int, steps: int | None) -> float:
        """The factor of a step after the warm-up, counted from its end."""
        return 1.0


@part("schedule", "exponential")
class Exponential(Constant):
    """The learning rate is multiplied by ``gamma`` after each round (or step)."""

    gamma: Annotated[Float, Field(gt=0, le=1)] = 0.999
    """The factor."""

    def after(self, step: int, steps: int | None) -> float:
        return self.gamma**step


@part("schedule", "step")
class StepDecay(Constant):
    """The learning rate is multiplied by ``gamma`` after every ``every`` rounds (or steps)."""

    gamma: Annotated[Float, Field(gt=0, le=1)] = 0.1
    """The factor."""
    every: Count = 30
    """Rounds (or steps) with one learning rate."""

    def after(self, step: int, steps: int | None) -> float:
        return self.gamma ** (step // self.every)


@part("schedule", "cosine")
class Cosine(Constant):
    """The learning rate falls along half a cosine to ``floor`` times itself (Loshchilov and Hutter 2017, equation 5).

    After ``length`` rounds (or steps) it stays there.
    """

    floor: Fraction = 0.0
    """Factor at the end."""
    length: Count | None = None
    """Rounds (or steps) after the warm-up until the end (default: the client's steps in the round; over rounds it must
    be given, so that a resumed run with more rounds has the same learning rates).
    """

    def require_over_rounds(self) -> None:
        """Raise ``ValueError`` where no length is given."""
        if self.length is None:
            raise ValueError(f"train.schedule.length: must be given for '{self.name}' over rounds")

    def after(self, step: int, steps: int | None) -> float:
        """floor + (1 - floor) (1 + cos(pi step / length)) / 2."""
        share = min(1.0, step / (self.length or steps or 1))
        return self.floor + (1 - self.floor) * (1 + math.cos(math.pi * share)) / 2
