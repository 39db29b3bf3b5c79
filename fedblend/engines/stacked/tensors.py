"""The tensors of a stack: what it begins with, the batches of a step, and the clients' training state."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedblend._kernels.lowrank import LowRank
from fedblend.core.objective import Objective, Term

OBJECTIVE, COUNTS = "client_state/objective/", "counts/"
"""Prefix of what the objective keeps at clients."""


@dataclass(frozen=True)
class StackInputs:
    """The objective of a stack of K clients, and the tensors of a round's start."""

    objective: Objective
    terms: Sequence[tuple[str, Term]]
    """Terms that are added to the objective, with their slots."""
    params: Sequence[torch.Tensor]
    """Initial parameters [K, ...]."""
    client_tensors: Mapping[str, torch.Tensor]
    """Tensors for the objective that differ by client [K, ...]."""
    shared_tensors: Mapping[str, torch.Tensor]
    """Tensors for the objective that all clients share."""
    plain: bool
    """Whether the clients have nothing to mix with (:attr:`fedblend.engines.assignment.Assignment.plain`)."""
    personal: bool = False
    """Whether the clients train their personal models."""
    optimizer_state: Sequence[torch.Tensor] = ()
    """What the clients' optimisers have kept [K, ...]; empty where they begin with none."""

    @property
    def loss_kind(self) -> Hashable:
        """Key of the loss that the stack minimises; a program serves one key."""
        return self.plain, self.personal

    @property
    def kind(self) -> Hashable:
        """Key that stacks with the same trainer have in common."""
        by_client = tuple((name, tensor.shape[1:]) for name, tensor in self.client_tensors.items())
        shared = tuple((name, tensor.shape) for name, tensor in self.shared_tensors.items())
        return self.loss_kind, by_client, shared

    def widened(self, rows: int) -> StackInputs:
        """Return inputs with the first client repeated in ``rows`` rows, and copies of the objective's tensors."""
        params = [p[:1].expand(rows, *p.shape[1:]) for p in self.params]
        expanded = {name: values[:1].expand(rows, *values.shape[1:]) for name, values in self.client_tensors.items()}
        shared = clone_all(self.shared_tensors)
        kept = [t[:1].expand(rows, *t.shape[1:]) for t in self.optimizer_state]
        expanded = clone_all(expanded)
        return replace(self, params=params, client_tensors=expanded, shared_tensors=shared, optimizer_state=kept)


@dataclass(frozen=True)
class StepBatch:
    """The batches of one step for n clients of a stack, and their random numbers."""

    x: torch.Tensor
    """Samples [n, B, ...] as stored."""
    y: torch.Tensor
    """Targets [n, B, ...]."""
    drawn: dict[str, torch.Tensor]
    """The objective's random numbers [n, ...]."""
    masks: list[dict[str, torch.Tensor]]
    """Dropout masks in the order of the layers' calls, one table for each phase of the objective."""
    active: torch.Tensor | None
    """Bool [n], false for clients that do not change in this step; ``None`` where all are active."""
    turn: torch.Tensor | None = None
    """Bool [2, n]: clients that train their own layers in this step, and clients that train the others; ``None`` where
    clients train all layers."""
    factor: torch.Tensor | None = None
    """Factors of the learning rate, float32 [n]; ``None`` where it does not change in the round."""
    ending: torch.Tensor | None = None
    """Bool [n], true for clients whose group of batches ends here; ``None`` where gradients are not accumulated."""
    steps: bool = True
    """Whether the optimiser makes a step for any client."""

    def leaves(self) -> list[torch.Tensor]:
        """Return all tensors."""
        optional = [t for t in (self.active, self.turn, self.factor, self.ending) if t is not None]
        return [self.x, self.y, *self.drawn.values(), *(t for table in self.masks for t in table.values()), *optional]

    def copy(self) -> StepBatch:
        """Return a deep copy."""
        masks = [clone_all(table) for table in self.masks]
        flags = (self.active, self.turn, self.factor, self.ending)
        active, turn, factor, ending = (None if flag is None else flag.clone() for flag in flags)
        drawn = clone_all(self.drawn)
        return StepBatch(clone(self.x), clone(self.y), drawn, masks, active, turn, factor, ending, self.steps)


@dataclass(frozen=True)
class ClientSlots:
    """The training state of K clients of a stack, one row a client."""

    params: list[Any]
    """Tensors [K, ...], or :class:`fedblend._kernels.lowrank.LowRank`."""
    state: list[torch.Tensor]
    """State of the optimisers [K, ...], by key and parameter; empty for SGD without momentum."""
    client_tensors: dict[str, torch.Tensor]
    """Tensors for the objective that differ by client [K, ...]."""
    losses: torch.Tensor
    """Sums of the losses over samples, float32 [K]."""
    sums: list[torch.Tensor] = field(default_factory=list)
    """Gradients of a group of batches, times samples [K, ...], and the numbers of samples [K]; empty without groups."""
    first: int | torch.Tensor = 0
    """Position of the first row in the stack."""

    def tensors(self, clients: int) -> list[torch.Tensor]:
        """Return the parameters of the first ``clients`` rows."""
        return [p.make()[:clients] if isinstance(p, LowRank) else p[:clients] for p in self.params]

    def _mapped(self, change: Callable[[Any], Any], first: int | torch.Tensor) -> ClientSlots:
        params, state, sums = ([change(t) for t in ts] for ts in (self.params, self.state, self.sums))
        client_tensors = {name: change(values) for name, values in self.client_tensors.items()}
        return ClientSlots(params, state, client_tensors, change(self.losses), sums, first)

    def rows(self, rows: slice) -> ClientSlots:
        """Return views of some rows."""
        return self._mapped(lambda tensor: tensor[rows], rows.start)

    def select(self, row: torch.Tensor) -> ClientSlots:
        """Return a copy of one ``row``, int64 [1]."""
        return self._mapped(lambda tensor: tensor.index_select(0, row), row)

    def write_back(self, row: torch.Tensor, selected: ClientSlots) -> None:
        """Copy the result of :meth:`select` back into its ``row``."""
        for target, source in zip(self._written(), selected._written(), strict=True):
            target.index_copy_(0, row, source)

    def _written(self) -> list[Any]:
        """Return the tensors that steps write to."""
        kept = [t for name, t in self.client_tensors.items() if name.startswith((OBJECTIVE, COUNTS))]
        return [*self.params, *self.state, *self.sums, self.losses, *kept]


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the default memory format."""
    return tensor.clone(memory_format=torch.contiguous_format)


def clone_weights(weights: torch.Tensor, channels_last: bool) -> torch.Tensor:
    """Return a copy of weights [K, ...]; with ``channels_last``, kernels [K, O, C, kh, kw] as [K, kh, kw, O, C]."""
    if channels_last and weights.dim() == 5:
        return clone(weights.permute(0, 3, 4, 1, 2)).permute(0, 3, 4, 1, 2)
    return clone(weights)


def clone_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the same names with copies of the tensors."""
    return {name: clone(tensor) for name, tensor in tensors.items()}
