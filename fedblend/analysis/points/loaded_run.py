"""A run loaded for measurements: data and clients, last model, and class interior points."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from fedblend.core.context import Scale
from fedblend.core.errors import FedblendError, listed
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, find_runs

CHUNK = 500  # Samples in one forward pass
TENSORS = ("points", "labels", "rounds")  # Tensors in the state of a server step that generates points

IN_FILE = {name: f"server/server_step/{name}" for name in TENSORS}  # Their names in a checkpoint

Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Points:
    """Class interior points, in the order of their generation.

    ``x`` float32 [n, ...] is in [0, 1], the unit scale of images; ``labels`` int64 [n] are the classes; ``rounds``
    int64 [n] are the rounds of generation, from 1 as in a run's metrics.
    """

    x: torch.Tensor
    labels: torch.Tensor
    rounds: torch.Tensor

    @staticmethod
    def from_server_state(state: Mapping[str, torch.Tensor]) -> Points | None:
        """Return the points in a server step's state, which counts rounds from 0; ``None`` if it has none."""
        if not set(TENSORS) <= set(state):
            return None
        return Points(state["points"], state["labels"], state["rounds"] + 1)

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, scale: Scale) -> Batches:
        """Return the points in chunks: inputs on the model's scale, and classes."""
        return chunks(scale.from_unit(self.x), self.labels)

    def made_in(self, round: int) -> Points:
        return self._where(self.rounds == round)

    def until(self, round: int) -> Points:
        """Return the points of this round and of all earlier ones."""
        return self._where(self.rounds <= round)

    def all_rounds(self) -> list[int]:
        """Return the rounds that have points, in order."""
        return [int(round) for round in self.rounds.unique()]

    def _where(self, chosen: torch.Tensor) -> Points:
        return Points(self.x[chosen], self.labels[chosen], self.rounds[chosen])


@dataclass(frozen=True)
class LoadedRun:
    """A run: its folder, its setup, the state of its checkpoint, and its points."""

    directory: RunDirectory
    setup: Setup
    state: RunState
    points: Points

    @property
    def removes_points(self) -> bool:
        """Whether the server step's ``keep`` may have removed points, of which the checkpoint then tells nothing."""
        keep = getattr(self.setup.experiment.method.server_step, "keep", None)
        return keep is not None and len(self.points) >= keep

    def model(self) -> nn.Module:
        return with_weights(self.setup.model, self.state.weights)


def read(path: Path | str) -> LoadedRun:
    """Load a run with points from a run directory, or from a study's folder with just one such run.

    The run's data are loaded, too. Raises :class:`FedblendError` if there is no such run, or no run with points.
    """
    directory = _find_run_with_points(Path(path))
    directory.require_samples_here()
    setup = directory.load_setup()
    state = checkpoint.read(directory.path)
    assert state is not None
    points = Points.from_server_state(state.server_part("server_step"))
    assert points is not None
    return LoadedRun(directory, setup, state, points)


def with_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a copy of a model with these weights, in evaluation mode."""
    copied = copy.deepcopy(model)
    copied.load_state_dict(dict(weights))
    return copied.eval()


def chunks(x: torch.Tensor, y: torch.Tensor) -> Batches:
    """Split samples and classes into chunks."""
    return zip(x.split(CHUNK), y.split(CHUNK), strict=True)


def client_batches(setup: Setup) -> Batches:
    """Yield all clients' training samples in chunks, the D of equation 7: inputs on the model's scale, and classes."""
    train = setup.data.train
    for rows in torch.from_numpy(setup.population.order).split(CHUNK):
        yield setup.scale(train.x[rows]), train.y[rows]


def has_points(folder: Path) -> bool:
    """Return whether a run's checkpoint has points. Raises :class:`FedblendError` if it is damaged."""
    with checkpoint.opened(folder) as file:
        return file is not None and set(IN_FILE.values()) <= set(file.keys())


def _find_run_with_points(path: Path) -> RunDirectory:
    runs = find_runs([path])
    with_points = [run for run in runs if has_points(run.path)]
    if not with_points:
        kept = [run for run in runs if (run.path / checkpoint.NAME).is_file()]
        where = "no checkpoint yet" if not kept else "no points in its checkpoint"
        if len(runs) > 1:
            where = f"none of its {len(runs)} runs holds points"
        raise FedblendError(
            f"{path}: {where}; give a run whose server step generates class interior points, such as one of "
            'method = "aggenhance"'
        )
    if len(with_points) > 1:
        names = [run.path.relative_to(path) for run in with_points]
        raise FedblendError(f"{path}: several runs hold points; name one: {listed(names)}")
    return with_points[0]
