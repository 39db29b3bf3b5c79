"""Where models draw the line between classes, for data of two features (AggEnhance, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedblend.analysis.points.loaded_run import Points, with_weights
from fedblend.analysis.points.training import Tick, accuracy, new_model, no_progress, train
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.experiment.setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, by_data

GRID = 160
"""Places along each axis at which a model is asked."""

MIN_EPOCHS = 100
"""Epochs that the models on a client's samples and on all at once are trained for at least, to come near their best."""

PADDING = 0.05
"""Share of the data's span that is added on each side."""


@dataclass(frozen=True)
class Boundary:
    """A model's outputs over the plane."""

    name: str
    """The name of the model in a legend."""
    accuracy: float
    """Test accuracy, from 0 to 1."""
    margin: np.ndarray
    """Each class's output minus the largest other output, float32 [classes, GRID, GRID]; 0 on the class's boundary."""
    points: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.float32))
    """Class interior points of the run's server [n, 2], in the data's units; empty if it generates none."""
    labels: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Classes of the points, int64 [n]."""


@dataclass(frozen=True)
class SampleSet:
    """Training samples of one client, or of all: ``x`` [n, 2], ``y`` [n], and the model trained on just these."""

    name: str
    x: np.ndarray
    y: np.ndarray
    best: Boundary


@dataclass(frozen=True)
class Plane:
    """What is drawn: the axes [GRID], the names of features and classes, all samples, each client's, and the models."""

    axes: tuple[np.ndarray, np.ndarray]
    title: str
    classes: tuple[str, ...]
    whole: SampleSet
    clients: list[SampleSet]
    models: list[Boundary]


def plane(runs: Sequence[RunDirectory], most_clients: int = 5, tick: Tick = no_progress) -> Plane:
    """The boundaries of the runs' last models, and of models trained on one client's samples or on all at once.

    The latter are of the first run's architecture, trained by plain SGD at its learning rate and batch size, for as
    many epochs as a client makes in all rounds and for 100 at least: what the clients could have done alone, or by
    giving their samples away. Clients are left out where there are more than ``most_clients``. Of several seeds the
    first is shown. Raises :class:`FedblendError` unless the runs are on one data set, of two features, with classes.
    """
    sets = by_data(runs)
    if len(sets) > 1:
        raise FedblendError(f"boundaries: the runs are on several data sets ({', '.join(sets)}); name runs on one")
    shown = [(g, RunDirectory(g.outcomes[0].path)) for g in next(iter(sets.values()))]
    first = _two_feature_setup(shown[0][1])
    axes = _axes(first)
    models = [_run_boundary(g, run, axes) for g, run in shown]
    count = len(first.population)
    wanted = [None, *(range(count) if count <= most_clients else ())]
    holdings = []
    for done, client in enumerate(wanted):
        tick(done, len(wanted))
        holdings.append(_sample_set(first, axes, client))
    return Plane(axes, first.data.name, first.data.classes, holdings[0], holdings[1:], models)


def _two_feature_setup(run: RunDirectory) -> Setup:
    setup = make_setup(run.experiment())
    shape = tuple(setup.data.train.x.shape[1:])
    if setup.data.kind != "features" or shape != (2,) or not setup.data.classes:
        raise FedblendError(
            f"{run.path}: its data set '{setup.data.name}' holds {setup.data.kind} of shape {list(shape)}"
            f"{'' if setup.data.classes else ' without classes'}; boundaries are drawn for classes of two features"
        )
    return setup


def _axes(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    x = setup.data.train.x
    low, high = x.min(0).values, x.max(0).values
    pad = PADDING * (high - low)
    made = [np.linspace(float(a), float(b), GRID, dtype=np.float32) for a, b in zip(low - pad, high + pad, strict=True)]
    return made[0], made[1]


def _run_boundary(group: Group, run: RunDirectory, axes: tuple[np.ndarray, np.ndarray]) -> Boundary:
    setup, state = _two_feature_setup(run), checkpoint.read(run.path)
    if state is None:
        raise FedblendError(f"{run.path}: no checkpoint yet; run it first")
    boundary = _model_boundary(group.name, setup, with_weights(setup.model, state.weights), axes)
    if "points" not in state.server_part("server_step"):
        return boundary
    points = Points.from_server_state(state.server_part("server_step"))
    # The unit scale goes from a feature's smallest to its largest training value.
    low, high = (getattr(setup.data.train.x, end)(0).values for end in ("min", "max"))
    x = low + points.x * (high - low)
    return Boundary(boundary.name, boundary.accuracy, boundary.margin, x.numpy(), points.labels.numpy())


def _sample_set(setup: Setup, axes: tuple[np.ndarray, np.ndarray], client: int | None) -> SampleSet:
    """One client's samples, or all clients' (``None``), and the best model on them."""
    population, data, settings = setup.population, setup.data, setup.experiment
    rows = torch.from_numpy(population.order if client is None else population.indices(client))
    x, y = data.train.x[rows], data.train.y[rows]
    local = settings.train
    epochs = max(settings.rounds * local.epochs, MIN_EPOCHS)
    rng = stream(settings.seed, "boundary", client=0 if client is None else client + 1)
    model = new_model(setup, "boundary")
    if len(rows):
        train(model, setup.scale(x), y, epochs, local.lr, local.batch_size, rng)
    name = "all clients" if client is None else _client_name(setup, client)
    return SampleSet(name, x.numpy(), y.numpy(), _model_boundary(name, setup, model.eval(), axes))


def _client_name(setup: Setup, client: int) -> str:
    natural, names = setup.natural_clients(), setup.data.client_names
    return names[int(natural[client])] if natural is not None and names else f"client {client}"


@torch.no_grad()
def _model_boundary(name: str, setup: Setup, model: nn.Module, axes: tuple[np.ndarray, np.ndarray]) -> Boundary:
    places = np.stack(np.meshgrid(*axes), -1).reshape(-1, 2)
    outputs = model(setup.scale(torch.from_numpy(places)))
    return Boundary(name, accuracy(model, setup), output_margins(outputs).T.reshape(-1, GRID, GRID).numpy())


def output_margins(outputs: torch.Tensor) -> torch.Tensor:
    """By how much each class's output is above the largest of the others, [n, classes].

    >>> lead_of(torch.tensor([[1.0, 4.0, 2.0]])).tolist()
    [[-3.0, 2.0, -2.0]]
    """
    top = outputs.topk(2, dim=1).values
    best_other = torch.where(outputs == top[:, :1], top[:, 1:], top[:, :1])
    return outputs - best_other
