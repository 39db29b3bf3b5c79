"""The stacked engine: a chunk of clients trained together, as one model with a leading dimension of clients."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call

from fedblend.engines.base import Tensors, Trained, TrainTask
from fedblend.engines.loop import Assignment, LoopEngine
from fedblend.engines.masks import Masks, dropout_shapes
from fedblend.engines.sgd import StackedSGD
from fedblend.engines.stacking import Inputs, Program, Step, prepare
from fedblend.objectives import Context, Plain
from fedblend.objectives.watching import Means
from fedblend.prefixes import named
from fedblend.world import World

STACK = 16
"""Clients in one stack where nothing else is said."""


class StackedEngine(LoopEngine):
    """Trains ``stack`` clients at once; shares and scores as the loop does.

    Each step is traced once for each shape of its inputs and then run as a flat program. Clients of a stack take
    their full batches together; where a client's batch is a smaller one, or it has no more, its weights are held
    still, and the smaller batch is a step of its own. So the result is the loop's, whatever the clients' sizes.
    """

    def __init__(self, world: World, device: str = "cpu", stack: int | None = None) -> None:
        super().__init__(world, device)
        self.stack = stack or STACK
        self.stacked = prepare(world.model, self.device, world.experiment.precision)
        self.shapes = dropout_shapes(self.stacked, self.scale(world.data.train.x[:1].to(self.device)))
        self.programs: dict[tuple[Any, ...], Program] = {}

    def train(self, task: TrainTask, clients: Iterable[int]) -> Iterator[Trained]:
        """Train the clients in chunks. An exception names the clients, the round and the batch."""
        given = [self.assign(task, client) for client in clients]
        kinds: dict[tuple[bool, ...], list[Assignment]] = defaultdict(list)
        for one in given:
            kinds[one.plain, one.pool is task.pool, *task.knows(one.client)].append(one)
        chunks = [alike[i : i + self.stack] for alike in kinds.values() for i in range(0, len(alike), self.stack)]
        if len(kinds) == 1:
            for chunk in chunks:
                yield from self._train_chunk(task, chunk)
            return
        # Clients that train on different losses cannot stand in one stack; results keep the order asked for.
        done = {result.client: result for chunk in chunks for result in self._train_chunk(task, chunk)}
        yield from (done[one.client] for one in given)

    def _train_chunk(self, task: TrainTask, assignments: Sequence[Assignment]) -> list[Trained]:
        stack = Stack(self, task, sorted(assignments, key=lambda one: -len(one.sizes)))
        losses = stack.train()
        place = {one.client: k for k, one in enumerate(stack.clients)}
        results = []
        for one in assignments:
            k = place[one.client]
            trained = dict(zip(self.names, (p[k] for p in stack.params), strict=True))
            weights = {**task.start_of(one.client), **trained}
            outputs = stack.means.of(k) if stack.means else None
            results.append(Trained(one.client, weights, one.samples, losses[k], outputs))
        return results

    def _scorer(self, weights: Tensors) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model with these weights, in the layers that are fastest here."""
        self.stacked.eval()
        placed = {name: tensor.to(self.device) for name, tensor in weights.items()}
        return lambda x: functional_call(self.stacked, placed, (x,))

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


class Stack:
    """Clients in training together, those with the most steps first."""

    def __init__(self, engine: StackedEngine, task: TrainTask, clients: Sequence[Assignment]) -> None:
        self.engine, self.task, self.clients = engine, task, list(clients)
        self.device = engine.device
        experiment = engine.world.experiment
        self.full = experiment.train.batch_size
        self.params = self._starts(engine.names)
        self.optimizer = StackedSGD(self.params, experiment.train, task.round)
        self.masks = Masks(engine.shapes, experiment.seed, task.round, [one.client for one in clients], self.device)
        self.steps = max((len(one.sizes) for one in clients), default=0)
        self.sizes = _padded([one.sizes for one in clients], self.steps)
        self.firsts = _padded([one.bounds[:-1] for one in clients], self.steps)
        self._gather()
        self.losses = torch.zeros(len(clients), device=self.device)
        watches = experiment.method.upload.watches
        self.means = Means(engine.world.task.outputs, self.device, len(clients)) if watches else None

    def _starts(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The weights that each client begins with, stacked. Copies: a stack of one would else be the round's own."""
        weights, clients = self.task.weights, self.clients
        if clients[0].client in self.task.own:
            starts = [self.task.start_of(one.client) for one in clients]
            return [torch.stack([start[name] for start in starts]).to(self.device) for name in names]
        return [
            weights[name]
            .to(self.device)
            .expand(len(clients), *weights[name].shape)
            .clone(memory_format=torch.contiguous_format)
            for name in names
        ]

    def _gather(self) -> None:
        """Samples of all clients one after another, and what their objective may use, on the device."""
        engine, task, clients = self.engine, self.task, self.clients
        samples = [engine.world.samples(one.client, one.samples) for one in clients]
        starts = np.cumsum([0, *(one.samples for one in clients)])
        orders = [one.order + start for one, start in zip(clients, starts[:-1], strict=True)]
        places = max((len(order) for order in orders), default=0) + self.full
        self.rows = torch.from_numpy(_padded(orders, places)).to(self.device)
        self.x, self.y = (torch.cat(half).to(self.device) for half in zip(*samples, strict=True))
        self.drawn = {
            name: self._stacked([torch.from_numpy(one.drawn[name]) for one in clients]) for name in clients[0].drawn
        }
        method = engine.world.experiment.method
        objective = Plain() if clients[0].plain else method.objective
        self.phases, self.copies = objective.phases(), objective.copies
        begun = [named("start/", task.start_of(one.client)) if method.terms else {} for one in clients]
        said = [named("said/", task.said_to(one.client)) for one in clients]
        self.shared: dict[str, torch.Tensor] = {}
        self.own: dict[str, torch.Tensor] = {}
        for kind in (begun, said):
            self._give(kind, everyone=clients[0].client not in task.own)
        if not clients[0].plain:
            self._give([named("pool/", one.pool.tensors) for one in clients], everyone=clients[0].pool is task.pool)

    def _give(self, tables: Sequence[dict[str, torch.Tensor]], everyone: bool) -> None:
        """Something that objectives may use: the same for everyone, or a table a client."""
        if everyone:
            self.shared |= {name: t.to(self.device) for name, t in tables[0].items()}
        else:
            self.own |= {name: self._stacked([table[name] for table in tables]) for name in tables[0]}

    def _stacked(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors of one kind a client as one, with zeros where a client's is shorter."""
        shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
        made = tensors[0].new_zeros(len(tensors), *shape)
        for k, tensor in enumerate(tensors):
            place: tuple[Any, ...] = (k, *(slice(size) for size in tensor.shape))
            made[place] = tensor
        return made.to(self.device)

    def train(self) -> list[float]:
        """Make all steps; returns each client's mean loss."""
        for step in range(self.steps):
            try:
                self._step(step)
            except Exception as error:
                names = ", ".join(str(one.client) for one in self.clients)
                error.add_note(f"while training clients {names} in round {self.task.round + 1}, batch {step + 1}")
                raise
        seen = torch.tensor([max(1, len(one.order)) for one in self.clients], device=self.device)
        return (self.losses / seen).tolist()

    def _step(self, step: int) -> None:
        """Step on one batch of every client that has one: all full batches together, each smaller one alone."""
        sizes = self.sizes[:, step]
        full = sizes == self.full
        if full.any():
            self._step_rows(step, 0, _width(int(np.flatnonzero(full)[-1]) + 1, len(sizes)), full)
        for k in np.flatnonzero((sizes > 0) & ~full):
            self._step_rows(step, int(k), int(k) + 1, sizes > 0)

    def _step_rows(self, step: int, first: int, last: int, active: np.ndarray) -> None:
        """Step clients ``first`` to ``last`` of the stack; those that are not ``active`` stay as they are."""
        size = self.full if last - first > 1 else int(self.sizes[first, step])
        rows = slice(first, last)
        columns = torch.from_numpy(self.firsts[rows, step, None] + np.arange(size)).to(self.device)
        chosen = self.rows[rows].gather(1, columns)
        held = None if active[rows].all() else torch.from_numpy(active[rows]).to(self.device)
        x, y = self.x[chosen], self.y[chosen]
        drawn = {name: values[rows, step] for name, values in self.drawn.items()}
        own = {name: values[rows] for name, values in self.own.items()}
        params = [p[rows] for p in self.params]
        for number, phase in enumerate(self.phases):
            terms = self.engine.world.experiment.method.terms if number == len(self.phases) - 1 else ()
            masks = self.masks.draw(first, size * self.copies, active[rows])
            inputs = Inputs(params, x, y, drawn, masks, own, self.shared)
            context = Context(self.engine.world.task, self.engine.scale)
            precision = self.engine.world.experiment.precision
            watches = self.means is not None and number == len(self.phases) - 1
            made = Step(self.engine.stacked, self.engine.names, phase, terms, context, precision, watches)
            program = self.engine.program(made, (self.clients[0].plain, number), inputs)
            gradients, noted = program(inputs)
            self.optimizer.step_rows(gradients, rows, held)
        self.losses[rows] += (noted[0] if held is None else noted[0].where(held, 0.0)) * size
        if self.means is not None:
            self.means.add(noted[1], y, first, held)


def _width(needed: int, most: int) -> int:
    """The least of ``most``, half of it, a quarter, ... that is enough: few shapes, so few programs."""
    width = most
    while width > 1 and (width + 1) // 2 >= needed:
        width = (width + 1) // 2
    return width


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Rows of whole numbers as int64 [rows, length], with zeros at the end."""
    made = np.zeros((len(rows), length), np.int64)
    for k, row in enumerate(rows):
        made[k, : len(row)] = row
    return made
