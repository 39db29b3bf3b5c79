"""A stack of clients in training: its batches, their order, and its tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from fedblend.core.engine import TrainTask, objective_of, terms_of
from fedblend.core.trees import Tensors, add_prefix, without
from fedblend.engines.assignment import Assignment
from fedblend.engines.stacked.cuda_graphs import to_device
from fedblend.engines.stacked.dropout import DropoutMasks
from fedblend.engines.stacked.tensors import COUNTS, OBJECTIVE, StackInputs, StepBatch, clone
from fedblend.engines.stacked.trainer import StackTrainer, TracedEngine


class Stack:
    """Clients that train together, those with the most steps first.

    No step waits for the device: all tensors of a step are on the device before the first step, the host's tables only
    select the clients with a batch, and the results are read once, at the end.
    """

    def __init__(self, engine: TracedEngine, task: TrainTask, clients: Sequence[Assignment]) -> None:
        self.engine, self.task, self.clients = engine, task, list(clients)
        self.device = engine.device
        experiment = engine.setup.experiment
        self.full = experiment.train.batch_size
        self.objective = objective_of(experiment.method, task, clients[0].plain)
        self.masks = DropoutMasks(experiment.seed, task, [one.client for one in clients], self.device)
        self.steps = max((len(one.sizes) for one in clients), default=0)
        self.sizes = _padded([one.sizes for one in clients], self.steps)
        firsts = _padded([one.bounds[:-1] for one in clients], self.steps)
        self.device_sizes, self.firsts = (to_device(torch.from_numpy(t), self.device) for t in (self.sizes, firsts))
        own_steps = [experiment.method.personal.own_steps(len(one.sizes)) for one in clients]
        # -1: all layers in every step.
        own_firsts = torch.tensor([-1 if first is None else first for first in own_steps])
        self.own_firsts = to_device(own_firsts, self.device) if (own_firsts >= 0).any() else None
        self.accumulates = experiment.train.accumulate > 1
        self.ends = _padded([one.ends for one in clients], self.steps) == 1
        self.device_ends = to_device(torch.from_numpy(self.ends), self.device) if self.accumulates else None
        self.factors = self._factors()
        self._gather()
        self.trainer = self._load_trainer()

    def _factors(self) -> torch.Tensor | None:
        """Return the factors of the learning rate by client and batch, float32 [K, batches]; ``None`` without any."""
        train = self.engine.setup.training
        if train.schedule_in_round is None:
            return None
        table = np.zeros(self.sizes.shape, np.float32)
        for row, one in zip(table, self.clients, strict=True):
            # A batch that ends no step belongs to the next step.
            of_batch = np.cumsum(one.ends) - one.ends
            row[: len(one.ends)] = np.array(train.factors(one.steps), np.float32)[of_batch]
        return to_device(torch.from_numpy(table), self.device)

    def _gather(self) -> None:
        """Copy to the device: the samples of all clients, concatenated, and the random numbers of their steps."""
        clients = self.clients
        samples = [self.engine.setup.samples(one.client, one.samples) for one in clients]
        starts = np.cumsum([0, *(one.samples for one in clients)])
        orders = [one.order + start for one, start in zip(clients, starts[:-1], strict=True)]
        places = max((len(order) for order in orders), default=0) + int(self.sizes.max(initial=0))
        self.rows = to_device(torch.from_numpy(_padded(orders, places)), self.device)
        self.x, self.y = (to_device(torch.cat(half), self.device) for half in zip(*samples, strict=True))
        self.drawn = {
            name: self._stack([torch.from_numpy(one.drawn[name]) for one in clients]) for name in clients[0].drawn
        }
        self.augment = None
        if clients[0].augment is not None:
            self.augment = self._stack([torch.from_numpy(one.augment) for one in clients])
        self.offsets = {size: torch.arange(size, device=self.device) for size in np.unique(self.sizes).tolist()}

    def _load_trainer(self) -> StackTrainer:
        """Return a trainer with this stack loaded: a new one, or the engine's own where it records steps."""
        task, clients = self.task, self.clients
        shared_tensors: dict[str, torch.Tensor] = {}
        client_tensors: dict[str, torch.Tensor] = {}

        def add(field: str, tables: Sequence[Tensors], shared: bool) -> None:
            """Add tensors for a field of the objective's context: one table a client, all the same where ``shared``."""
            stacked = tables[0] if shared else {n: self._stack([table[n] for table in tables]) for n in tables[0]}
            (shared_tensors if shared else client_tensors).update(add_prefix(f"{field}/", stacked))

        terms = terms_of(self.engine.setup.method, task)
        states = [task.state_of(one.client) for one in clients]
        if terms or self.objective.reads_start:
            apart = not task.personal and task.starts_apart(clients[0].client)
            frozen = self.engine.setup.frozen
            add("start", [without(task.anchor_of(one.client), frozen) for one in clients], not apart)
        add("global_outputs", [task.outputs_of(one.client) for one in clients], not states[0].model)
        add("client_state", [{} if task.personal else kept.parts for kept in states], False)
        add("server_state", [task.server_state], True)
        add("counts", [{n: torch.zeros(()) for n in self.objective.measures}] * len(clients), task.personal)
        plain = clients[0].plain
        if not plain:
            add("pool", [one.pool.tensors for one in clients], clients[0].pool is task.pool)
        # A traced step reads tensors by place, and a part may return its table in another order each round.
        client_tensors, shared_tensors = dict(sorted(client_tensors.items())), dict(sorted(shared_tensors.items()))
        params, kept = self._start_weights(), self._kept_state()
        trainer = self.engine.trainer_for(
            StackInputs(self.objective, terms, params, client_tensors, shared_tensors, plain, task.personal, kept)
        )
        trainer.optimizer.begin(task.round)
        return trainer

    def _start_weights(self) -> list[torch.Tensor]:
        """Return the initial weights [K, ...] of the clients; expanded views where all begin with the global model."""
        names, clients = self.engine.names, self.clients
        if self.task.personal or self.task.starts_apart(self.clients[0].client):
            starts = [self.task.start_of(one.client) for one in clients]
            return [self._stack([start[name] for start in starts]) for name in names]
        weights = (self.task.weights[name] for name in names)
        return [to_device(w, self.device).expand(len(clients), *w.shape) for w in weights]

    def _kept_state(self) -> list[torch.Tensor]:
        """Return the state that the clients' optimisers have kept [K, ...], by key and parameter; empty without any."""
        engine, states = self.engine, [self.task.state_of(one.client).optimizer for one in self.clients]
        if not engine.keeps_optimizer(self.task):
            return []
        return [
            self._stack([kept[f"{key}/{name}"] for kept in states])
            for key in engine.setup.training.state_keys
            for name in engine.names
        ]

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
        return [clone(p) if self.trainer.recorder else p.contiguous() for p in params]

    def optimizer_state(self) -> dict[str, torch.Tensor]:
        """Return what the clients' optimisers keep [K, ...], by key and parameter; empty where they keep nothing."""
        engine, keys = self.engine, self.engine.setup.training.state_keys
        if not engine.keeps_optimizer(self.task):
            return {}
        paths = [f"{key}/{name}" for key in keys for name in engine.names]
        return {path: t.cpu().clone() for path, t in zip(paths, self.trainer.slots.state, strict=True)}

    def tracked(self) -> dict[str, torch.Tensor]:
        """Return what the objective's steps made of what it keeps at the clients [K, ...], by name."""
        slots, names = self.trainer.slots, self.trainer.tracked
        return {name.removeprefix(OBJECTIVE): slots.client_tensors[name].cpu().clone() for name in names}

    def measured(self) -> list[dict[str, float]]:
        """Return the shares of samples that the objective measured, for each client."""
        slots, names = self.trainer.slots, self.trainer.counted
        counts = {name.removeprefix(COUNTS): slots.client_tensors[name].tolist() for name in names}
        return [
            {name: numbers[k] / max(1, len(one.order)) for name, numbers in counts.items()}
            for k, one in enumerate(self.clients)
        ]

    def outputs(self) -> torch.Tensor | None:
        """Return the clients' mean outputs by label [K, C, C], where the upload needs them."""
        return self.trainer.means.all() if self.trainer.means else None

    def _step(self, step: int) -> None:
        """Training on one batch of every client that has one: full batches together, smaller ones alone or together."""
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
        """Training the clients ``rows`` with a batch of this ``size``; the others of these rows do not change."""
        active = self.sizes[rows, step] == size
        device_active = None if active.all() else self.device_sizes[rows, step] == size
        positions = self.firsts[rows, step, None] + self.offsets[size]
        places = self.rows[rows].gather(1, positions)
        x, y = (half.index_select(0, places.view(-1)) for half in (self.x, self.y))
        if self.augment is not None:
            # Inactive clients may have no such positions; theirs are not used.
            known = positions.clamp(max=self.augment.shape[1] - 1)[..., None].expand(-1, -1, self.augment.shape[2])
            x = self.engine.augmented(x, self.augment[rows].gather(1, known).flatten(0, 1))
        x, y = (half.unflatten(0, places.shape) for half in (x, y))
        drawn = {name: values[rows, step] for name, values in self.drawn.items()}
        if device_active is not None:
            # Numbers drawn for a longer batch do not fit: inactive clients use those of an active client.
            sources = np.where(active, np.arange(len(active)), active.argmax())
            drawn_rows = to_device(torch.from_numpy(sources), self.device)
            drawn = {name: values.index_select(0, drawn_rows) for name, values in drawn.items()}
        turn = None
        if self.own_firsts is not None:
            own = self.own_firsts[rows]
            turn = torch.stack([(step < own) | (own < 0), step >= own])
        factor = None if self.factors is None else self.factors[rows, step]
        ending, steps = None, True
        if self.device_ends is not None:
            ending = self.device_ends[rows, step] & (self.device_sizes[rows, step] == size)
            steps = bool((self.ends[rows, step] & active).any())
        batch = StepBatch(x, y, drawn, [], device_active, turn, factor, ending, steps)
        drops = self.trainer.drops(batch, rows)
        self.trainer.step(replace(batch, masks=[self.masks.draw(rows.start, of, active) for of in drops]), rows)


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
