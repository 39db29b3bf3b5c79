"""Clients in training together: who takes which batch when, and their data on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedblend.core.engine import TrainTask, terms_of
from fedblend.core.trees import add_prefix
from fedblend.engines.loop import Assignment
from fedblend.engines.stacked.cuda_graphs import moved
from fedblend.engines.stacked.dropout import DropoutMasks
from fedblend.engines.stacked.trainer import Owner, StackInputs, StackTrainer, StepBatch


class Stack:
    """Clients in training together, those with the most steps first.

    Nothing here waits for the device: what a step needs is on it before the first, the host's tables say only which
    clients have a batch, and what comes out is read once, at the end.
    """

    def __init__(self, engine: Owner, task: TrainTask, clients: Sequence[Assignment]) -> None:
        self.engine, self.task, self.clients = engine, task, list(clients)
        self.device = engine.device
        experiment = engine.setup.experiment
        self.full = experiment.train.batch_size
        objective = experiment.method.objective
        self.objective = objective.fallback() if clients[0].plain else objective
        self.masks = DropoutMasks(engine.shapes, experiment.seed, task, [one.client for one in clients], self.device)
        self.steps = max((len(one.sizes) for one in clients), default=0)
        self.sizes = _padded([one.sizes for one in clients], self.steps)
        firsts = _padded([one.bounds[:-1] for one in clients], self.steps)
        self.sizes_there, self.firsts = (moved(torch.from_numpy(table), self.device) for table in (self.sizes, firsts))
        self._gather()
        self.bench = self._bench()

    def _gather(self) -> None:
        """Samples of all clients one after another, and what was drawn for their steps, on the device."""
        clients = self.clients
        samples = [self.engine.setup.samples(one.client, one.samples) for one in clients]
        starts = np.cumsum([0, *(one.samples for one in clients)])
        orders = [one.order + start for one, start in zip(clients, starts[:-1], strict=True)]
        places = max((len(order) for order in orders), default=0) + self.full
        self.rows = moved(torch.from_numpy(_padded(orders, places)), self.device)
        self.x, self.y = (moved(torch.cat(half), self.device) for half in zip(*samples, strict=True))
        self.drawn = {
            name: self._stacked([torch.from_numpy(one.drawn[name]) for one in clients]) for name in clients[0].drawn
        }
        self.counted = {size: torch.arange(size, device=self.device) for size in np.unique(self.sizes).tolist()}

    def _bench(self) -> StackTrainer:
        """A bench with this stack on it: a new one, or the engine's own where its steps are recorded."""
        engine, task, clients = self.engine, self.task, self.clients
        shared: dict[str, torch.Tensor] = {}
        own: dict[str, torch.Tensor] = {}

        def give(tables: Sequence[dict[str, torch.Tensor]], everyone: bool) -> None:
            """Something that objectives may use: the same for everyone, or a table a client."""
            if everyone:
                shared.update(tables[0])
            else:
                own.update({name: self._stacked([table[name] for table in tables]) for name in tables[0]})

        own_models = task.has_own_model(clients[0].client)
        if terms_of(engine.setup.experiment.method, task):
            give([add_prefix("start/", task.anchor_of(one.client)) for one in clients], not own_models)
        give([add_prefix("outputs/", task.outputs_of(one.client)) for one in clients], not own_models)
        give([add_prefix("client/", _kept_by_parts(task, one.client)) for one in clients], False)
        give([add_prefix("server/", task.server_state)], True)
        if not clients[0].plain:
            give([add_prefix("pool/", one.pool.tensors) for one in clients], clients[0].pool is task.pool)
        bench = engine.bench(
            StackInputs(
                self.objective,
                terms_of(engine.setup.experiment.method, task),
                self._starts(),
                own,
                shared,
                clients[0].plain,
                task.personal,
            )
        )
        bench.optimizer.begin(task.round)
        return bench

    def _starts(self) -> list[torch.Tensor]:
        """The weights [K, ...] that each client begins with; the round's own where all have them."""
        names, clients = self.engine.names, self.clients
        if self.task.personal or self.task.has_own_model(self.clients[0].client):
            starts = [self.task.start_of(one.client) for one in clients]
            return [moved(torch.stack([start[name] for start in starts]), self.device) for name in names]
        weights = (self.task.weights[name] for name in names)
        return [moved(w, self.device).expand(len(clients), *w.shape) for w in weights]

    def _stacked(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Tensors of one kind a client as one, with zeros where a client's is shorter."""
        shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
        made = tensors[0].new_zeros(len(tensors), *shape)
        for k, tensor in enumerate(tensors):
            place: tuple[Any, ...] = (k, *(slice(size) for size in tensor.shape))
            made[place] = tensor
        return moved(made, self.device)

    def train(self) -> list[float]:
        """Make all steps; returns each client's mean loss."""
        for step in range(self.steps):
            try:
                self._step(step)
            except Exception as error:
                names = ", ".join(str(one.client) for one in self.clients)
                error.add_note(f"while training clients {names} in round {self.task.round + 1}, batch {step + 1}")
                raise
        losses = self.bench.members.losses[: len(self.clients)].tolist()
        return [loss / max(1, len(one.order)) for loss, one in zip(losses, self.clients, strict=True)]

    def trained(self) -> list[torch.Tensor]:
        """The clients' weights [K, ...], which no later stack writes into."""
        params = self.bench.members.tensors(len(self.clients))
        return [p.clone() for p in params] if self.bench.recorder else params

    def outputs(self) -> torch.Tensor | None:
        """The clients' mean outputs by label [K, C, C], where they were noted."""
        return self.bench.means.all() if self.bench.means else None

    def _step(self, step: int) -> None:
        """Step on one batch of every client that has one: all full batches together, smaller ones alone or together."""
        sizes = self.sizes[:, step]
        for size in np.unique(sizes[sizes > 0])[::-1].tolist():
            who = np.flatnonzero(sizes == size)
            width = _width(int(who[-1]) + 1, len(sizes))
            # Smaller batches together only where few others are held meanwhile: those are computed for nothing.
            if size == self.full or (len(who) > 1 and 3 * len(who) >= 2 * width):
                self._step_rows(step, slice(0, width), size)
            else:
                for k in who.tolist():
                    self._step_rows(step, slice(k, k + 1), size)

    def _step_rows(self, step: int, rows: slice, size: int) -> None:
        """Step on the batches of ``size`` that some clients of the stack have; the others among them stay still."""
        active = self.sizes[rows, step] == size
        held = None if active.all() else self.sizes_there[rows, step] == size
        places = self.rows[rows].gather(1, self.firsts[rows, step, None] + self.counted[size])
        x, y = (half.index_select(0, places.view(-1)).unflatten(0, places.shape) for half in (self.x, self.y))
        drawn = {name: values[rows, step] for name, values in self.drawn.items()}
        if held is not None:
            # What was drawn for a longer batch does not fit this one: clients that are held take another's.
            whose = moved(torch.from_numpy(np.where(active, np.arange(len(active)), active.argmax())), self.device)
            drawn = {name: values.index_select(0, whose) for name, values in drawn.items()}
        masks = [
            self.masks.draw(rows.start, size * self.objective.views_per_sample, active) for _ in self.objective.phases()
        ]
        self.bench.step(StepBatch(x, y, drawn, masks, held), rows)


def _kept_by_parts(task: TrainTask, client: int) -> dict[str, torch.Tensor]:
    """What parts keep at a client, without models of its own."""
    if task.personal:
        return {}
    models = ("weights/", "outputs/", "personal/")
    return {name: t for name, t in task.client_states.get(client, {}).items() if not name.startswith(models)}


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
