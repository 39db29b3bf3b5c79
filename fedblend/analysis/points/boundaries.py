"""Decision boundaries of models on data of two features (AggEnhance, Figure 2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import nn

from fedblend.analysis.points.loaded_run import Points, with_weights
from fedblend.analysis.points.training import Tick, TrainingSettings, accuracy, new_model, no_progress, train
from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.setup import Setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory
from fedblend.runs.groups import Group, by_data
from fedblend.runs.predictor import require_one_model

GRID = 160  # Grid points along each axis

MIN_EPOCHS = 100
"""Least number of epochs for the models on one client's samples and on all samples, so that they nearly converge."""

PADDING = 0.05  # Fraction of the data's range that is added on each side


@dataclass(frozen=True)
class Boundary:
    """A model's outputs over the plane."""

    name: str
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
    """Training samples of one client, or of all: ``x`` [n, 2], ``y`` [n], and ``best``, a model trained on them."""

    name: str
    x: np.ndarray
    y: np.ndarray
    best: Boundary


@dataclass(frozen=True)
class Plane:
    """The content of the figure: axes [GRID], names, all samples, the clients' samples, and the runs' models."""

    axes: tuple[np.ndarray, np.ndarray]
    title: str
    classes: tuple[str, ...]
    whole: SampleSet
    clients: list[SampleSet]
    models: list[Boundary]


def plane(runs: Sequence[RunDirectory], most_clients: int = 5, tick: Tick = no_progress) -> Plane:
    """Compute the boundaries of the runs' last models, and of models trained on one client's samples or on all samples.

    The latter have the first run's architecture. They are trained with plain SGD at its learning rate and batch size,
    for the number of a client's epochs in all rounds, at least 100. They show local and centralised training. Clients
    are left out if there are more than ``most_clients``. Only the first seed of a method is used. Raises
    :class:`FedblendError` unless the runs are on one data set, of two features, with classes.
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
    run.require_samples_here()
    setup = run.load_setup()
    shape = tuple(setup.data.train.x.shape[1:])
    if setup.data.kind != "features" or shape != (2,) or not setup.data.classes:
        raise FedblendError(
            f"{run.path}: data set '{setup.data.name}' has {setup.data.kind} of shape {list(shape)}"
            f"{'' if setup.data.classes else ' without classes'}; valid: two features, with classes"
        )
    return setup


def _axes(setup: Setup) -> tuple[np.ndarray, np.ndarray]:
    x = setup.data.train.x
    low, high = x.min(0).values, x.max(0).values
    pad = PADDING * (high - low)
    axes = [np.linspace(float(a), float(b), GRID, dtype=np.float32) for a, b in zip(low - pad, high + pad, strict=True)]
    return axes[0], axes[1]


def _run_boundary(group: Group, run: RunDirectory, axes: tuple[np.ndarray, np.ndarray]) -> Boundary:
    setup, state = _two_feature_setup(run), checkpoint.read(run.path)
    if state is None:
        raise FedblendError(f"{run.path}: no checkpoint yet; run it first")
    require_one_model(setup.experiment, run.path)
    boundary = _model_boundary(group.name, setup, with_weights(setup.model, state.weights), axes)
    points = Points.from_server_state(state.server_part("server_step"))
    if points is None:
        return boundary
    # The unit scale goes from a feature's smallest to its largest training value.
    low, high = (getattr(setup.data.train.x, end)(0).values for end in ("min", "max"))
    x = low + points.x * (high - low)
    return replace(boundary, points=x.numpy(), labels=points.labels.numpy())


def _sample_set(setup: Setup, axes: tuple[np.ndarray, np.ndarray], client: int | None) -> SampleSet:
    """Return one client's samples, or all clients' (``None``), and a model trained on them."""
    population, data, experiment = setup.population, setup.data, setup.experiment
    rows = torch.from_numpy(population.order if client is None else population.indices(client))
    x, y = data.train.x[rows], data.train.y[rows]
    local = experiment.train
    settings = TrainingSettings(max(experiment.rounds * local.epochs, MIN_EPOCHS), local.lr, local.batch_size)
    rng = stream(experiment.seed, "boundary", client=0 if client is None else client + 1)
    model = new_model(setup, "boundary")
    if len(rows):
        train(model, setup.scale(x), y, settings, rng)
    names = population.names(data)
    name = "all clients" if client is None else names[client] if names else f"client {client}"
    return SampleSet(name, x.numpy(), y.numpy(), _model_boundary(name, setup, model.eval(), axes))


@torch.no_grad()
def _model_boundary(name: str, setup: Setup, model: nn.Module, axes: tuple[np.ndarray, np.ndarray]) -> Boundary:
    grid = np.stack(np.meshgrid(*axes), -1).reshape(-1, 2)
    outputs = model(setup.scale(torch.from_numpy(grid)))
    return Boundary(name, accuracy(model, setup), output_margins(outputs).T.reshape(-1, GRID, GRID).numpy())


def output_margins(outputs: torch.Tensor) -> torch.Tensor:
    """Return each class's output minus the largest other output, [n, classes].

    >>> output_margins(torch.tensor([[1.0, 4.0, 2.0], [3.0, 3.0, 0.0]])).tolist()
    [[-3.0, 2.0, -2.0], [0.0, 0.0, -3.0]]
    """
    top = outputs.topk(2, dim=1).values
    best_other = torch.where(outputs == top[:, :1], top[:, 1:], top[:, :1])
    return outputs - best_other
