"""The stacked engine: several clients trained together as one model with a leading dimension of clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fedblend._kernels import Convolution
from fedblend._kernels.simplify import TracedFunction
from fedblend.core.engine import ClientUpdate, Tensors, TrainTask
from fedblend.core.module import train_mode
from fedblend.core.setup import Setup
from fedblend.engines.assignment import Assignment
from fedblend.engines.loop_engine import LoopEngine
from fedblend.engines.stacked.cuda_graphs import CudaRecorder, Recorder
from fedblend.engines.stacked.dropout import Drop
from fedblend.engines.stacked.layers import dropouts, prepare_model
from fedblend.engines.stacked.schedule import Stack
from fedblend.engines.stacked.step import Inputs, Program, Step, outputs_of
from fedblend.engines.stacked.tensors import StackInputs
from fedblend.engines.stacked.trainer import StackTrainer

STACK = 16
"""Default number of clients in one stack."""

HELD_BYTES = 1 << 30
"""Bytes of trained weights that may wait for the results of earlier clients."""

MAX_TRAINERS = 4
"""Trainers with recorded steps to keep: for clients with and without a pool, each for the new and the old pool."""


class StackedEngine(LoopEngine):
    """Trains ``stack`` clients at once; shares and scores as the loop engine does.

    Each step is traced once for each shape of its inputs, and then run as a flat program. Clients of a stack take their
    full batches together. A client without such a batch is inactive in that step: its weights do not change. A smaller
    batch is a step of its own. So the results equal the loop's up to float32 rounding, for clients of any size. Clients
    with similar numbers of steps share a stack, for speed.
    """

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
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.known_drops: dict[tuple[Any, ...], list[Drop]] = {}
        self.forwards: dict[tuple[str, ...], TracedFunction] = {}

    def train(self, task: TrainTask, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        """Training the clients in stacks. An exception names the clients, the round and the batch."""
        assignments = [self.assign(task, client) for client in clients]
        size = sum(p.numel() * p.element_size() for p in self.params)
        window = max(self.stack, HELD_BYTES // max(1, size))
        for start in range(0, len(assignments), window):
            yield from self._train_window(task, assignments[start : start + window])

    def _train_window(self, task: TrainTask, assignments: Sequence[Assignment]) -> Iterator[ClientUpdate]:
        """Group clients into stacks and train these; results keep the order of the assignments."""
        groups: dict[tuple[bool, ...], list[Assignment]] = defaultdict(list)
        # Sorted by steps: a stack takes as long as its longest client.
        for one in sorted(assignments, key=lambda one: -len(one.sizes)):
            # Clients of one stack must have the same loss and the same kinds of context.
            apart = bool(task.state_of(one.client).model), task.starts_apart(one.client)
            groups[one.plain, one.pool is task.pool, *apart, bool(task.outputs_of(one.client))].append(one)
        # Clients' own models may differ in the buffers of trained layers, and a stack has only one set of these.
        own_models = task.personal or any(map(task.starts_apart, task.client_states))
        size = 1 if own_models and self.untrained.keys() - self.setup.frozen else self.stack
        stacks = [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]
        # By assignment, not by client: a trial may train one client several times.
        updates: dict[int, ClientUpdate] = {}
        for stack in stacks:
            self.on_step("training", len(updates), len(assignments))
            updates |= {id(one): update for one, update in zip(stack, self._train_stack(task, stack), strict=True)}
        yield from (updates.pop(id(one)) for one in assignments)

    def _train_stack(self, task: TrainTask, assignments: Sequence[Assignment]) -> list[ClientUpdate]:
        self._load_untrained(task.start_of(assignments[0].client))
        stack = Stack(self, task, assignments)
        losses = stack.train()
        params, outputs, states, tracked = stack.trained(), stack.outputs(), stack.optimizer_state(), stack.tracked()
        measured = stack.measured()
        updates = []
        for k, one in enumerate(assignments):
            trained = {**task.start_of(one.client), **dict(zip(self.names, (p[k] for p in params), strict=True))}
            # In the model's order, in which noise is drawn later; a file or another rank may have another order.
            weights = {name: trained[name] for name in self.state}
            kept = {path: tensor[k] for path, tensor in states.items()}
            mean_outputs = None if outputs is None else outputs[k]
            renewed = {name: tensor[k] for name, tensor in tracked.items()}
            updates.append(self.update(task, one, weights, losses[k], mean_outputs, None, kept, renewed, measured[k]))
        return updates

    @torch.no_grad()
    def _load_untrained(self, start: Tensors) -> None:
        """Copy frozen weights and buffers in place: traced steps hold these tensors."""
        for name, tensor in self.untrained.items():
            tensor.copy_(start[name])

    def trainer_for(self, inputs: StackInputs) -> StackTrainer:
        """Return a trainer loaded with a stack's inputs; with a recorder, one that later stacks reuse."""
        if self.recorder is None:
            return StackTrainer.create(self, inputs)
        # Removed and inserted again, so that the least recently used trainer comes first.
        trainer = self.trainers.pop(inputs.kind, None) or StackTrainer.create(self, inputs, self.recorder)
        self.trainers[inputs.kind] = trainer
        if len(self.trainers) > MAX_TRAINERS:
            del self.trainers[next(iter(self.trainers))]
        trainer.load(inputs)
        return trainer

    def _scorer(self, weights: Tensors) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the prepared model with these weights as a function of its inputs."""
        self.stacked.eval()
        # In sorted order: weights from another rank may be in any order.
        placed = {name: weights[name].to(self.device) for name in sorted(weights)}
        names = tuple(placed)
        if names not in self.forwards:
            self.forwards[names] = TracedFunction(partial(outputs_of, self.stacked, names))
        return partial(self.forwards[names], *placed.values())

    def server_model(self) -> nn.Module:
        """Return the prepared model in evaluation mode, for functional calls with any weights."""
        return self.stacked.eval()

    def step_bytes(self) -> int:
        """Return the bytes of all outputs in the largest step traced so far: an upper bound of its memory."""
        return max((program.bytes for program in self.programs.values()), default=0)

    def program(self, step: Step, kind: tuple[Any, ...], inputs: Inputs) -> Program:
        """Return a step's program for inputs of these shapes, traced when these shapes first occur."""
        key = (*kind, inputs.shapes())
        if key not in self.programs:
            train_mode(self.stacked)
            self.programs[key] = step.trace(inputs)
        return self.programs[key]

    def drops(self, step: Step, kind: tuple[Any, ...], inputs: Inputs) -> Sequence[Drop]:
        """Return a step's calls of dropout layers, found out when inputs of these shapes first occur."""
        key = (*kind, inputs.shapes())
        if key not in self.known_drops:
            train_mode(self.stacked)
            self.known_drops[key] = step.drops(inputs)
        return self.known_drops[key]
