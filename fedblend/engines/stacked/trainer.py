"""The steps of a stack: K clients trained together on one batch each."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from fedblend._kernels.lowrank import LowRank, is_worth_it
from fedblend._kernels.operators import Convolution
from fedblend._kernels.simplify import TracedFunction
from fedblend.core.module import train_mode
from fedblend.core.objective import Context
from fedblend.core.setup import Setup
from fedblend.engines.adam import StackedAdam
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.sgd import (
    Gradient,
    ProximalStep,
    StackedSGD,
    broadcast,
    is_plain,
    split_proximal,
    sum_of_products,
    zero_inactive,
)
from fedblend.engines.stacked.cuda_graphs import CudaRecorder, RecordedWork, Recorder, to_device
from fedblend.engines.stacked.dropout import Drop
from fedblend.engines.stacked.layers import dropouts, prepare_model
from fedblend.engines.stacked.step import Inputs, Program, Step
from fedblend.engines.stacked.tensors import (
    COUNTS,
    OBJECTIVE,
    ClientSlots,
    StackInputs,
    StepBatch,
    clone,
    clone_weights,
)
from fedblend.methods.objectives.output_cache import LabelMeans

STACK = 16
"""Default number of clients in one stack."""

MAX_TRAINERS = 4
"""Trainers with recorded steps to keep: for clients with and without a pool, each for the new and the old pool."""

Kind = tuple[Any, ...]
Known = TypeVar("Known")


class StackTrainer:
    """Trains stacks of one kind.

    With a ``recorder`` its tensors have fixed addresses and rows for the engine's largest stack. It then trains one
    stack after another, and records its steps.
    """

    def __init__(self, engine: TracedEngine, inputs: StackInputs, recorder: Recorder | None = None) -> None:
        train, device = engine.setup.training, engine.device
        self.engine, self.recorder = engine, recorder
        self.objective, self.terms, self.loss_kind = inputs.objective, inputs.terms, inputs.loss_kind
        inputs = replace(inputs, shared_tensors={n: to_device(t, device) for n, t in inputs.shared_tensors.items()})
        if recorder:
            # No step reads more rows than the current stack has filled.
            inputs = inputs.widened(engine.stack)
        self.shared_tensors = dict(inputs.shared_tensors)
        params, rows = inputs.params, len(inputs.params[0])
        low_rank = recorder is None and device.type == "cpu" and is_plain(train)
        last, size = engine.channels_last, train.batch_size
        weights = [LowRank(p) if low_rank and is_worth_it(p.shape, size) else clone_weights(p, last) for p in params]
        state = [clone(t) for t in inputs.optimizer_state] or [
            torch.zeros(rows, device=device) if key == "step" else torch.zeros_like(p)
            for key in train.state_keys
            for p in params
        ]
        losses = torch.zeros(rows, device=device)
        sums = [*(torch.zeros_like(p) for p in params), torch.zeros_like(losses)] if train.accumulate > 1 else []
        self.slots = ClientSlots(weights, state, dict(inputs.client_tensors), losses, sums)
        rate = torch.zeros((), device=device) if recorder or device.type == "cuda" else None
        self.optimizer = (StackedSGD if train.optimizer.steps == "sgd" else StackedAdam)(train, rate)
        watches = engine.setup.method.upload.content == "outputs"
        self.means = LabelMeans(engine.setup.task.outputs, device, rows) if watches else None
        """Mean outputs by label, where the upload needs them."""
        self.recorded: dict[Any, tuple[StepBatch, torch.Tensor, RecordedWork]] = {}
        """Recorded steps by shapes: the fixed batch, the fixed row of a single client, and the work."""
        self.sources: dict[str, tuple[torch.Tensor, int]] = {}
        """The tensor, and its version, that each shared tensor was last copied from."""
        self.tracked = [
            name for name in self.slots.client_tensors if self.objective.tracks and name.startswith(OBJECTIVE)
        ]
        """Names of what the objective keeps at the clients, where its steps renew that."""
        self.counted = [name for name in self.slots.client_tensors if name.startswith(COUNTS)]
        """Names of the counts of samples that its steps add to."""

    def load(self, inputs: StackInputs) -> None:
        """Copy another stack of K clients into the first K rows, and clear the optimisers' state or copy it, too."""
        for old, new in zip(self.slots.params, inputs.params, strict=True):
            old[: len(new)].copy_(new)
        for name, new in inputs.client_tensors.items():
            self.slots.client_tensors[name][: len(new)].copy_(new)
        for name, new in inputs.shared_tensors.items():
            # A shared tensor such as the pool often stays the same for rounds, and is then not copied again.
            source, version = self.sources.get(name, (None, 0))
            if source is not new or version != new._version:
                self.shared_tensors[name].copy_(new, non_blocking=True)
                self.sources[name] = (new, new._version)
        for old, new in zip(self.slots.state, inputs.optimizer_state, strict=bool(inputs.optimizer_state)):
            old[: len(new)].copy_(new)
        for tensor in (*(() if inputs.optimizer_state else self.slots.state), *self.slots.sums, self.slots.losses):
            tensor.zero_()
        if self.means:
            self.means.clear()

    def step(self, batch: StepBatch, rows: slice) -> None:
        """Training the clients ``rows`` of the stack on one batch each."""
        if self.recorder is None:
            self._step(self.slots.rows(rows), batch)
            return
        single = rows.start > 0
        key = (len(batch.x), single, batch.active is None, batch.steps, *(t.shape for t in batch.leaves()))
        if key not in self.recorded:
            self.recorded[key] = self._fixed_work(batch.copy(), rows, single, self.recorder)
        fixed, row, work = self.recorded[key]
        if single:
            row.fill_(rows.start)
        torch._foreach_copy_(fixed.leaves(), batch.leaves())
        work()

    def _fixed_work(
        self, batch: StepBatch, rows: slice, single: bool, recorder: Recorder
    ) -> tuple[StepBatch, torch.Tensor, RecordedWork]:
        """Return the batch, a row number and a step on them; a ``single`` client may be any row of the stack."""
        row = torch.zeros(1, dtype=torch.int64, device=self.engine.device)
        slots = self.slots.rows(rows)

        def work() -> None:
            if not single:
                self._step(slots, batch)
                return
            selected = self.slots.select(row)
            self._step(selected, batch)
            self.slots.write_back(row, selected)

        return batch, row, RecordedWork(work, recorder)

    def drops(self, batch: StepBatch, rows: slice) -> list[Sequence[Drop]]:
        """Return the calls of dropout layers in each phase of a step on this batch, whose masks are yet to be drawn."""
        if not self.engine.has_dropout:
            return [()] * len(self.objective.phases())
        slots = self.slots.rows(rows)
        phases = [self._phase(number, slots, batch, {}) for number in range(len(self.objective.phases()))]
        known = self.engine.known_drops
        return [
            self.engine.once(known, step.drops, (self.loss_kind, i), inputs) for i, (step, inputs) in enumerate(phases)
        ]

    def _phase(
        self, number: int, slots: ClientSlots, batch: StepBatch, masks: Mapping[str, torch.Tensor]
    ) -> tuple[Step, Inputs]:
        """Return a phase of the objective as a step, and its inputs."""
        engine, experiment, phases = self.engine, self.engine.setup.experiment, self.objective.phases()
        last = number == len(phases) - 1
        stored, tracks = experiment.method.sharing.plan.is_stored, self.objective.tracks
        terms, _ = split_proximal(self.terms if last else (), experiment.train)
        step = Step(
            engine.stacked,
            engine.names,
            phases[number],
            terms,
            Context(engine.setup.task, engine.scale, pool_stored=stored, renews=tracks),
            experiment.precision,
            last and self.means is not None,
            [name.removeprefix(OBJECTIVE) for name in self.tracked],
            [name.removeprefix(COUNTS) for name in self.counted],
        )
        tables = (batch.drawn, dict(masks), slots.client_tensors, self.shared_tensors)
        return step, Inputs(slots.params, batch.x, batch.y, *tables)

    def _step(self, slots: ClientSlots, batch: StepBatch) -> None:
        """Make one step in place: one update for each phase of the objective."""
        for number, masks in enumerate(batch.masks):
            step, inputs = self._phase(number, slots, batch, masks)
            program = self.engine.once(self.engine.programs, step.trace, (self.loss_kind, number), inputs)
            inputs = inputs.plain(but=program.low_rank)
            gradients, results = program(inputs)
            active = batch.active
            for name, value in zip([*self.tracked, *self.counted], results[1:], strict=False):
                old = slots.client_tensors[name]
                old.copy_(value if active is None else value.where(broadcast(active, value), old))
            if batch.ending is not None:
                gradients, active = self._accumulate(slots, gradients, batch), batch.ending
            last = number == len(batch.masks) - 1
            _, mu = split_proximal(self.terms if last else (), self.engine.setup.training)
            start = self._start_weights(slots) if mu else []
            for positions, changing in self._turns(batch, active) if batch.steps else ():
                state = [
                    slots.state[first + i] for first in range(0, len(slots.state), len(gradients)) for i in positions
                ]
                self.optimizer.step(
                    [inputs.params[i] for i in positions],
                    state,
                    [gradients[i] for i in positions],
                    changing,
                    ProximalStep(mu, [start[i] for i in positions]) if mu else None,
                    batch.factor,
                )
        losses = results[0] if batch.active is None else results[0].where(batch.active, 0.0)
        slots.losses.add_(losses * batch.x.shape[1])
        if self.means is not None:
            self.means.add(results[-1], batch.y, slots.first, batch.active)

    def _turns(self, batch: StepBatch, active: torch.Tensor | None) -> list[tuple[Sequence[int], torch.Tensor | None]]:
        """Return positions of parameters, and which of the ``active`` clients change them in this step."""
        names, own, turn = self.engine.names, self.engine.setup.own_layers, batch.turn
        if turn is None:
            return [(range(len(names)), active)]
        at_own, at_shared = turn
        turns: list[tuple[Sequence[int], torch.Tensor]] = [
            ([i for i, name in enumerate(names) if name in own], at_own),
            ([i for i, name in enumerate(names) if name not in own], at_shared),
        ]
        if self.engine.setup.training.clip_norm is not None:
            # The gradients of a client that trains both are clipped by one norm.
            both = at_own & at_shared
            turns = [(range(len(names)), both), *((positions, clients & ~both) for positions, clients in turns)]
        return [(positions, clients if active is None else clients & active) for positions, clients in turns]

    def _accumulate(self, slots: ClientSlots, gradients: Sequence[Gradient], batch: StepBatch) -> list[Gradient]:
        """Add the gradients of a batch to the clients' sums; return the means of groups that end, and begin anew."""
        *sums, samples = slots.sums
        size = batch.x.shape[1]
        means: list[Gradient] = []
        samples.add_(size if batch.active is None else size * batch.active)
        for total, gradient in zip(sums, gradients, strict=True):
            if gradient is None:
                means.append(None)
                continue
            dense = sum_of_products(gradient) if isinstance(gradient, tuple) else gradient
            total.add_(zero_inactive(batch.active, dense), alpha=size)
            means.append(total / broadcast(samples, total))
        if batch.steps and batch.ending is not None:
            for total in (*sums, samples):
                total.copy_(zero_inactive(~batch.ending, total))
        return means

    def _start_weights(self, slots: ClientSlots) -> list[torch.Tensor]:
        """Return the round's first weights in the parameters' order: shared by all clients, or [K, ...]."""
        tensors = {**self.shared_tensors, **slots.client_tensors}
        return [tensors[f"start/{name}"] for name in self.engine.names]


class TracedEngine(LoopEngine):
    """What stacks need of their engine: the prepared model, its traced steps, and trainers."""

    def __init__(
        self,
        setup: Setup,
        device: str = "cpu",
        stack: int | None = None,
        recorder: Recorder | None = None,
        kernels: Mapping[str, str] | None = None,
    ) -> None:
        """``kernels`` has the layers that fedblend's kernels compute (:func:`prepare_model`)."""
        super().__init__(setup, device)
        self.stack = stack or STACK
        """The largest number of clients in one stack."""
        wanted = setup.experiment.cuda_graphs and self.device.type == "cuda"
        self.recorder = recorder or (CudaRecorder(self.device) if wanted else None)
        self.trainers: dict[Hashable, StackTrainer] = {}
        self.stacked = prepare_model(setup.model, self.device, setup.experiment.precision, kernels)
        """The prepared model."""
        self.channels_last = self.device.type == "cuda" and any(
            isinstance(layer, Convolution) for layer in self.stacked.modules()
        )
        """Whether weights of convolutions lie in memory as fedblend's kernels for GPUs read them."""
        self.has_dropout = bool(dropouts(self.stacked))
        """Whether any layer of the model drops numbers."""
        state = self.stacked.state_dict(keep_vars=True)
        self.untrained = {name: tensor for name, tensor in state.items() if name not in self.names}
        self.programs: dict[Kind, Program] = {}
        self.known_drops: dict[Kind, Sequence[Drop]] = {}
        self.forwards: dict[tuple[str, ...], TracedFunction] = {}

    def trainer_for(self, inputs: StackInputs) -> StackTrainer:
        """Return a trainer loaded with a stack's inputs; with a recorder, one that later stacks reuse."""
        if self.recorder is None:
            return StackTrainer(self, inputs)
        # Removed and inserted again, so that the least recently used trainer comes first.
        trainer = self.trainers.pop(inputs.kind, None) or StackTrainer(self, inputs, self.recorder)
        self.trainers[inputs.kind] = trainer
        if len(self.trainers) > MAX_TRAINERS:
            del self.trainers[next(iter(self.trainers))]
        trainer.load(inputs)
        return trainer

    def step_bytes(self) -> int:
        """Return the bytes of all outputs in the largest step traced so far: an upper bound of its memory."""
        return max((program.bytes for program in self.programs.values()), default=0)

    def once(self, known: dict[Kind, Known], make: Callable[[Inputs], Known], kind: Kind, inputs: Inputs) -> Known:
        """Return what is ``known`` of a step for inputs of these shapes, made when these shapes first occur."""
        key = (*kind, inputs.shapes())
        if key not in known:
            train_mode(self.stacked)
            known[key] = make(inputs)
        return known[key]
