"""The stacked engine: several clients trained together as one model with a leading dimension of clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import nn

from fedblend._kernels.simplify import TracedFunction
from fedblend.core.engine import ClientUpdate, Tensors, TrainTask
from fedblend.core.state import ClientState
from fedblend.engines.assignment import Assignment
from fedblend.engines.stacked.schedule import Stack
from fedblend.engines.stacked.step import outputs_of
from fedblend.engines.stacked.trainer import TracedEngine

HELD_BYTES = 1 << 30
"""Bytes of trained weights that may wait for the results of earlier clients."""


class StackedEngine(TracedEngine):
    """Trains ``stack`` clients at once; shares and scores as the loop engine does.

    Each step is traced once for each shape of its inputs, and then run as a flat program. Clients of a stack take their
    full batches together. A client without such a batch is inactive in that step: its weights do not change. A smaller
    batch is a step of its own. So the results equal the loop's up to float32 rounding, for clients of any size. Clients
    with similar numbers of steps share a stack, for speed.
    """

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
            kept = ClientState(optimizer={path: tensor[k] for path, tensor in states.items()})
            mean_outputs = None if outputs is None else outputs[k]
            update = ClientUpdate(one.client, weights, one.samples, losses[k], mean_outputs, kept, measured=measured[k])
            updates.append(self.finish(task, one, update, {name: tensor[k] for name, tensor in tracked.items()}))
        return updates

    @torch.no_grad()
    def _load_untrained(self, start: Tensors) -> None:
        """Copy frozen weights and buffers in place: traced steps hold these tensors."""
        for name, tensor in self.untrained.items():
            tensor.copy_(start[name])

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
