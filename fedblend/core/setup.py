"""What stays the same in all rounds of a run: the experiment, its data and clients, the model and its scale."""

# The fields of Experiment are explained in fedblend/experiment/config.py.

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

from fedblend.core.columns import column
from fedblend.core.context import ModelSpec, Scale, Task
from fedblend.core.dataset import Dataset, Population
from fedblend.core.errors import FedblendError, listed
from fedblend.core.module import frozen_names, same_tensors
from fedblend.core.random import stream
from fedblend.core.selection import Selection, SelectionContext
from fedblend.core.sharing import Pool, Request, ServerSide, rows_of
from fedblend.core.trees import Tensors, digest_of, without

if TYPE_CHECKING:
    from fedblend.core.channel import Channel
    from fedblend.core.metric import Metric
    from fedblend.core.objective import Method
    from fedblend.core.optimizer import Training
    from fedblend.core.protection import Adversary, Protection
    from fedblend.core.record import RoundLog


class Experiment(Protocol):
    """An experiment: a method, how clients train, and what is around them."""

    seed: int
    rounds: int
    method: Method
    train: Training
    model: Any
    selection: Selection
    channel: Channel
    protection: Protection
    adversary: Adversary
    policy: Any
    arrival: Any
    slow: Any
    validation: Any
    metrics: Sequence[Metric]
    target: Any
    target_metric: str
    stop_at_target: bool
    start: str | None
    min_uploads: int
    eval_every: int
    compute_seconds: float | None
    convergence_tol: float | None
    begins_at_clients: bool
    keeps_client_weights: bool
    evaluates_device: bool
    evaluates_each: bool


@dataclass(frozen=True)
class Setup:
    """What stays the same in all rounds of a run. Any process can make it again from the experiment.

    ``experiment`` is an :class:`fedblend.experiment.config.Experiment`. The core reads its fields and imports no
    configuration.
    """

    experiment: Any
    """The experiment's fields."""
    data: Dataset
    """The data set, with a training and a test half."""
    population: Population
    """Which client holds which training samples."""
    scale: Scale
    """What turns stored samples into inputs."""
    model: nn.Module
    """The model with its first weights."""
    task: Task
    """What is predicted, with its loss."""
    own: tuple[torch.Tensor, torch.Tensor] | None = None
    """Samples (x, y) of a server with data of its own, if the clients' samples lie at real sites."""
    folder: Path | None = None
    """The run's folder, for callbacks that write files; ``None`` where no run is kept."""

    @functools.cached_property
    def method(self) -> Method:
        """The experiment's method."""
        return self.experiment.method

    @functools.cached_property
    def training(self) -> Training:
        """How the experiment's clients train."""
        return self.experiment.train

    def weights(self) -> dict[str, torch.Tensor]:
        """A copy of the model's weights and buffers, by name."""
        return {name: tensor.detach().clone() for name, tensor in self.model.state_dict().items()}

    def sizes(self, round: int) -> np.ndarray:
        """Samples that each client holds at the start of a round, int64 [clients]."""
        full = self.population.sizes
        arrival = self.experiment.arrival
        return full if arrival is None else arrived(full, arrival, self._portions.before(round))

    @functools.cached_property
    def _portions(self) -> Portions:
        experiment = self.experiment
        assert experiment.arrival is not None
        return Portions(len(self.population), experiment.arrival.clients, experiment.seed)

    @functools.cached_property
    def adversaries(self) -> np.ndarray:
        """Which clients are adversaries, bool [clients]."""
        experiment = self.experiment
        return experiment.adversary.among(len(self.population), stream(experiment.seed, "adversaries"))

    def prior(self, per_class: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Up to ``per_class`` of the clients' training samples of each class as stored, the same in every round."""
        held = np.sort(self.population.order)
        labels = self.data.train.y.numpy()[held]
        order = np.lexsort((stream(self.experiment.seed, "prior").random(len(labels)), labels))
        place = np.arange(len(labels)) - np.searchsorted(labels[order], labels[order])
        rows = torch.from_numpy(held[order[place < per_class]])
        return self.data.train.x[rows], self.data.train.y[rows]

    def base(self, sizes: np.ndarray) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The samples (x, y) of the client that is the server, as stored; ``None`` where the server has no data.

        Raises :class:`FedblendError` if there is no such client, or if it holds nothing.
        """
        server = self.method.sharing.server
        if server is None:
            return None
        if server >= len(sizes) or not self.population.sizes[server]:
            why = "it holds no samples" if server < len(sizes) else f"there are {len(sizes)} clients"
            raise FedblendError(
                f"method.sharing.server: {server}: {why}; valid: a client that holds samples, to be the server, "
                f"such as {int(self.population.sizes.argmax())}"
            )
        size = int(sizes[server])
        return self.samples(server, size) if self.own is None else (self.own[0][:size], self.own[1][:size])

    def requests(self, sizes: np.ndarray) -> dict[int, Request]:
        """The server's requests by client."""
        rng = stream(self.experiment.seed, "requests")
        return self.method.sharing.requests(self._server_side(model_spec(self, self.model), sizes, rng))

    def pool(self, spec: ModelSpec, entries: Pool, sizes: np.ndarray, rng: np.random.Generator) -> Pool:
        """What the server makes of ``entries``; ``sizes`` int64 [clients] are the samples of clients as they shared."""
        return self.method.sharing.make_pool(entries, self._server_side(spec, sizes, rng))

    def _server_side(self, spec: ModelSpec, sizes: np.ndarray, rng: np.random.Generator) -> ServerSide:
        return ServerSide(spec, np.flatnonzero(sizes), self.base(sizes), lambda: self.labels_held(sizes), rng)

    def pool_for_clients(self, pool: Pool) -> Pool:
        """What clients may receive of a pool: all but the samples of a server with data of its own."""
        method = self.method
        if method.sharing.server is None or not method.objective.needs:
            return pool
        return rows_of(pool, pool.owner != method.sharing.server)

    def labels_held(self, sizes: np.ndarray) -> np.ndarray:
        """Which labels each client has among its first ``sizes`` samples, bool [clients, C].

        Raises :class:`FedblendError` where samples have no labels, or lie at the clients' own sites.
        """
        population, labels = self.population, self.data.train.y.numpy()
        if population.elsewhere or self.task.kind != "classification":
            why = "clients are real sites" if population.elsewhere else "the data have no labels"
            raise FedblendError(f"method.sharing.coordinated: true, but {why}; valid: false")
        owner = population.owners()
        known = np.arange(len(owner)) - population.offsets[owner] < sizes[owner]
        held = np.zeros((len(sizes), self.task.outputs), bool)
        held[owner[known], labels[population.order[known]]] = True
        return held

    def samples(self, client: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first ``size`` samples of a client, as stored."""
        rows = torch.from_numpy(self.population.indices(client)[:size])
        return self.data.train.x[rows], self.data.train.y[rows]

    @functools.cached_property
    def own_layers(self) -> frozenset[str]:
        """Names of the tensors of the model that stay at clients (:meth:`Personal.own_layers`).

        Raises :class:`FedblendError` where all that is trained would stay there.
        """
        personal = self.method.personal
        own = frozenset(personal.own_layers(self.model)) - self.frozen if personal.keeps == "layers" else frozenset()
        if own >= {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}:
            raise FedblendError(
                f"method.personal: '{personal.name}' keeps all trained layers of the model "
                f"'{self.experiment.model.name}' at clients, so that nothing would be learned together; valid: fewer "
                "layers, or a model with more layers that are trained"
            )
        for name, first in self.twins.items():
            if (name in own) != (first in own):
                raise FedblendError(
                    f"method.personal: '{personal.name}' keeps one of '{first}' and '{name}' at clients and shares the "
                    "other, but they are one tensor; valid: layers that share no weights with others"
                )
        return own

    @functools.cached_property
    def trained(self) -> list[str]:
        """Names of the tensors that clients train and send."""
        parameters = self.model.named_parameters()
        return [name for name, p in parameters if p.requires_grad and name not in self.own_layers]

    @functools.cached_property
    def twins(self) -> dict[str, str]:
        """Further names of the model's tensors that layers share, each with the tensor's first name."""
        return same_tensors(self.model)

    def tied(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """``weights`` with one value for each tensor that layers share, that of its first name, which is trained."""
        return {name: weights[self.twins.get(name, name)] for name in weights}

    @functools.cached_property
    def frozen(self) -> frozenset[str]:
        """Names of the model's tensors that nobody trains (:func:`fedblend.core.module.frozen_names`)."""
        return frozen_names(self.model) & self.model.state_dict().keys()

    def frozen_digest(self, weights: Tensors) -> str:
        """The digest of the frozen tensors of ``weights``, which all sites must have; empty without such tensors."""
        return digest_of({name: weights[name] for name in self.frozen}) if self.frozen else ""

    @functools.cached_property
    def _stays(self) -> frozenset[str]:
        return self.own_layers | self.frozen | self.twins.keys()

    def shared(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """The tensors of a model that clients and server send each other.

        Clients' own layers and frozen tensors stay where they are, and of a tensor that layers share its first name is
        sent.
        """
        return without(weights, self._stays)

    def own_tests(self) -> np.ndarray:
        """The client of each sample that clients hold out or, where they hold none out, of each test sample, int64 [n].

        Raises :class:`FedblendError` where there are no such samples, or test samples belong to no client of the run.
        """
        population, of = self.population, self.data.test.client
        if len(population.held_order):
            return population.owners("holdout")
        if population.natural is None or of is None or not np.isin(of, population.natural).all():
            raise FedblendError(
                "evaluate_model: 'each' needs test samples that all belong to a client of the run; valid with holdout "
                "(such as 0.2), or with data that have clients of their own, all of which the partition 'natural' takes"
            )
        return population.places_of(of)

    def transmit(
        self, direction: str, purpose: str, sizes: np.ndarray, clients: np.ndarray, round: int, log: RoundLog
    ) -> np.ndarray:
        """Which of the transmissions of ``sizes`` bytes arrive, bool [n]; counts the seconds of the slowest."""
        experiment = self.experiment
        sent = experiment.channel.transmit(direction, sizes, stream(experiment.seed, purpose, round), clients)
        log.wait(direction, float(sent.seconds.max(initial=0.0)))
        return np.asarray(sent.arrives)

    def label_counts(self, client: int, size: int) -> np.ndarray | None:
        """Samples of each class among a client's first ``size``, int64 [C]; ``None`` where there are no classes."""
        if self.task.kind != "classification":
            return None
        labels = self.data.train.y.numpy()[self.population.indices(client)[:size]]
        return np.bincount(labels, minlength=self.task.outputs)


def model_spec(setup: Setup, model: nn.Module) -> ModelSpec:
    """Return what server and clients both know of the model; ``model`` is a module for functional calls."""
    return ModelSpec(
        model=model,
        trained=setup.trained,
        frozen=setup.frozen,
        shape=tuple(setup.data.train.x.shape[1:]),
        scale=setup.scale,
        task=setup.task,
        bounded=setup.data.kind == "text" or setup.data.train.x.dtype == torch.uint8,
        device=setup.experiment.device,
    )


class Portions:
    """Numbers of further portions of data that each client has received (table ``arrival`` of an experiment).

    They follow from the keyed draws of all earlier rounds, so that a resumed run needs no state. Later rounds are
    counted on from the last one.
    """

    def __init__(self, clients: int, probability: float, seed: int) -> None:
        self.probability, self.seed = probability, seed
        self.round, self.times = 0, np.zeros(clients, np.int64)

    def before(self, round: int) -> np.ndarray:
        """Portions that each client has received when a round begins, int64 [clients]."""
        if round < self.round:
            self.round, self.times = 0, np.zeros_like(self.times)
        for past in range(self.round + 1, round + 1):
            self.times = self.times + (stream(self.seed, "arrival", past).random(len(self.times)) < self.probability)
        self.round = round
        return self.times


def arrived(full: np.ndarray, arrival: Any, portions: np.ndarray) -> np.ndarray:
    """How many of its ``full`` samples each client has after so many portions; at least one, if it has any."""
    share = np.minimum(1.0, arrival.first + arrival.portion * portions)
    # Rounded first, or 0.1 + 2 * 0.1 of ten samples would be four.
    return np.maximum(np.ceil(np.round(share * full, 6)).astype(np.int64), np.minimum(full, 1))


def cohort_of(
    setup: Setup,
    round: int,
    state: Tensors | None = None,
    losses: Callable[[np.ndarray], np.ndarray] | None = None,
    busy: Collection[int] = (),
) -> np.ndarray:
    """The clients of a round, in order, int64: the choice of the experiment's selection among those that hold samples.

    All of these where they are fewer than a cohort, as real sites with data of their own may be. ``state`` is what the
    selection keeps (default: its first table), and ``losses`` asks clients for them. Clients that are ``busy`` with a
    late upload take no part. Raises :class:`FedblendError` if the selection chooses others.
    """
    selection, clients = setup.experiment.selection, np.flatnonzero(setup.population.sizes)
    clients = clients[~np.isin(clients, [*busy])] if busy else clients
    table = selection.init_state(len(setup.population)) if state is None else state
    rng, number = stream(setup.experiment.seed, "cohort", round), min(setup.training.cohort, len(clients))
    asked = losses or (lambda candidates: np.full(len(candidates), np.nan))
    context = SelectionContext(round, clients, number, setup.sizes(round), table, rng, asked)
    chosen = np.sort(np.asarray(selection.choose(context), np.int64))
    if len(np.unique(chosen)) < len(chosen) or not np.isin(chosen, clients).all():
        told = f"chose {listed(chosen.tolist())} in round {round + 1}"
        raise FedblendError(f"selection: '{selection.name}' {told}; valid: different clients of context.clients")
    return chosen


@dataclass(frozen=True)
class Work:
    """A client's training in a round."""

    batches: int
    """Batches that it makes."""
    is_late: bool = False
    """Whether it misses the deadline with some of its batches."""
    delay: int | None = 0
    """Rounds after its own in which its upload arrives; ``None`` if it never does."""
    seconds: float = 0.0
    """Seconds of computing for which the round waits, where the experiment states how long batches take."""


def work_of(setup: Setup, round: int, client: int, samples: int) -> Work:
    """A client's training on so many samples. It depends on no other client, and on nothing that a run keeps."""
    slow, train = setup.experiment.slow, setup.training
    full, passes = train.batches_of(samples), train.steps or train.epochs
    if slow is None or not full:
        return Work(full)
    rng, end = stream(setup.experiment.seed, "slow", round, client), slow.deadline or math.inf
    pace, seconds = math.inf, 0.0  # pace: batches until the deadline
    if rng.random() < slow.share:
        pace = full * int(rng.integers(1, passes, endpoint=True)) / passes
    if slow.epochs is not None:
        pace = min(pace, full * float(column(slow.epochs)[client]) / passes)
    if slow.seconds is not None:
        seconds = float(column(slow.seconds)[client])
        pace = min(pace, end / seconds)
    # Rounded first, or 0.3 seconds would have room for two batches of 0.1.
    in_time = math.floor(round_off(min(full, pace)))
    made = in_time if slow.late == "partial" else full
    if in_time == full:
        return Work(full, seconds=seconds * full)
    delay = 0 if slow.late == "partial" and made else None
    if slow.late == "next-round":
        delay = math.ceil(round_off(full / pace)) - 1
    return Work(made, True, delay, min(seconds * full, end))


def round_off(quotient: float) -> float:
    """A quotient without the rounding error of the division."""
    return round(quotient, 9)


def reference_device(setup: Setup) -> int:
    """The client whose model is evaluated if clients keep their own: one of the first cohort, drawn by the seed.

    A client outside of the first cohort would have an untrained model until it is drawn. Raises :class:`FedblendError`
    where the first cohort is empty, or known only once clients have sent losses.
    """
    if not len(first := cohort_of(setup, 0)):
        raise FedblendError(
            f"selection: '{setup.experiment.selection.name}' leaves open which clients are in the first round, one of "
            'which is evaluated (evaluate_model: device); valid: evaluate_model = "each", or uniform'
        )
    return int(stream(setup.experiment.seed, "device").choice(first))
