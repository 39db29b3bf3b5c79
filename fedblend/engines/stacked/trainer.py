"""What a stack's steps read and change, in one place, and the step itself as work on that place."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn

from fedblend._kernels.lowrank import LowRank, is_worth_it
from fedblend.core.objective import Context, Objective, Term
from fedblend.core.setup import Setup
from fedblend.core.trees import strip_prefix
from fedblend.data.scale import OneHot, Scaler
from fedblend.engines.sgd import ProximalStep, StackedSGD, is_plain, split_proximal
from fedblend.engines.stacked.cuda_graphs import Recorded, Recorder, moved
from fedblend.engines.stacked.dropout import Shapes
from fedblend.engines.stacked.step import Inputs, Program, Step
from fedblend.methods.objectives.output_cache import LabelMeans


class Owner(Protocol):
    """The engine whose stacks are trained on benches: what these need of it.

    ``stack`` is the number of clients of its largest stack; ``stacked`` the model as stacks run it, ``names`` its
    parameters in order, ``shapes`` those of its dropout masks.
    """

    setup: Setup
    device: torch.device
    stack: int
    scale: Scaler | OneHot
    stacked: nn.Module
    names: list[str]
    shapes: Shapes

    def program(self, step: Step, kind: tuple[Any, ...], inputs: Inputs) -> Program:
        """A step's program for inputs of these shapes."""
        ...

    def bench(self, brought: StackInputs) -> StackTrainer:
        """A bench with a stack's tensors on it."""
        ...


@dataclass(frozen=True)
class StackInputs:
    """What a stack of K clients comes with: the weights [K, ...] they begin with, what their objective may use of each
    client's own [K, ...] and of what they share, and whether they train plainly.
    """

    objective: Objective
    terms: Sequence[tuple[str, Term]]
    params: Sequence[torch.Tensor]
    own: Mapping[str, torch.Tensor]
    shared: Mapping[str, torch.Tensor]
    plain: bool
    personal: bool = False

    @property
    def kind_of_loss(self) -> Hashable:
        """Which loss the stack minimises: programs of one are not another's."""
        return self.plain, self.personal

    @property
    def kind(self) -> Hashable:
        """What stacks that share a bench have in common."""
        own = ((name, tensor.shape[1:]) for name, tensor in self.own.items())
        return (self.kind_of_loss, *own, *((name, tensor.shape) for name, tensor in self.shared.items()))

    def widened(self, rows: int) -> StackInputs:
        """The first client's in as many rows, in place of the stack's own; what is taken along is copied."""
        params = [p[:1].expand(rows, *p.shape[1:]) for p in self.params]
        own = _copies({name: values[:1].expand(rows, *values.shape[1:]) for name, values in self.own.items()})
        return replace(self, params=params, own=own, shared=_copies(self.shared))


@dataclass(frozen=True)
class StepBatch:
    """What some clients of a stack take for one step: n batches of B samples, and what was drawn for them.

    ``masks`` hold each phase's; ``active`` bool [n], where given, is false for clients that stay as they are.
    """

    x: torch.Tensor
    y: torch.Tensor
    drawn: dict[str, torch.Tensor]
    masks: list[dict[str, torch.Tensor]]
    active: torch.Tensor | None

    def leaves(self) -> list[torch.Tensor]:
        """All tensors."""
        active = [] if self.active is None else [self.active]
        return [self.x, self.y, *self.drawn.values(), *(t for table in self.masks for t in table.values()), *active]

    def copy(self) -> StepBatch:
        """The same in tensors of its own."""
        masks = [_copies(table) for table in self.masks]
        active = None if self.active is None else self.active.clone()
        return StepBatch(_copy(self.x), _copy(self.y), _copies(self.drawn), masks, active)


@dataclass(frozen=True)
class ClientSlots:
    """What clients of a stack have of their own, one row each, and which of the stack they are.

    Parameters are tensors [K, ...], or :class:`fedblend._kernels.LowRank`.
    """

    params: list[Any]
    velocity: list[torch.Tensor]
    own: dict[str, torch.Tensor]
    losses: torch.Tensor
    first: int | torch.Tensor = 0

    def tensors(self, clients: int) -> list[torch.Tensor]:
        """The parameters of the first of them."""
        return [p.make()[:clients] if isinstance(p, LowRank) else p[:clients] for p in self.params]

    def rows(self, rows: slice) -> ClientSlots:
        """Some of them, in place."""
        params, velocity = [p[rows] for p in self.params], [v[rows] for v in self.velocity]
        own = {name: values[rows] for name, values in self.own.items()}
        return ClientSlots(params, velocity, own, self.losses[rows], rows.start)

    def chosen(self, place: torch.Tensor) -> ClientSlots:
        """Copies of one of them, which ``place`` int64 [1] names."""
        params, velocity = ([t.index_select(0, place) for t in ts] for ts in (self.params, self.velocity))
        own = {name: values.index_select(0, place) for name, values in self.own.items()}
        return ClientSlots(params, velocity, own, self.losses.index_select(0, place), place)

    def put(self, place: torch.Tensor, others: ClientSlots) -> None:
        """Take back what :meth:`chosen` gave."""
        mine = (*self.params, *self.velocity, self.losses)
        theirs = (*others.params, *others.velocity, others.losses)
        for old, new in zip(mine, theirs, strict=True):
            old.index_copy_(0, place, new)


@dataclass
class StackTrainer:
    """Where stacks of one kind are trained: their weights, optimiser state, and what their objective may use.

    A bench whose tensors stay where they are (``recorder``) has room for the engine's whole stack, takes one stack
    after another, and records its steps.
    """

    engine: Owner
    objective: Objective
    terms: Sequence[tuple[str, Term]]
    kind: Hashable
    members: ClientSlots
    shared: dict[str, torch.Tensor]
    optimizer: StackedSGD
    means: LabelMeans | None
    recorder: Recorder | None = None
    recorded: dict[Any, tuple[StepBatch, torch.Tensor, Recorded]] = field(default_factory=dict)
    sources: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)

    @staticmethod
    def of(engine: Owner, brought: StackInputs, recorder: Recorder | None = None) -> StackTrainer:
        """A bench for a stack's tensors; with a ``recorder`` all are copied, with rows for the engine's whole stack."""
        train, device = engine.setup.experiment.train, engine.device
        shared = {name: moved(tensor, device) for name, tensor in brought.shared.items()}
        brought = replace(brought, shared=shared)
        if recorder:
            # As many rows as there can be; no step looks at more than those that a stack has filled.
            brought = brought.widened(engine.stack)
        params, rows = brought.params, len(brought.params[0])
        grows = recorder is None and device.type == "cpu" and is_plain(train)
        grown = [LowRank(p) if grows and is_worth_it(p.shape, train.batch_size) else _copy(p) for p in params]
        velocity = [torch.zeros_like(p) for p in params] if train.momentum else []
        members = ClientSlots(grown, velocity, dict(brought.own), torch.zeros(rows, device=device))
        watches = engine.setup.experiment.method.upload.watches
        means = LabelMeans(engine.setup.task.outputs, device, rows) if watches else None
        rate = torch.zeros((), device=device) if recorder or device.type == "cuda" else None
        optimizer = StackedSGD(train, rate)
        shared = dict(brought.shared)
        return StackTrainer(
            engine, brought.objective, brought.terms, brought.kind_of_loss, members, shared, optimizer, means, recorder
        )

    def take(self, brought: StackInputs) -> None:
        """Put another stack of K clients on the bench: its first K rows."""
        for old, new in zip(self.members.params, brought.params, strict=True):
            old[: len(new)].copy_(new)
        for name, new in brought.own.items():
            self.members.own[name][: len(new)].copy_(new)
        for name, new in brought.shared.items():
            # What is shared by all stays the same for rounds: the pool.
            known, version = self.sources.get(name, (None, 0))
            if known is not new or version != new._version:
                self.shared[name].copy_(new, non_blocking=True)
                self.sources[name] = (new, new._version)
        for state in (*self.members.velocity, self.members.losses):
            state.zero_()
        if self.means:
            self.means.clear()

    def step(self, given: StepBatch, rows: slice) -> None:
        """Step clients ``rows`` of the stack on what they are given."""
        if self.recorder is None:
            self._advance(self.members.rows(rows), given)
            return
        alone = rows.start > 0
        key = (len(given.x), alone, given.active is None, *(t.shape for t in given.leaves()))
        if key not in self.recorded:
            self.recorded[key] = self._recorded(given.copy(), rows, alone, self.recorder)
        static, place, recorded = self.recorded[key]
        if alone:
            place.fill_(rows.start)
        torch._foreach_copy_(static.leaves(), given.leaves())
        recorded()

    def _recorded(
        self, given: StepBatch, rows: slice, alone: bool, recorder: Recorder
    ) -> tuple[StepBatch, torch.Tensor, Recorded]:
        """Work on what is given in fixed places; one client ``alone`` may be any of the stack."""
        place = torch.zeros(1, dtype=torch.int64, device=self.engine.device)
        members = self.members.rows(rows)

        def work() -> None:
            if not alone:
                self._advance(members, given)
                return
            one = self.members.chosen(place)
            self._advance(one, given)
            self.members.put(place, one)

        return given, place, Recorded(work, recorder)

    def _advance(self, members: ClientSlots, given: StepBatch) -> None:
        """One step, in place, in as many phases as the objective has."""
        engine, experiment = self.engine, self.engine.setup.experiment
        phases = self.objective.phases()
        for number, (phase, masks) in enumerate(zip(phases, given.masks, strict=True)):
            last = number == len(phases) - 1
            inputs = Inputs(members.params, given.x, given.y, given.drawn, masks, members.own, self.shared)
            context = Context(engine.setup.task, engine.scale)
            terms, mu = split_proximal(self.terms if last else (), experiment.train)
            watches = last and self.means is not None
            step = Step(engine.stacked, engine.names, phase, terms, context, experiment.precision, watches)
            program = engine.program(step, (self.kind, number), inputs)
            inputs = inputs.plain(but=program.low_rank)
            gradients, noted = program(inputs)
            pull = ProximalStep(mu, self._starts(members)) if mu else None
            self.optimizer.step(inputs.params, members.velocity, gradients, given.active, pull)
        losses = noted[0] if given.active is None else noted[0].where(given.active, 0.0)
        members.losses.add_(losses * given.x.shape[1])
        if self.means is not None:
            self.means.add(noted[1], given.y, members.first, given.active)

    def _starts(self, members: ClientSlots) -> list[torch.Tensor]:
        """The weights that the round began with, in the parameters' order: everyone's, or each member's [K, ...]."""
        start = strip_prefix("start/", self.shared) | strip_prefix("start/", members.own)
        return [start[name] for name in self.engine.names]


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: _copy(tensor) for name, tensor in tensors.items()}
