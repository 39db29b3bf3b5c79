"""The stacked engine: a chunk of clients trained together, as one model with a leading dimension of clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fedblend._kernels.simplify import TracedFunction
from fedblend.core.engine import ClientUpdate, Tensors, TrainTask
from fedblend.core.setup import Setup
from fedblend.engines.loop import Assignment, LoopEngine
from fedblend.engines.stacked.cuda_graphs import Recorder, recorder_for
from fedblend.engines.stacked.dropout import Shapes, dropout_shapes
from fedblend.engines.stacked.layers import prepare_model
from fedblend.engines.stacked.schedule import Stack
from fedblend.engines.stacked.step import Inputs, Program, Step, outputs_of
from fedblend.engines.stacked.trainer import StackInputs, StackTrainer

STACK = 16
"""Clients in one stack where nothing else is said."""

HELD_BYTES = 1 << 30
"""Bytes of trained weights that may wait until those of clients before them are made."""

MOST_BENCHES = 4
"""Benches with recorded steps that are kept: clients that mix and clients that cannot, with a new pool and an old."""


class StackedEngine(LoopEngine):
    """Trains ``stack`` clients at once; shares and scores as the loop does.

    Each step is traced once for each shape of its inputs and then run as a flat program. Clients of a stack take
    their full batches together; where a client's batch is a smaller one, or it has no more, its weights are held
    still, and the smaller batch is a step of its own. So the result is the loop's, whatever the clients' sizes; for
    speed, those of about as many steps stand in one stack.
    """

    def __init__(
        self, setup: Setup, device: str = "cpu", stack: int | None = None, recorder: Recorder | None = None
    ) -> None:
        super().__init__(setup, device)
        self.stack = stack or STACK
        wanted = setup.experiment.cuda_graphs and self.device.type == "cuda"
        self.recorder = recorder or (recorder_for(self.device) if wanted else None)
        self.benches: dict[Hashable, StackTrainer] = {}
        self.stacked = prepare_model(setup.model, self.device, setup.experiment.precision)
        self.shapes: Shapes = dropout_shapes(self.stacked, self.scale(setup.data.train.x[:3].to(self.device)))
        state = self.stacked.state_dict(keep_vars=True)
        self.untrained = {name: tensor for name, tensor in state.items() if name not in self.names}
        self.programs: dict[tuple[Any, ...], Program] = {}
        self.forwards: dict[tuple[str, ...], TracedFunction] = {}

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[ClientUpdate]:
        """Train the clients in chunks. An exception names the clients, the round and the batch."""
        given = [self.assign(task, client) for client in clients]
        size = sum(p.numel() * p.element_size() for p in self.params)
        window = max(self.stack, HELD_BYTES // max(1, size))
        for start in range(0, len(given), window):
            yield from self._train_window(task, given[start : start + window])

    def _train_window(self, task: TrainTask, given: Sequence[Assignment]) -> Iterator[ClientUpdate]:
        """Train clients in the stacks that suit them; results keep the order asked for."""
        kinds: dict[tuple[bool, ...], list[Assignment]] = defaultdict(list)
        # Those of about as many steps together: a stack takes as long as its longest.
        for one in sorted(given, key=lambda one: -len(one.sizes)):
            # Clients that train on different losses cannot stand in one stack.
            own_model = task.has_own_model(one.client)
            kinds[one.plain, one.pool is task.pool, own_model, bool(task.outputs_of(one.client))].append(one)
        # Models of clients' own may differ in what is not trained, which a stack has but once.
        several = task.personal or any(map(task.has_own_model, task.client_states))
        most = 1 if several and self.untrained else self.stack
        chunks = [alike[i : i + most] for alike in kinds.values() for i in range(0, len(alike), most)]
        # By assignment, not by client: a trial may train one of them several times.
        done = {
            id(one): made for chunk in chunks for one, made in zip(chunk, self._train_chunk(task, chunk), strict=True)
        }
        yield from (done.pop(id(one)) for one in given)

    def _train_chunk(self, task: TrainTask, assignments: Sequence[Assignment]) -> list[ClientUpdate]:
        self._take_untrained(task.start_of(assignments[0].client))
        stack = Stack(self, task, assignments)
        losses = stack.train()
        params, outputs = stack.trained(), stack.outputs()
        results = []
        for k, one in enumerate(assignments):
            made = {**task.start_of(one.client), **dict(zip(self.names, (p[k] for p in params), strict=True))}
            # In the model's order, in which noise is drawn later: a start from a file or another rank has its own.
            weights = {name: made[name] for name in self.state}
            noted = None if outputs is None else outputs[k]
            results.append(self.update(task, one, weights, losses[k], noted))
        return results

    @torch.no_grad()
    def _take_untrained(self, start: Tensors) -> None:
        """Frozen weights and buffers as they are now; in place, since traced steps hold these tensors."""
        for name, tensor in self.untrained.items():
            tensor.copy_(start[name])

    def bench(self, brought: StackInputs) -> StackTrainer:
        """A bench with a stack's tensors on it; where steps are recorded, one that stays for the stacks to come."""
        if self.recorder is None:
            return StackTrainer.of(self, brought)
        # Taken out and put in again: the one that was used last stands last.
        found = self.benches.pop(brought.kind, None) or StackTrainer.of(self, brought, self.recorder)
        self.benches[brought.kind] = found
        if len(self.benches) > MOST_BENCHES:
            del self.benches[next(iter(self.benches))]
        found.take(brought)
        return found

    def _scorer(self, weights: Tensors) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model with these weights, in the layers that are fastest here."""
        self.stacked.eval()
        # In an order of their own: weights that come from another rank are in any.
        placed = {name: weights[name].to(self.device) for name in sorted(weights)}

        names = tuple(placed)
        if names not in self.forwards:
            self.forwards[names] = TracedFunction(partial(outputs_of, self.stacked, names))
        return partial(self.forwards[names], *placed.values())

    def server_model(self) -> nn.Module:
        """A module for functional calls with any weights, in evaluation mode, in the layers that are fastest here."""
        return self.stacked.eval()

    def step_bytes(self) -> int:
        """Bytes of everything that the largest step traced so far makes, an upper bound of what it needs at once."""
        return max((program.bytes for program in self.programs.values()), default=0)

    def program(self, step: Step, kind: tuple[Any, ...], inputs: Inputs) -> Program:
        """A step's program for inputs of these shapes, traced when they first occur."""
        key = (*kind, inputs.shapes())
        if key not in self.programs:
            self.stacked.train()
            self.programs[key] = step.trace(inputs)
        return self.programs[key]
