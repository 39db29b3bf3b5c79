"""What a server step is, and what it may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedblend.core.objective import Scale, Task
from fedblend.core.registry import Part
from fedblend.core.sharing import Pool

Tensors = Mapping[str, torch.Tensor]
Refined = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


Response = dict[str, torch.Tensor]


def _nobody(question: Tensors) -> list[Response]:
    """The answers where there are no clients to ask."""
    return []


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What server and clients both know of the model that they train.

    ``model`` is a module for :func:`torch.func.functional_call`, in evaluation mode; ``trained`` names the tensors
    that clients train, ``shape`` is that of one input.
    """

    model: nn.Module
    trained: Sequence[str]
    shape: tuple[int, ...]
    scale: Scale
    task: Task


@dataclass(frozen=True, kw_only=True)
class ServerContext(ModelSpec):
    """What a server step may use beside the aggregate.

    ``ask`` puts a question to the holders of the round's good uploads, and gives their answers in order of client.
    ``state`` is what the step kept in the round before; ``lr`` the clients' learning rate of the round; ``rng`` is
    keyed by seed and round. ``said`` is the aggregate of uploads that are no models (mean outputs by label), ``pool``
    what was made of what clients shared. ``prior(n)`` gives n real samples of each class, as stored, the same ones in
    all rounds.
    """

    round: int
    lr: float
    rng: np.random.Generator
    ask: Callable[[Tensors], list[Response]] = _nobody
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    said: Tensors = field(default_factory=dict)
    pool: Pool | None = None
    prior: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None


class ServerStep(Part):
    """Base of all server steps.

    ``looks_at_uploads`` is true where a step works with single uploads, not only with the aggregate: it then puts
    questions to whoever holds them, which are answered by :meth:`answers`, on the rank that trained the client.
    Questions and answers travel only where ``queries_clients`` says that it is the clients who answer, and the server
    never sees their uploads. ``breaks_privacy`` is true where a step uses raw samples, ``reads_pool`` where it works on
    what clients share, ``needs_pool`` where it has nothing to do without that.
    """

    looks_at_uploads: bool = False
    queries_clients: bool = False
    breaks_privacy: bool = False
    reads_pool: bool = False
    needs_pool: bool = False
    active: bool = True

    def require_possible(self, known: ModelSpec) -> None:
        """Raise :class:`FedblendError` if the step cannot be used with these data, before the first round."""

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The weights that the next round begins with, from the aggregate; and what the step keeps till then."""
        raise TypeError(f"{type(self).__name__} defines no refine")

    def answers(self, uploads: Mapping[int, Tensors], question: Tensors, known: ModelSpec) -> dict[int, Response]:
        """What is said to a question by each of the clients whose uploads these are; of each by its upload alone."""
        raise TypeError(f"{type(self).__name__} defines no answers")
