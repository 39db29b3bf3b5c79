"""The points that a server made, as pictures: a row a round, a column a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import SafetensorError, safe_open

from fedblend.analysis.plotting import evenly_spaced, png_data_url
from fedblend.core.errors import FedblendError
from fedblend.runs import checkpoint
from fedblend.runs.groups import Group, Outcome

MOST_ROUNDS = 8
"""Rounds shown of one run, evenly chosen."""

POINT_TENSORS = ("points", "labels", "rounds")


@dataclass(frozen=True)
class Sheet:
    """Points of one run: ``rows`` of (round, a data URL for each class or nothing where it made none)."""

    method: str
    seed: int
    classes: tuple[str, ...]
    rows: list[tuple[int, list[str]]]
    rounds: int
    points: int


def sheets(groups: Sequence[Group]) -> list[Sheet]:
    """A sheet for each method that makes points, of its first seed's run that has any.

    Runs whose points are no images are left out. Raises :class:`FedblendError` if a checkpoint is damaged.
    """
    made = []
    for group in groups:
        found = (_sheet(outcome, group.name) for outcome in group.outcomes)
        made += [sheet for sheet in found if sheet is not None][:1]
    return made


def _sheet(outcome: Outcome, method: str) -> Sheet | None:
    data, path = outcome.facts.get("data", {}), outcome.path / checkpoint.NAME
    if data.get("kind") != "image" or not data.get("classes") or not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            if not {f"server/server_step/{name}" for name in POINT_TENSORS} <= set(file.keys()):
                return None
            points = file.get_slice("server/server_step/points")
            labels, rounds = (file.get_tensor(f"server/server_step/{name}") for name in POINT_TENSORS[1:])
            if list(points.get_shape()[1:]) != list(data["shape"]) or not len(labels):
                return None
            made_in = [int(round) for round in rounds.unique()]
            rows = [
                (round + 1, [_picture(points, labels, rounds, round, c) for c in range(len(data["classes"]))])
                for round in evenly_spaced(made_in, MOST_ROUNDS)
            ]
    except (SafetensorError, OSError) as error:
        raise FedblendError(f"{path}: is not a checkpoint of fedblend or is damaged: {error}") from None
    return Sheet(method, outcome.seed, tuple(data["classes"]), rows, len(made_in), len(labels))


def _picture(points: object, labels: torch.Tensor, rounds: torch.Tensor, round: int, label: int) -> str:
    """The last point of a class that a round made, as a data URL; nothing where there is none."""
    found = torch.nonzero((rounds == round) & (labels == label)).flatten().tolist()
    return png_data_url(points[found[-1]].clamp(0, 1).numpy()) if found else ""  # type: ignore[index]
