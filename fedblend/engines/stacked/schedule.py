"""A stack of clients in training: its batches, their order, and its tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fedblend.core.engine import TrainTask, objective_of, terms_of
from fedblend.core.trees import add_prefix
from fedblend.engines.loop import Assignment
from fedblend.engines.stacked.cuda_graphs import to_device
from fedblend.engines.stacked.dropout import DropoutMasks
from fedblend.engines.stacked.trainer import Owner, StackInputs, StackTrainer, StepBatch


class Stack:
    """Clients that train together, those with the most steps first.

    No step waits for the device: all tensors of a step are on the device before the first step, the host's tables only
    select the clients with a batch, and the results are read once, at the end.
    """

    def __init__(self, engine: Owner, task: TrainTask, clients: Sequence[Assignment]) -> None:
        self.engine, self.task, self.clients = engine, task, list(clients)
        self.device = engine.device
        experiment = engine.setup.experiment
        self.full = experiment.train.batch_size
        self.objective = objective_of(experiment.method, task, clients[0].plain)
        self.masks = DropoutMasks(engine.shapes, experiment.seed, task, [one.client for one in clients], self.device)
        self.steps = max((len(one.sizes) for one in clients), default=0)
        self.sizes = _padded([one.sizes for one in clients], self.steps)
        firsts = _padded([one.bounds[:-1] for one in clients], self.steps)
        self.device_sizes, self.firsts = (to_device(torch.from_numpy(t), self.device) for t in (self.sizes, firsts))
        own_steps = [experiment.method.personal.own_steps(len(one.sizes)) for one in clients]
        self.own_firsts = None if None in own_steps else to_device(torch.tensor(own_steps), self.device)
        self._gather()
        self.trainer = self._load_trainer()

    def _gather(self) -> None:
        """Copy to the device: the samples of all clients, concatenated, and the random numbers of their steps."""
        clients = self.clients
        samples = [self.engine.setup.samples(one.client, one.samples) for one in clients]
        starts = np.cumsum([0, *(one.samples for one in clients)])
        orders = [one.order + start for one, start in zip(clients, starts[:-1], strict=True)]
        places = max((len(order) for order in orders), default=0) + self.full
        self.rows = to_device(torch.from_numpy(_padded(orders, places)), self.device)
        self.x, self.y = (to_device(torch.cat(half), self.device) for half in zip(*samples, strict=True))
        self.drawn = {
            name: self._stack([torch.from_numpy(one.drawn[name]) for one in clients]) for name in clients[0].drawn
        }
        self.offsets = {size: torch.arange(size, device=self.device) for size in np.unique(self.sizes).tolist()}

    def _load_trainer(self) -> StackTrainer:
        """Return a trainer with this stack loaded: a new one, or the engine's own where it records steps."""
        task, clients = self.task, self.clients
        shared_tensors: dict[str, torch.Tensor] = {}
        client_tensors: dict[str, torch.Tensor] = {}

        def add(tables: Sequence[dict[str, torch.Tensor]], shared: bool) -> None:
            """Add tensors for the objective: one table a client, all the same where ``shared``."""
            if shared:
                shared_tensors.update(tables[0])
            else:
                client_tensors.update({name: self._stack([table[name] for table in tables]) for name in tables[0]})

        terms = terms_of(self.engine.setup.experiment.method, task)
        own_models = task.has_own_model(clients[0].client)
        if terms:
            apart = not task.personal and task.starts_apart(clients[0].client)
            add([add_prefix("start/", task.anchor_of(one.client)) for one in clients], not apart)
        add([add_prefix("outputs/", task.outputs_of(one.client)) for one in clients], not own_models)
        add([add_prefix("client/", _part_state(task, one.client)) for one in clients], False)
        add([add_prefix("server/", task.server_state)], True)
        plain = clients[0].plain
        if not plain:
            add([add_prefix("pool/", one.pool.tensors) for one in clients], clients[0].pool is task.pool)
        params = self._start_weights()
        trainer = self.engine.trainer_for(
            StackInputs(self.objective, terms, params, client_tensors, shared_tensors, plain, task.personal)
        )
        trainer.optimizer.begin(task.round)
        return trainer

    def _start_weights(self) -> list[torch.Tensor]:
        """Return the initial weights [K, ...] of the clients; expanded views where all begin with the global model."""
        names, clients = self.engine.names, self.clients
        if self.task.personal or self.task.starts_apart(self.clients[0].client):
            starts = [self.task.start_of(one.client) for one in clients]
            return [to_device(torch.stack([start[name] for start in starts]), self.device) for name in names]
        weights = (self.task.weights[name] for name in names)
        return [to_device(w, self.device).expand(len(clients), *w.shape) for w in weights]

    def _stack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Stack one tensor a client, with zeros where a client's tensor is shorter."""
        shape = [max(sizes) for sizes in zip(*(t.shape for t in tensors), strict=True)]
        stacked = tensors[0].new_zeros(len(tensors), *shape)
        for k, tensor in enumerate(tensors):
            region: tuple[Any, ...] = (k, *(slice(size) for size in tensor.shape))
            stacked[region] = tensor
        return to_device(stacked, self.device)

    def train(self) -> list[float]:
        """Make all steps and return each client's mean loss."""
        for step in range(self.steps):
            try:
                self._step(step)
            except Exception as error:
                names = ", ".join(str(one.client) for one in self.clients)
                error.add_note(f"while training clients {names} in round {self.task.round + 1}, batch {step + 1}")
                raise
        losses = self.trainer.slots.losses[: len(self.clients)].tolist()
        return [loss / max(1, len(one.order)) for loss, one in zip(losses, self.clients, strict=True)]

    def trained(self) -> list[torch.Tensor]:
        """Return the clients' weights [K, ...]; no later stack writes into these tensors."""
        params = self.trainer.slots.tensors(len(self.clients))
        return [p.clone() for p in params] if self.trainer.recorder else params

    def outputs(self) -> torch.Tensor | None:
        """Return the clients' mean outputs by label [K, C, C], where the upload needs them."""
        return self.trainer.means.all() if self.trainer.means else None

    def _step(self, step: int) -> None:
        """Train on one batch of every client that has one: full batches together, smaller ones alone or together."""
        sizes = self.sizes[:, step]
        for size in np.unique(sizes[sizes > 0])[::-1].tolist():
            members = np.flatnonzero(sizes == size)
            width = _width(int(members[-1]) + 1, len(sizes))
            # Smaller batches together only where few clients are inactive: their gradients are computed in vain.
            if size == self.full or (len(members) > 1 and 3 * len(members) >= 2 * width):
                self._step_rows(step, slice(0, width), size)
            else:
                for k in members.tolist():
                    self._step_rows(step, slice(k, k + 1), size)

    def _step_rows(self, step: int, rows: slice, size: int) -> None:
        """Train the clients ``rows`` with a batch of this ``size``; the others of these rows do not change."""
        active = self.sizes[rows, step] == size
        device_active = None if active.all() else self.device_sizes[rows, step] == size
        places = self.rows[rows].gather(1, self.firsts[rows, step, None] + self.offsets[size])
        x, y = (half.index_select(0, places.view(-1)).unflatten(0, places.shape) for half in (self.x, self.y))
        drawn = {name: values[rows, step] for name, values in self.drawn.items()}
        if device_active is not None:
            # Numbers drawn for a longer batch do not fit: inactive clients use those of an active client.
            sources = np.where(active, np.arange(len(active)), active.argmax())
            drawn_rows = to_device(torch.from_numpy(sources), self.device)
            drawn = {name: values.index_select(0, drawn_rows) for name, values in drawn.items()}
        masks = [
            self.masks.draw(rows.start, size * self.objective.views_per_sample, active) for _ in self.objective.phases()
        ]
        turn = None if self.own_firsts is None else step < self.own_firsts[rows]
        self.trainer.step(StepBatch(x, y, drawn, masks, device_active, turn), rows)


def _part_state(task: TrainTask, client: int) -> dict[str, torch.Tensor]:
    """Return the state of parts at a client, without the client's own models."""
    if task.personal:
        return {}
    models = ("weights/", "outputs/", "personal/", "own/")
    return {name: t for name, t in task.client_states.get(client, {}).items() if not name.startswith(models)}


def _width(needed: int, most: int) -> int:
    """Return the smallest of ``most``, its half, its quarter, ... that is at least ``needed``: few shapes to trace."""
    width = most
    while width > 1 and (width + 1) // 2 >= needed:
        width = (width + 1) // 2
    return width


def _padded(rows: Sequence[np.ndarray], length: int) -> np.ndarray:
    """Return rows of integers as int64 [rows, length], padded with zeros."""
    table = np.zeros((len(rows), length), np.int64)
    for k, row in enumerate(rows):
        table[k, : len(row)] = row
    return table
