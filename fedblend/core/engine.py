"""Work for clients: the task of a round, what training returns, and the engine protocol.

An engine runs tasks on clients and returns results. Where clients run is the engine's business: one after another in
this process, stacked, on other processes, or at real sites.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from fedblend.core.aggregator import Aggregator, LocalWork
from fedblend.core.dataset import ClientSplit, Split
from fedblend.core.objective import ClientPart, Method, ModelSpec, Objective, Term
from fedblend.core.optimizer import Training
from fedblend.core.random import stream
from fedblend.core.setup import Setup, Work, work_of
from fedblend.core.sharing import Payload, Pool
from fedblend.core.state import ClientState
from fedblend.core.trees import Tensors, add_prefix, bytes_of, without
from fedblend.core.upload import all_finite, fault_of


@dataclass(frozen=True)
class TrainTask:
    """One round of local training: what the clients of the cohort begin with."""

    round: int
    """The round, counted from 0."""
    weights: Tensors
    """The global model."""
    pool: Pool | None
    """What clients may mix with; ``None`` where the objective mixes nothing."""
    sizes: np.ndarray
    """Samples that each client of the federation holds in this round, int64 [clients]."""
    global_outputs: Tensors = field(default_factory=dict)
    """Mean outputs by label from the server; empty where there are none."""
    client_states: Mapping[int, ClientState] = field(default_factory=dict)
    """What clients of the cohort keep, by client. A model there replaces the global model and outputs."""
    server_state: Tensors = field(default_factory=dict)
    """What objective and terms keep at the server, by ``SLOT/name``; sent to every client of the cohort."""
    personal: bool = False
    """Whether this task trains the clients' personal models (:class:`fedblend.core.objective.Personal`)."""
    keeps_uploads: bool = False
    """Whether the result has each good upload, for a callback (:attr:`Callback.reads_uploads`) or to refuse some."""

    def state_of(self, client: int) -> ClientState:
        """What a client keeps."""
        return self.client_states.get(client, ClientState())

    def starts_apart(self, client: int) -> bool:
        """Whether a client begins with weights that others do not have: a model, or layers, of its own."""
        kept = self.state_of(client)
        return bool(kept.model or kept.layers)

    def start_of(self, client: int) -> Tensors:
        """The weights that a client begins with."""
        kept = self.state_of(client)
        own = kept.personal if self.personal else {**kept.model, **kept.layers}
        # Nobody keeps frozen tensors beside the global model.
        return {**self.weights, **own} if own else self.weights

    def anchor_of(self, client: int) -> Tensors:
        """The weights that terms measure distances from: the client's first of the round, or the global model."""
        return self.weights if self.personal else self.start_of(client)

    def outputs_of(self, client: int) -> Tensors:
        """The mean outputs by label that a client last received."""
        kept = self.state_of(client)
        return kept.outputs if kept.model else self.global_outputs

    def purpose(self, name: str) -> str:
        """The purpose of a random stream of this task; a personal model draws its own."""
        return f"personal-{name}" if self.personal else name


def client_parts(method: Method) -> dict[str, ClientPart]:
    """The parts of a method that work at clients, by slot: ``objective``, ``terms.0``, ``terms.1``, ..."""
    return {"objective": method.objective, **{f"terms.{i}": term for i, term in enumerate(method.terms)}}


def first_client_state(method: Method, train: Training, spec: ModelSpec, weights: Tensors) -> ClientState:
    """What a client keeps before its first round: its parts' tables, what is personal in the method, and the state of
    its optimiser if ``train`` keeps that.
    """
    personal = method.personal
    own = [n for n in personal.own_layers(spec.model) if n not in spec.frozen] if personal.keeps == "layers" else ()
    # A client's optimiser moves the layers that stay at the client, too.
    moved = [name for name, p in spec.model.named_parameters() if p.requires_grad]
    keys = train.state_keys if train.optimizer_state == "keep" else ()
    parts: dict[str, torch.Tensor] = {}
    for slot, part in client_parts(method).items():
        parts |= add_prefix(f"{slot}/", part.init_client_state(spec, weights))
    return ClientState(
        personal=without(weights, spec.frozen) if personal.active else {},
        layers={name: weights[name] for name in own},
        optimizer={f"{k}/{n}": torch.zeros(() if k == "step" else weights[n].shape) for k in keys for n in moved},
        parts=parts,
    )


def first_server_state(
    method: Method, spec: ModelSpec, weights: Tensors, broadcast: bool = False
) -> dict[str, torch.Tensor]:
    """What parts keep at the server before the first round; with ``broadcast`` only what clients receive of it."""
    state: dict[str, torch.Tensor] = {}
    for slot, part in client_parts(method).items():
        if part.broadcasts or not broadcast:
            state |= add_prefix(f"{slot}/", part.init_server_state(spec, weights))
    return (
        state if broadcast else state | add_prefix("server_step/", method.server_step.init_server_state(spec, weights))
    )


def terms_of(method: Method, task: TrainTask) -> list[tuple[str, Term]]:
    """The terms that a task adds to the objective, with their slots; terms of a personal model keep nothing."""
    if task.personal:
        return [(f"personal.{i}", term) for i, term in enumerate(method.personal.terms())]
    return [(f"terms.{i}", term) for i, term in enumerate(method.terms)]


def objective_of(method: Method, task: TrainTask, plain: bool) -> Objective:
    """What a client minimises in a task; ``plain`` where it has nothing to mix with."""
    chosen: Objective = method.objective.fallback() if plain else method.objective
    return chosen if task.personal else method.personal.objective(chosen)


@dataclass(frozen=True)
class ClientUpdate:
    """What training returns for one client."""

    client: int
    """The client's number."""
    weights: dict[str, torch.Tensor]
    """Weights and buffers after training, by name."""
    samples: int
    """Samples that the client holds."""
    loss: float | None
    """Mean loss over the steps, without terms; ``None`` of a site that does not send it."""
    outputs: torch.Tensor | None = None
    """Mean softmax outputs by label, float32 [C, C], or mean embeddings [C, features], where the upload needs them."""
    state: ClientState = field(default_factory=ClientState)
    """What the client keeps from now on; of an engine's :meth:`~Engine.train`, what parts and its optimiser keep."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    """What parts send beside the model, by ``SLOT/name``."""
    notes: dict[str, torch.Tensor] = field(default_factory=dict)
    """Numbers that parts noted, one a step (:attr:`fedblend.core.context.Context.note`); the loop engine's only."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Shares of the samples in all steps, by name (:attr:`fedblend.core.objective.Objective.measures`)."""


@dataclass(frozen=True)
class Scores:
    """Per-sample results of one set of samples."""

    loss: np.ndarray
    """float32 [n]."""
    right: np.ndarray | None
    """bool [n] in classification, else ``None``."""
    samples: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Rows of the samples in their half of the data set, int64 [n]."""
    owner: np.ndarray | None = None
    """The client that has each sample, int64 [n], where some clients gave no scores."""
    outputs: torch.Tensor | None = None
    """The model's outputs, float32 [n, C] on the CPU, where the experiment has metrics."""
    at_clients: Mapping[int, Mapping[str, float]] | None = None
    """Metrics and ``loss`` by client, where sites computed them and sent no outputs."""
    numbers: np.ndarray | None = None
    """Samples of each client in ``owner``, int64, where sites state numbers only. ``loss`` and ``right`` then have one
    entry a client, and ``right`` is the number of its right samples."""

    @property
    def number(self) -> int:
        """Samples that are scored."""
        return len(self.loss) if self.numbers is None else int(self.numbers.sum())

    @property
    def accuracy(self) -> float | None:
        """The share of right samples; ``None`` without classes."""
        return None if self.right is None else float(self.right.sum() / self.number)


@dataclass
class CohortResult:
    """A cohort's training, collected: what aggregation needs, and why uploads were refused."""

    cohort: list[int] = field(default_factory=list)
    """Clients that trained."""
    lost: Collection[int] = ()
    """Clients of these whose upload did not arrive."""
    work: Mapping[int, Work] = field(default_factory=dict)
    """What each of these made by the deadline."""
    stale: list[int] = field(default_factory=list)
    """Clients whose upload of an earlier round arrived in this one."""
    awaited: Tensors | None = None
    """The uploads that are awaited after the round; ``None`` where these are as before."""
    good: list[tuple[int, int, float | None]] = field(default_factory=list)
    """Client, samples and loss of each good upload; ``None`` where a client does not send its loss."""
    refused: list[dict[str, Any]] = field(default_factory=list)
    """``client`` and ``reason`` of each refused upload."""
    invalid: int = 0
    """Refused uploads that had arrived, and were refused for what they hold."""
    sent: int = 0
    """Bytes of all uploads."""
    seconds: float = 0.0
    """Seconds that training took."""
    partial: Any = None
    """What the aggregator kept of the good uploads."""
    uploads: dict[int, Tensors] = field(default_factory=dict)
    """Good uploads by client, where the task keeps them; where the server step looks at them, this process's own."""
    client_states: dict[int, ClientState] = field(default_factory=dict)
    """What clients keep from now on, by client, where they keep anything."""
    extras: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over the good uploads of what parts sent beside the model, float64, by ``SLOT/name``."""
    each_extras: dict[int, Tensors] = field(default_factory=dict)
    """The same of each good upload by client, where the aggregator takes it or the task keeps uploads."""
    extra_bytes: dict[tuple[str, str], int] = field(default_factory=dict)
    """Bytes of other kinds that went with the uploads, by direction and kind."""
    notes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """What parts noted while the clients trained, by client."""
    measured: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Shares of samples that the objective measured, by client of a good upload, where clients send them."""

    def sum_extras(self, extras: Tensors) -> None:
        """Add one client's extras, or those of another process, to the sums."""
        for name, tensor in extras.items():
            self.extras[name] = self.extras[name] + tensor.double() if name in self.extras else tensor.double()

    def without(self, reasons: Mapping[int, str], aggregator: Aggregator) -> CohortResult:
        """The result if the uploads of these clients had been refused; of a task that keeps uploads."""
        good = [one for one in self.good if one[0] not in reasons]
        refused = [*self.refused, *({"client": client, "reason": why} for client, why in reasons.items())]
        left = replace(
            self,
            good=good,
            refused=sorted(refused, key=lambda one: one["client"]),
            invalid=self.invalid + len(reasons),
            partial=aggregator.partial((self.uploads[c], aggregator.weigh(c, samples)) for c, samples, _ in good),
            extras={},
        )
        for client, _, _ in good if aggregator.works_on != "extras" else ():
            left.sum_extras(self.each_extras.get(client, {}))
        return left


@dataclass(frozen=True)
class Arrived:
    """What arrives of one client's round, before it is checked."""

    update: ClientUpdate
    """What training returned, with what is sent beside the upload; the weights may stay at the client."""
    upload: Tensors
    size: int
    """Bytes of the upload."""
    absent: str | None = None
    """Why nothing arrived."""
    fault: str | None = None
    """What else is wrong with it."""


OnStep = Callable[[str, int, int], Any]
"""Receives what an engine does, how much of it is done, and of how much; 0 of 0 where that is not known."""


def no_step(what: str, done: int, total: int) -> None:
    """Show nothing."""


class Engine(Protocol):
    """Runs tasks on clients. Results come in the order in which the clients were given."""

    def secret_rng(self) -> np.random.Generator | None:
        """Return a secret generator for the server's noise; ``None`` where clients are simulated."""
        ...

    def share(
        self, round: int, weights: Tensors, clients: Iterable[int], sizes: np.ndarray
    ) -> Iterator[tuple[int, Payload | str]]:
        """Have clients share; a client that sends nothing yields nothing, one that failed the reason."""
        ...

    def losses(self, round: int, weights: Tensors, clients: Sequence[int], sizes: np.ndarray) -> dict[int, float | str]:
        """Return the mean loss of a model over each client's samples, or why a client does not state it."""
        ...

    def train(self, task: TrainTask, clients: Sequence[int]) -> Iterator[ClientUpdate]:
        """Train a model on each client from the weights that the task gives it."""
        ...

    def collect(self, task: TrainTask, clients: Sequence[int], lost: Collection[int]) -> CohortResult:
        """Train the clients, check what they send, and keep of it what the aggregator needs.

        ``lost`` are clients whose upload does not arrive.
        """
        ...

    def query(self, question: Tensors) -> Iterator[tuple[int, Payload]]:
        """Put the server step's question to the clients whose uploads the last :meth:`collect` found good."""
        ...

    def score(self, weights: Tensors, split: Split = "test") -> Scores:
        """Score all samples of a split."""
        ...

    def score_each(self, weights: Tensors, models: Mapping[int, Tensors], split: ClientSplit) -> Scores:
        """Score the samples of a split, each with the model of the client that has it.

        ``models`` are by client what stands in place of tensors of ``weights``; other clients' samples have these.
        """
        ...

    def server_model(self) -> nn.Module:
        """Return a module for functional calls with any weights, in evaluation mode, for the server step."""
        ...

    def close(self) -> None:
        """Release other processes, if there are any."""
        ...


def client_rounds(engine: Engine, setup: Setup, task: TrainTask, clients: Sequence[int]) -> Iterator[ClientUpdate]:
    """Yield each client's update after its round, in a simulation and at a site: train the global model, then the
    client's personal one if the method has these; :attr:`ClientUpdate.state` is all that the client keeps.
    """
    has_personal = setup.method.personal.active
    personal = engine.train(replace(task, personal=True), clients) if has_personal else repeat(None)
    for update, own in zip(engine.train(task, clients), personal, strict=False):
        had = task.state_of(update.client)
        model = without(update.weights, setup.frozen) if setup.experiment.keeps_client_weights else {}
        layers = {name: update.weights[name] for name in sorted(setup.own_layers)}
        kept = replace(update.state, model=model, layers=layers, personal=without(update.state.personal, setup.frozen))
        # A client that diverged takes part in later rounds as it would have without this round.
        if kept and not all_finite(kept.to_tensors().values()):
            kept = had
        if own is not None:
            own_model = without(own.weights, setup.frozen)
            kept = replace(kept, personal=own_model if all_finite(own_model.values()) else had.personal)
        yield replace(update, state=kept)


def collect(
    engine: Engine, setup: Setup, task: TrainTask, clients: Sequence[int], lost: Collection[int]
) -> CohortResult:
    """Train clients with an engine of this process, and protect each upload; the rest is :func:`gather_uploads`."""
    result, begun = CohortResult(), setup.shared(task.weights)

    def sent() -> Iterator[Arrived]:
        start = time.perf_counter()
        for update in client_rounds(engine, setup, task, clients):
            result.seconds += time.perf_counter() - start
            upload, extras = protected(setup, task, update)
            size = setup.experiment.protection.sent_bytes(upload, begun)
            yield Arrived(replace(update, extras=extras), upload, size)
            start = time.perf_counter()

    keep = task.keeps_uploads or setup.method.server_step.uses_uploads
    gather_uploads(setup, task, sent(), lost, result, keep)
    return result


def good_uploads(
    sent: Iterable[Arrived], lost: Collection[int], result: CohortResult, fault: Callable[[Arrived], str | None]
) -> Iterator[Arrived]:
    """Count each upload as it comes, and note in ``result`` what its client keeps; pass on those without a fault."""
    for one in sent:
        update, client = one.update, one.update.client
        result.sent += one.size
        if size := bytes_of(update.extras):
            result.extra_bytes["up", "extras"] = result.extra_bytes.get(("up", "extras"), 0) + size
        if update.state:
            result.client_states[client] = update.state
        if update.notes:
            result.notes[client] = update.notes
        if client in lost:
            continue
        if reason := one.absent or fault(one) or one.fault:
            result.refused.append({"client": client, "reason": reason})
            result.invalid += one.absent is None
            continue
        result.good.append((client, update.samples, update.loss))
        if update.measured:
            result.measured[client] = update.measured
        yield one


def gather_uploads(
    setup: Setup, task: TrainTask, sent: Iterable[Arrived], lost: Collection[int], result: CohortResult, keep: bool
) -> None:
    """Give the good uploads to the aggregator as they come; fill ``result``.

    A good upload can be freed at once, unless the aggregator or the result is to ``keep`` it.
    """
    kind, aggregator, begun = setup.method.upload, aggregator_of(setup, task.round), setup.shared(task.weights)
    like, beside = kind.like(begun, setup.task), exchanged(setup.method, task.server_state, up=True)

    def fault(one: Arrived) -> str | None:
        wrong_form = kind.fault(one.upload, begun, setup.task)
        if one.update.extras or beside:
            wrong_form = wrong_form or fault_of(one.update.extras, beside)
        return wrong_form or aggregator.fault(one.upload, begun)

    def uploads() -> Iterator[tuple[dict[str, torch.Tensor], float]]:
        for one in good_uploads(sent, lost, result, fault):
            upload, client = {name: one.upload[name] for name in like}, one.update.client
            if beside:
                extras = {name: one.update.extras[name] for name in beside}
                if keep or aggregator.works_on == "extras":
                    result.each_extras[client] = extras
                if aggregator.works_on != "extras":
                    result.sum_extras(extras)
            if keep:
                result.uploads[client] = {name: tensor.cpu() for name, tensor in upload.items()}
            yield upload, aggregator.weigh(client, one.update.samples)

    result.partial = aggregator.partial(uploads())


def aggregator_of(setup: Setup, round: int, result: CohortResult | None = None) -> Aggregator:
    """The aggregator of a round's uploads; ``result`` says which uploads are good, once known."""
    method, train = setup.method, setup.training
    mu = sum(term.proximal_mu for term in method.terms)
    trained = setup.trained

    def steps_of(client: int, samples: int) -> int:
        batches = work_of(setup, round, client, samples).batches
        return int(method.personal.shared_steps(batches)) * len(method.objective.phases())

    work = LocalWork(steps_of, train.lr_in(round), train.momentum, mu, trained)
    if result is not None:
        good = [(client, samples) for client, samples, _ in result.good]
        work = replace(work, good=good, clients=len(result.cohort), invalid=result.invalid)
    aggregator: Aggregator = method.upload.aggregator(method.aggregator)
    return aggregator.for_round(work)


def exchanged(method: Method, server_state: Tensors, up: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of ``server_state`` that clients receive; with ``up``, those like which clients send others."""
    others = ("nothing", "broadcast") if up else ("nothing",)
    slots = tuple(f"{slot}/" for slot, part in client_parts(method).items() if part.exchanges not in others)
    return {name: t for name, t in server_state.items() if name.startswith(slots)} if slots else {}


def extras_sum(setup: Setup, task: TrainTask, result: CohortResult) -> dict[str, torch.Tensor]:
    """The sum over the good uploads of what parts sent beside the model.

    An aggregator that takes extras sees them as uploads of equal weight that start at 0; its sum is the aggregate times
    their number.
    """
    if result.extras or not result.each_extras:
        return result.extras
    aggregator = aggregator_of(setup, task.round, result)
    each = [result.each_extras[client] for client, _, _ in result.good]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in each[0].items()}
    made = aggregator.finish(aggregator.partial((extras, 1.0) for extras in each), zeros)
    return {name: len(each) * tensor.double() for name, tensor in made.items()}


def protected(
    setup: Setup, task: TrainTask, update: ClientUpdate, secret: np.random.Generator | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a client sends, and what it sends beside it: with the protection on it, or as an adversary makes both.

    A real client draws noise from a ``secret`` generator: everybody knows the run's streams.
    """
    experiment, client, begun = setup.experiment, update.client, setup.shared(task.weights)
    payload = setup.method.upload.payload(setup.shared(update.weights), update.outputs)
    if setup.adversaries[client]:
        return corrupted(setup, task.round, client, payload, begun, update.extras)
    rng = secret or stream(experiment.seed, "protection", task.round, client)
    sent = experiment.protection.protect(payload, begun, setup.training.lr_in(task.round), rng)
    return sent, update.extras


def corrupted(
    setup: Setup, round: int, client: int, payload: Tensors, begun: Tensors, extras: Tensors
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What an adversary makes of an upload and of what goes beside it, which starts at 0."""
    rng = stream(setup.experiment.seed, "adversary", round, client)
    adversary = setup.experiment.adversary
    sent = adversary.corrupt(payload, begun, rng)
    # Tables from a checkpoint or another process are in order of name.
    extras = dict(sorted(extras.items()))
    zeros = {name: torch.zeros_like(tensor) for name, tensor in extras.items()}
    return sent, adversary.corrupt(extras, zeros, rng) if extras else {}
