"""The reference engine: clients run one after another in this process."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch import nn

from fedblend.core.dataset import ClientSplit, Split
from fedblend.core.engine import (
    ClientUpdate,
    CohortResult,
    OnStep,
    Scores,
    Tensors,
    TrainTask,
    client_parts,
    collect,
    no_step,
    objective_of,
    terms_of,
)
from fedblend.core.errors import FedblendError
from fedblend.core.module import still_layers, train_mode
from fedblend.core.objective import (
    Batch,
    ClientPart,
    Context,
    LocalTraining,
    Objective,
    Personal,
    StepPlan,
    Term,
    checked_loss,
)
from fedblend.core.optimizer import Training
from fedblend.core.random import lent_generator, stream
from fedblend.core.setup import Setup, model_spec, work_of
from fedblend.core.sharing import ClientData, Payload, Pool, Request
from fedblend.core.state import ClientState
from fedblend.core.trees import add_prefix, strip_prefix, without
from fedblend.core.upload import as_state_and_extras
from fedblend.engines.adam import Adam
from fedblend.engines.assignment import Assignment, batches, group_ends, mean_lr
from fedblend.engines.nets import EagerNet
from fedblend.engines.sgd import (
    SGD,
    Accumulator,
    ClientOptimizer,
    ProximalStep,
    TorchOptimizer,
    computing_in,
    no_tf32,
    split_proximal,
)
from fedblend.methods.augment import pictures
from fedblend.methods.objectives.output_cache import LabelMeans, OutputCache
from fedblend.methods.uploads import embedding

SCORE_BATCH = 500
"""Most samples in one forward pass without training; a small model's activations then fit into a CPU's cache."""
SCORE_NUMBERS = SCORE_BATCH * 3 * 32 * 32
"""Most input numbers in such a pass. Activations grow with them: for large pictures they would take gigabytes."""


def score_batch(x: torch.Tensor) -> int:
    """Return the number of samples in a forward pass without training over ``x`` [n, ...]."""
    return max(1, min(SCORE_BATCH, SCORE_NUMBERS // max(1, math.prod(x.shape[1:]))))


class LocalLoss:
    """A client's loss: the objective's phases, and the terms that are added to the last phase."""

    def __init__(
        self, objective: Objective, context: Context, terms: Sequence[tuple[str, Term]], train: Training
    ) -> None:
        *self.first, self.last = objective.phases()
        differentiated, self.mu = split_proximal(terms, train) if terms else ((), 0.0)
        self.terms = [(term, context.of_part(slot)) for slot, term in differentiated]
        self.context = context.of_part("objective")


class LoopEngine:
    """Trains clients one after another on one resident model: load weights, train, copy the weights out."""

    def __init__(self, setup: Setup, device: str = "cpu", memory_format: str = "contiguous") -> None:
        self.setup = setup
        self.device = torch.device(device)
        # A copy: the setup keeps the initial weights.
        self.model = copy.deepcopy(setup.model).to(self.device)
        if memory_format == "channels_last":
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.net = EagerNet(self.model)
        self.scale = setup.scale.to(self.device)
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.names, self.params = list(trained), list(trained.values())
        self._unsaved = [
            (module, name, module.get_buffer(name).clone())
            for module in self.model.modules()
            for name in module._non_persistent_buffers_set
            if module._buffers[name] is not None
        ]
        """Buffers that are no part of the weights, by module and name, with their first values."""
        self._still = still_layers(self.model)
        self._uploads: dict[int, Tensors] = {}
        self.notes = False
        """Whether to keep the numbers that parts note in each step (:attr:`ClientUpdate.notes`)."""
        self.on_step: OnStep = no_step

    @property
    def state(self) -> dict[str, torch.Tensor]:
        """The model's weights and buffers; read anew, because a model may replace a buffer by another tensor."""
        return self.model.state_dict(keep_vars=True)

    def _load(self, weights: Tensors) -> None:
        self._restore_unsaved()
        state = self.state
        with torch.no_grad():
            for name, tensor in weights.items():
                if name not in self.setup.twins:
                    state[name].copy_(tensor)

    def _restore_unsaved(self) -> None:
        """Reset what a model remembers beside its weights: it would pass from client to client, and not be resumed."""
        for module, name, first in self._unsaved:
            setattr(module, name, first.clone())

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload]]:
        """Yield each client's shared payload; a client that shares nothing is left out."""
        experiment = self.setup.experiment
        self.prepare(weights)
        minimum = experiment.policy.min_mean
        requests = self.setup.requests(sizes)
        for client in clients:
            rng = stream(experiment.seed, "share", round, client)
            local = self.local(client, int(sizes[client]), rng, minimum, requests.get(client))
            payload = self.setup.method.sharing.share(local)
            if payload is not None:
                yield client, payload

    @torch.no_grad()
    @no_tf32()
    def losses(self, round: int, weights: Tensors, clients: Sequence[int], sizes: np.ndarray) -> dict[int, float | str]:
        """Return the mean loss of a model in evaluation mode over each client's samples."""
        self.prepare(weights)
        found: dict[int, float | str] = {}
        for client in clients:
            x, y = self.setup.samples(client, int(sizes[client]))
            batches = zip(x.split(score_batch(x)), y.split(score_batch(x)), strict=True)
            losses = [
                self.setup.task.losses(self.model(self.scale(xs.to(self.device))), ys.to(self.device))
                for xs, ys in batches
            ]
            found[client] = float(torch.cat(losses).double().mean())
        return found

    def prepare(self, weights: Tensors) -> None:
        """Load weights and switch to evaluation mode, for hidden states that clients share."""
        self._load(weights)
        self.model.eval()

    def local(
        self, client: int, size: int, rng: np.random.Generator, minimum: int, request: Request | None = None
    ) -> ClientData:
        """Return the data that a client may share: its first ``size`` samples, in means of at least ``minimum``.

        ``request`` is the request of a server with data of its own to this client.
        """
        x, y = self.setup.samples(client, size)
        return ClientData(x, y, self.setup.task, self.setup.scale, self._hidden, rng, minimum, request, self.model)

    @torch.no_grad()
    def _hidden(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        return self.net(x.to(self.device), 0, layer).cpu()

    def train(self, task: TrainTask, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        """Training on each client in turn. An exception names the client, the round and the batch."""
        for done, client in enumerate(clients):
            self.on_step("training", done, len(clients))
            self._load(task.start_of(client))
            self.model.train()
            for layer in self._still:
                layer.training = False
            try:
                yield self._train_client(task, client)
            except FedblendError:
                raise
            except Exception as error:
                if "more than 1 value per channel" in str(error):
                    raise FedblendError(
                        f"model: batch norm cannot be trained on a batch of one sample, which client {client} has in "
                        f"round {task.round + 1}; valid: {self._larger_batches(int(task.sizes[client]))}, or group norm"
                    ) from None
                if "mutate a captured Tensor" in str(error):
                    raise FedblendError(
                        "model: batch norm changes its running statistics in each pass, which an objective that is "
                        "differentiated inside a step, such as pFedMe's, does not allow; choose group norm"
                    ) from None
                raise

    def _larger_batches(self, samples: int) -> str:
        """Return the fields that give a client with so many samples no batch of one sample."""
        if self.setup.training.batch_size == 1:
            return "train.batch_size from 2"
        steps = "train.steps, which draws full batches with replacement"
        return steps if samples == 1 else f"train.last_batch = 'merge' or 'drop', {steps}"

    def assign(self, task: TrainTask, client: int) -> Assignment:
        """Draw a client's batches and the random numbers of its objective, and select its view of the pool."""
        seed, settings, method = self.setup.experiment.seed, self.setup.training, self.setup.method
        samples = int(task.sizes[client])
        rng = stream(seed, task.purpose("batches"), task.round, client)
        order, bounds = batches(samples, settings, rng)
        ends = np.ones(len(bounds) - 1, bool)
        if settings.accumulate > 1:
            ends = group_ends(len(ends), 1 if settings.steps else settings.epochs, settings.accumulate)
        made = work_of(self.setup, task.round, client, samples).batches
        if made < len(ends):
            order, bounds, ends = order[: bounds[made]], bounds[: made + 1], ends[:made]
            ends[-1:] = True
        pool = method.sharing.view(task.pool, client) if task.pool is not None else Pool({}, np.empty(0, np.int64))
        # A client has nothing to mix with where it may use only its own means, and holds too few samples for one.
        plain = bool(method.objective.needs) and not len(pool)
        sizes = np.diff(bounds)
        counts = self.setup.label_counts(client, samples)
        server_state = strip_prefix("objective/", task.server_state)
        width = int(sizes.max(initial=0))
        plan = StepPlan(sizes, width, task.round, pool.owner == client, len(pool), counts, server_state)
        objective = objective_of(method, task, plain)
        drawn = objective.draw(stream(seed, task.purpose("objective"), task.round, client), plan)
        if not isinstance(drawn, Mapping):
            raise FedblendError(
                f"method.objective: draw of '{method.objective.name}' returned {type(drawn).__name__}; valid: a dict "
                "of NumPy arrays by name"
            )
        for name, array in drawn.items():
            if not isinstance(array, np.ndarray) or array.shape[:1] != sizes.shape:
                found = f"shape {list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
                raise FedblendError(
                    f"method.objective: draw of '{method.objective.name}' returned '{name}' as {found}; valid: a NumPy "
                    f"array with one row for each of the {len(sizes)} steps"
                )
        augment = None
        if settings.augment:
            rng = stream(seed, task.purpose("augment"), task.round, client)
            augment = pictures.draw(settings.augment, rng, len(order))
        return Assignment(client, samples, order, bounds, plain, pool, drawn, ends, augment)

    def _train_client(self, task: TrainTask, client: int) -> ClientUpdate:
        method, settings = self.setup.method, self.setup.training
        assignment = self.assign(task, client)
        objective = objective_of(method, task, assignment.plain)
        # What parts keep at the client is of the global model's training.
        had = ClientState() if task.personal else task.state_of(client)
        terms, frozen = terms_of(method, task), self.setup.frozen
        notes: dict[str, list[torch.Tensor]] = defaultdict(list)
        context = self._context(task, assignment, objective, terms, had.parts, notes)
        loss = LocalLoss(objective, context, terms, settings)
        drawn = {name: torch.from_numpy(a).to(self.device) for name, a in assignment.drawn.items()}
        x, y = (half.to(self.device) for half in self.setup.samples(client, assignment.samples))
        rows = torch.from_numpy(assignment.order).to(self.device)
        augment = None if assignment.augment is None else torch.from_numpy(assignment.augment).to(self.device)
        optimizer = self._optimizer(task, self.to_device(had.optimizer))
        accumulator = Accumulator() if settings.accumulate > 1 else None
        factors, made = settings.factors(assignment.steps), 0
        total = torch.zeros((), device=self.device)
        means = LabelMeans(self.setup.task.outputs, self.device) if method.upload.content == "outputs" else None
        first = method.personal.own_steps(len(assignment.sizes))
        own = [name in self.setup.own_layers for name in self.names]
        with lent_generator(self.setup.experiment.seed, task.purpose("train"), task.round, client):
            for step, (a, b) in enumerate(pairwise(assignment.bounds.tolist())):
                samples = x[rows[a:b]]
                if augment is not None:
                    samples = self.augmented(samples, augment[a:b])
                batch = Batch(self.scale(samples), y[rows[a:b]])
                row = {name: values[step] for name, values in drawn.items()}
                ends = bool(assignment.ends[step])
                if factors is not None and made < len(factors):
                    optimizer.lr = settings.lr_in(task.round) * factors[made]
                made += ends
                try:
                    still = [i for i, is_own in enumerate(own) if is_own != (step < first)] if first is not None else ()
                    loss_of_batch = self._step(loss, batch, row, optimizer, means, still, accumulator, ends)
                    total += loss_of_batch * (b - a)
                except Exception as error:
                    error.add_note(f"while training client {client} in round {task.round + 1}, batch {step + 1}")
                    raise
        start = task.start_of(client)
        weights = {
            n: start[n] if n in frozen else tensor.detach().clone(memory_format=torch.contiguous_format)
            for n, tensor in self.state.items()
        }
        seen = max(1, len(assignment.order))
        mean_loss, measured = float(total) / seen, {name: float(n) / seen for name, n in loss.context.counts.items()}
        tracked = {name: tensor.cpu() for name, tensor in loss.context.client_state.items()} if objective.tracks else {}
        update = ClientUpdate(
            client,
            weights,
            assignment.samples,
            mean_loss,
            means.of() if means else None,
            ClientState(optimizer=self._kept(task, optimizer)),
            notes={name: torch.stack(numbers).cpu() for name, numbers in notes.items()},
            measured=measured,
        )
        return self.finish(task, assignment, update, tracked)

    def _context(
        self,
        task: TrainTask,
        assignment: Assignment,
        objective: Objective,
        terms: Sequence[tuple[str, Term]],
        parts: Tensors,
        notes: Mapping[str, list[torch.Tensor]],
    ) -> Context:
        """Return what losses read beside a batch; ``parts`` is what the method's parts keep at the client."""
        client, measures = assignment.client, () if task.personal else objective.measures
        start = without(task.anchor_of(client), self.setup.frozen) if terms or objective.reads_start else {}
        return Context(
            self.setup.task,
            self.scale,
            self.to_device(assignment.pool.tensors),
            self.to_device(start),
            self.to_device(task.outputs_of(client)),
            self.to_device(parts),
            self.to_device(task.server_state),
            note=(lambda name, number: notes[name].append(number)) if self.notes else None,
            pool_stored=self.setup.method.sharing.plan.is_stored,
            counts={name: torch.zeros((), device=self.device) for name in measures},
            renews=objective.tracks,
        )

    def augmented(self, x: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """Return stored samples after the augmentations by these random choices."""
        return pictures.augmented(self.setup.training.augment, x, choices, self.scale.background(x))

    def keeps_optimizer(self, task: TrainTask) -> bool:
        """Whether clients keep their optimiser's state after this task; that of personal models is not kept."""
        return bool(self.setup.training.optimizer_state == "keep") and not task.personal

    def _optimizer(self, task: TrainTask, kept: Tensors) -> ClientOptimizer:
        """Return a client's optimiser, with the state that it has ``kept``."""
        settings = self.setup.training
        kind = {"sgd": SGD, "adam": Adam, "torch": TorchOptimizer}[settings.optimizer.steps]
        optimizer: ClientOptimizer = kind(self.params, settings, task.round)
        if self.keeps_optimizer(task):
            optimizer.load({key: [kept[f"{key}/{name}"] for name in self.names] for key in settings.state_keys})
        return optimizer

    def _kept(self, task: TrainTask, optimizer: ClientOptimizer) -> dict[str, torch.Tensor]:
        """Return the optimiser's state that the client keeps, which :meth:`_optimizer` loads in its next round."""
        if not self.keeps_optimizer(task):
            return {}
        return {
            f"{key}/{name}": tensor.cpu().clone()
            for key, tensors in optimizer.state().items()
            for name, tensor in zip(self.names, tensors, strict=True)
        }

    def to_device(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return the tensors on the engine's device."""
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def finish(self, task: TrainTask, assignment: Assignment, update: ClientUpdate, tracked: Tensors) -> ClientUpdate:
        """Return a client's update after its steps with the new state and the extra uploads of its parts.

        ``tracked`` is what the objective's steps made of its state (:attr:`Objective.tracks`).
        """
        client, setup, weights, outputs = update.client, self.setup, update.weights, update.outputs
        parts: dict[str, torch.Tensor] = {}
        extras: dict[str, torch.Tensor] = {}
        own_model: Tensors = {}
        personal = setup.method.personal

        def training(kept: Tensors, received: Tensors) -> LocalTraining:
            steps = personal.shared_steps(assignment.steps)
            lr = mean_lr(setup.training, task.round, assignment.steps, steps)
            gradient = partial(self.full_gradient, task.round, client, assignment.samples)
            start = self.to_device(task.start_of(client))
            tables = self.to_device(kept), self.to_device(received)
            return LocalTraining(start, weights, *tables, lr, steps, gradient)

        if setup.method.upload.content == "embeddings" and not task.personal:
            outputs = self.prototypes(weights, client, assignment.samples)
        for slot, part in ({} if task.personal else client_parts(setup.method)).items():
            prefix = f"{slot}/"
            client_state = strip_prefix(prefix, task.state_of(client).parts)
            if slot == "objective":
                client_state |= tracked
            if type(part).after_training is ClientPart.after_training and not client_state:
                continue
            received = strip_prefix(prefix, task.server_state)
            made = part.after_training(model_spec(setup, self.model), training(client_state, received))
            kept, sent = as_state_and_extras(made, received if part.sends else {}, slot, part)
            parts |= add_prefix(prefix, kept)
            extras |= add_prefix(prefix, sent)
        if not task.personal and type(personal).after_training is not Personal.after_training:
            kept, received = (strip_prefix("objective/", table) for table in (parts, task.server_state))
            own_model = personal.after_training(model_spec(setup, self.model), training(kept, received))
        state = replace(update.state, personal=own_model, parts=parts)
        return replace(update, outputs=outputs, state=state, extras=extras)

    def full_gradient(self, round: int, client: int, samples: int, weights: Tensors) -> dict[str, torch.Tensor]:
        """Return the gradient of the task's mean loss over a client's samples at ``weights``, by name."""
        self._load(weights)
        train_mode(self.model)
        x, y = (half.to(self.device) for half in self.setup.samples(client, samples))
        total = [torch.zeros_like(param) for param in self.params]
        with lent_generator(self.setup.experiment.seed, "gradient", round, client):
            # Of equal sizes, because batch norm cannot be trained on a rest of one sample.
            for rows in torch.arange(samples, device=self.device).tensor_split(-(-samples // score_batch(x))):
                loss = self.setup.task.loss(self.model(self.scale(x[rows])), y[rows]) * len(rows)
                gradients = torch.autograd.grad(loss, self.params, allow_unused=True)
                total = [t if g is None else t + g for t, g in zip(total, gradients, strict=True)]
        return {name: t / samples for name, t in zip(self.names, total, strict=True)}

    @torch.no_grad()
    @no_tf32()
    def prototypes(self, weights: Tensors, client: int, samples: int) -> torch.Tensor:
        """Return the mean embeddings by class of a client's samples at ``weights``, float32 [C, features], on the CPU.

        A class of fewer samples than the policy allows in a mean has a row of zeros.
        """
        task = self.setup.task
        self.prepare(weights)
        x, y = self.setup.samples(client, samples)
        sums = torch.zeros(task.outputs, task.features, dtype=torch.float64, device=self.device)
        for rows in torch.arange(samples).split(score_batch(x)):
            embedded = embedding(self.net, self.scale(x[rows].to(self.device)))
            sums.index_add_(0, y[rows].to(self.device), embedded.double())
        counts = torch.bincount(y, minlength=task.outputs)
        means = sums.cpu() / counts.clamp(min=1)[:, None]
        return means.where(counts[:, None] >= self.setup.experiment.policy.min_mean, 0.0).float()

    def _step(
        self,
        local: LocalLoss,
        batch: Batch,
        drawn: dict[str, torch.Tensor],
        optimizer: ClientOptimizer,
        means: LabelMeans | None,
        frozen: Collection[int],
        accumulator: Accumulator | None,
        ends: bool,
    ) -> torch.Tensor:
        """Training on one batch; return the loss of the objective's last phase, without terms.

        With an ``accumulator`` the optimiser makes a step only where a group of batches ``ends``.
        """
        precision = self.setup.experiment.precision
        for phase in local.first:
            # A phase may not use all layers (mixing of hidden states); unused parameters have no gradient.
            with computing_in(precision, self.device):
                loss = checked_loss(phase(self.net, batch, drawn, local.context), "method.objective")
            optimizer.step(self._gradients(loss, frozen))
        net = OutputCache(self.net, batch.x)
        with computing_in(precision, self.device):
            loss = value = checked_loss(local.last(net, batch, drawn, local.context), "method.objective")
        for term, context in local.terms:
            added = term.loss(dict(zip(self.names, self.params, strict=True)), net, batch, context)
            loss = loss + checked_loss(added, f"method.terms '{term.name}'")
        if not loss.requires_grad:
            raise FedblendError(
                "method.objective: its loss does not depend on the weights; valid: one of the net's outputs, without "
                "detach"
            )
        if means is not None:
            means.add(net.distribution()[None], batch.y[None])
        proximal = None
        if local.mu:
            # A frozen parameter moves toward itself.
            starts = [local.context.start[name] for name in self.names]
            starts = [self.params[i].detach() if i in frozen else start for i, start in enumerate(starts)]
            proximal = ProximalStep(local.mu, starts)
        gradients = self._gradients(loss, frozen)
        if accumulator is not None:
            accumulator.add(gradients, len(batch.y))
            gradients = accumulator.take() if ends else []
        if ends:
            optimizer.step(gradients, proximal)
        return value.detach()

    def _gradients(self, loss: torch.Tensor, frozen: Collection[int]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of all parameters; ``None`` for unused ones, and for those at positions ``frozen``."""
        gradients = torch.autograd.grad(loss, self.params, allow_unused=True)
        return [None if i in frozen else g for i, g in enumerate(gradients)] if frozen else gradients

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> CohortResult:
        """Training the clients, check their uploads, and reduce these to the aggregator's input."""
        # Once for all clients; the server works on the CPU.
        task = replace(task, weights=self.to_device(task.weights))
        result = collect(self, self.setup, task, clients, lost)
        self._uploads = result.uploads
        return result

    def query(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Send the server step's question to the clients with a good upload in this round."""
        step, spec = self.setup.method.server_step, model_spec(self.setup, self.server_model())
        yield from step.respond(self._uploads, question, spec).items()

    def server_model(self) -> nn.Module:
        """Return a module in evaluation mode, for functional calls with any weights by the server step."""
        self._restore_unsaved()
        return self.model.eval()

    def secret_rng(self) -> None:
        """Return ``None``: noise is drawn from the keyed stream, so that a run can be repeated."""

    def close(self) -> None:
        """Do nothing: this engine holds no other process."""

    def _scorer(self, weights: Tensors) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return the model with these weights, in evaluation mode."""
        self._load(weights)
        return self.model.eval()

    @torch.no_grad()
    @no_tf32()
    def score(
        self, weights: Tensors, split: Split = "test", share: tuple[int, int] = (0, 1), only: np.ndarray | None = None
    ) -> Scores:
        """Score a split's samples in batches on the device; results are copied to the host once.

        ``only`` are places of some of the samples, and ``share`` (i, n) is the i-th of n consecutive parts of them.
        Outputs are kept only for metrics.
        """
        outputs_of = self._scorer(weights)
        data, task = self.setup.data, self.setup.task
        samples = data.test if split == "test" else data.train
        indices = np.arange(len(data.test)) if split == "test" else self.setup.population.rows(split)
        selected = np.array_split(indices if only is None else indices[only], share[1])[share[0]]
        keeps_outputs, classifies = bool(self.setup.experiment.metrics), task.kind == "classification"
        losses = [torch.empty(0, device=self.device)]
        rights = [torch.empty(0, dtype=torch.bool, device=self.device)]
        kept = []
        # Many networks fail on a batch without samples.
        batches = torch.from_numpy(selected).split(score_batch(samples.x)) if len(selected) else ()
        for done, rows in enumerate(batches):
            self.on_step("testing", done, len(batches))
            x, y = self.scale(samples.x[rows].to(self.device)), samples.y[rows].to(self.device)
            outputs = outputs_of(x)
            if keeps_outputs:
                kept.append(outputs)
            losses.append(task.losses(outputs, y))
            if classifies:
                rights.append(outputs.argmax(1) == y)
        if keeps_outputs and not kept:
            kept = [torch.empty(0, task.outputs)]
        loss, right = torch.cat(losses).float().cpu().numpy(), torch.cat(rights).cpu().numpy() if classifies else None
        return Scores(loss, right, selected, outputs=torch.cat(kept).float().cpu() if kept else None)

    def score_each(self, weights: Tensors, models: Mapping[int, Tensors], split: ClientSplit) -> Scores:
        """Score each client's own samples with its own model."""
        owner = self.setup.own_tests() if split == "test" else self.setup.population.owners(split)
        clients, sizes = np.unique(owner, return_counts=True)
        rows_of = np.split(np.argsort(owner, kind="stable"), sizes.cumsum())[:-1]
        own = {client: rows for client, rows in zip(clients.tolist(), rows_of, strict=True) if models.get(client)}
        groups = [(np.flatnonzero(~np.isin(owner, list(own))), {}), *((rows, models[c]) for c, rows in own.items())]
        parts = [(rows, self.score({**weights, **model}, split, only=rows)) for rows, model in groups]
        samples = np.arange(len(owner)) if split == "test" else self.setup.population.rows(split)
        loss = np.zeros(len(owner), np.float32)
        right = np.zeros(len(owner), bool) if self.setup.task.kind == "classification" else None
        outputs = torch.zeros(len(owner), self.setup.task.outputs) if self.setup.experiment.metrics else None
        for rows, scores in parts:
            loss[rows] = scores.loss
            if right is not None:
                right[rows] = scores.right
            if outputs is not None and scores.outputs is not None:
                outputs[torch.from_numpy(rows)] = scores.outputs
        return Scores(loss, right, samples, outputs=outputs)
