"""A run as probes see it: its data and clients, its last model, and the points that its server made."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fedblend.core.errors import FedblendError, listed
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.data.scale import Scaler
from fedblend.experiment.setup import make_setup
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, find_runs

CHUNK = 500
"""Samples that go through a model at once."""

POINTS = ("points", "labels", "rounds")
"""What a server step that makes points keeps."""

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Points:
    """Class interior points, in the order in which they were made.

    ``x`` float32 [n, ...] lies in [0, 1], the unit scale of pictures; ``labels`` int64 [n] are the classes;
    ``rounds`` int64 [n] says in which round each was made, counted from 1 as in a run's metrics.
    """

    x: torch.Tensor
    labels: torch.Tensor
    rounds: torch.Tensor

    @staticmethod
    def from_server_state(kept: Mapping[str, torch.Tensor]) -> Points:
        """The points among what a server step keeps, which counts rounds from 0."""
        return Points(kept["points"], kept["labels"], kept["rounds"] + 1)

    def __len__(self) -> int:
        return len(self.labels)

    def made_in(self, round: int) -> Points:
        """The points of one round."""
        return self._where(self.rounds == round)

    def until(self, round: int) -> Points:
        """The points of this round and of all before it."""
        return self._where(self.rounds <= round)

    def all_rounds(self) -> list[int]:
        """The rounds of which there are points, in order."""
        return [int(round) for round in self.rounds.unique()]

    def _where(self, chosen: torch.Tensor) -> Points:
        return Points(self.x[chosen], self.labels[chosen], self.rounds[chosen])


@dataclass(frozen=True)
class LoadedRun:
    """A run that is looked at: its folder, its world, the state of its checkpoint, and its points."""

    directory: RunDirectory
    setup: Setup
    state: RunState
    points: Points

    @property
    def scale(self) -> Scaler:
        """The scale of the model's inputs; points are only made where it is one of numbers."""
        assert isinstance(self.setup.scale, Scaler)
        return self.setup.scale

    def model(self) -> nn.Module:
        """The run's last model, in evaluation mode."""
        return with_weights(self.setup.model, self.state.weights)

    def client_batches(self) -> Batches:
        """All samples of all clients as the model takes them, with their classes: the D of equation 7."""
        return client_batches(self.setup)


def read(path: Path | str) -> LoadedRun:
    """A run with points: a run directory, or a study's folder in which just one run has any.

    Loads the run's data. Raises :class:`FedblendError` if there is no such run, or no run with points.
    """
    directory = _find_run_with_points(Path(path))
    setup = make_setup(directory.experiment())
    state = checkpoint.read(directory.path)
    assert state is not None
    return LoadedRun(directory, setup, state, Points.from_server_state(state.server_part("server_step")))


def with_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """A copy of a model with these weights, in evaluation mode."""
    made = copy.deepcopy(model)
    made.load_state_dict(dict(weights))
    return made.eval()


def client_batches(setup: Setup) -> Batches:
    """All samples that clients train on, a chunk at a time: inputs on the model's scale, and classes."""
    train = setup.data.train
    for rows in torch.from_numpy(setup.population.order).split(CHUNK):
        yield setup.scale(train.x[rows]), train.y[rows]


def has_points(folder: Path) -> bool:
    """Whether a run's checkpoint holds points; they are not read. Raises :class:`FedblendError` if it is damaged."""
    path = folder / checkpoint.NAME
    if not path.is_file():
        return False
    try:
        with safe_open(path, "pt") as file:
            held = set(file.keys())
            return {f"server/server_step/{name}" for name in POINTS} <= held
    except (SafetensorError, OSError) as error:
        raise FedblendError(f"{path}: is not a checkpoint of fedblend or is damaged: {error}") from None


def _find_run_with_points(path: Path) -> RunDirectory:
    runs = find_runs([path])
    holding = [run for run in runs if has_points(run.path)]
    if not holding:
        kept = [run for run in runs if (run.path / checkpoint.NAME).is_file()]
        where = "no checkpoint yet" if not kept else "no points in its checkpoint"
        if len(runs) > 1:
            where = f"none of its {len(runs)} runs holds points"
        raise FedblendError(
            f"{path}: {where}; give a run whose server step makes class interior points, such as one of "
            'method = "aggenhance"'
        )
    if len(holding) > 1:
        names = [run.path.relative_to(path) for run in holding]
        raise FedblendError(f"{path}: several runs hold points; name one: {listed(names)}")
    return holding[0]
