"""The form of the inputs and outputs of a user's own model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import torch

from fedblend.core.context import Task
from fedblend.core.dataset import TaskKind
from fedblend.core.errors import FedblendError, brief
from fedblend.data.scale import Scaler


def is_number(value: Any, above: float) -> bool:
    """Whether a value is a finite number above a bound."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and above < value < math.inf


@dataclass(frozen=True)
class Inputs:
    """Shape and scale of one input, and the number of the model's outputs.

    An input is (u - ``mean``) / ``std`` of u in [0, 1] with ink as 1, as torchvision's ``Normalize`` makes it. Only
    methods that make or augment images use ``mean`` and ``std``. Raises :class:`FedblendError` on an invalid field.
    """

    shape: tuple[int, ...]
    """Shape of one input without the batch: [features] or [channels, height, width]."""
    outputs: int
    """Number of classes, of labels, or of target numbers in regression."""
    mean: float | Sequence[float] = 0.0
    """One number, or one for each channel (or feature)."""
    std: float | Sequence[float] = 1.0
    """One number above 0, or one for each channel (or feature)."""
    kind: TaskKind = "classification"

    def __post_init__(self) -> None:
        sizes = tuple(self.shape) if isinstance(self.shape, (tuple, list)) else ()
        if not sizes or not all(type(size) is int and size > 0 for size in sizes):
            raise FedblendError(
                f"inputs: shape: {brief(self.shape)} is not valid: whole numbers from 1 up, such as (784,) or "
                "(1, 28, 28)"
            )
        object.__setattr__(self, "shape", sizes)
        if type(self.outputs) is not int or self.outputs < 1:
            raise FedblendError(f"inputs: outputs: {self.outputs!r} is not valid: a whole number from 1 up")
        if self.kind not in get_args(TaskKind):
            raise FedblendError(f"inputs: kind: {self.kind!r} is not valid: {', '.join(get_args(TaskKind))}")
        for field, least in (("mean", -math.inf), ("std", 0.0)):
            values = getattr(self, field)
            values = values.tolist() if isinstance(values, (np.ndarray, np.generic, torch.Tensor)) else values
            numbers = values if isinstance(values, (tuple, list)) else [values]
            if len(numbers) not in (1, self.shape[0]) or not all(is_number(number, least) for number in numbers):
                above = " above 0" if field == "std" else ""
                raise FedblendError(
                    f"inputs: {field}: {brief(values)} is not valid: one number{above}, or one for each of "
                    f"{self.shape[0]}"
                )

    @property
    def task(self) -> Task:
        return Task(self.kind, self.outputs)

    @property
    def scale(self) -> Scaler:
        """Return the scale of inputs: the identity for the model, and the maps to [0, 1] and back."""
        mean, std = (
            torch.as_tensor(value, dtype=torch.float32).flatten().expand(self.shape[0]).clone()
            for value in (self.mean, self.std)
        )
        identity = torch.ones_like(mean), torch.zeros_like(mean)
        shape = (-1, *[1] * (len(self.shape) - 1))
        return Scaler("own", False, *(t.reshape(shape) for t in (*identity, std, mean)))
