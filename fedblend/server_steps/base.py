"""What a server step is, and what it may use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedblend.data.scale import OneHot, Scaler
from fedblend.objectives.task import Task

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Server:
    """What a server step may use beside the aggregate.

    ``model`` is a module for :func:`torch.func.functional_call`, in evaluation mode; ``trained`` names the tensors
    that clients train, ``shape`` is that of one input. ``uploads`` are the round's good ones with their weights, in
    order of client, if the step asks for them; ``state`` is what the step kept in the round before; ``lr`` the
    clients' learning rate of the round; ``rng`` is keyed by seed and round.
    """

    round: int
    model: nn.Module
    trained: Sequence[str]
    shape: tuple[int, ...]
    scale: Scaler | OneHot
    task: Task
    lr: float
    rng: np.random.Generator
    uploads: Sequence[tuple[Tensors, float]] = ()
    state: dict[str, torch.Tensor] = field(default_factory=dict)


class ServerStep:
    """Base of all server steps.

    ``needs_uploads`` is true where a step looks at the clients' models themselves, not only at the aggregate.
    """

    needs_uploads: bool = False
    active: bool = True

    def require_possible(self, scale: Scaler | OneHot, task: Task) -> None:
        """Raise :class:`FedblendError` if the step cannot be used with these data, before the first round."""

    def refine(self, weights: Tensors, server: Server) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The weights that the next round begins with, from the aggregate; and what the step keeps till then."""
        raise TypeError(f"{type(self).__name__} defines no refine")
