"""Class interior points as images: one row for each round, one column for each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedblend.analysis.plotting import evenly_spaced, png_data_url
from fedblend.analysis.points.loaded_run import IN_FILE
from fedblend.runs import checkpoint
from fedblend.runs.groups import Group, Outcome

MOST_ROUNDS = 8  # Largest number of rounds for one run, evenly spaced


@dataclass(frozen=True)
class Sheet:
    """Points of one run: ``rows`` of (round, data URLs by class; empty for a class without a point)."""

    method: str
    seed: int
    classes: tuple[str, ...]
    rows: list[tuple[int, list[str]]]
    rounds: int
    points: int
    kept: bool = False
    """Whether the run may have removed its oldest points."""

    @property
    def size(self) -> int:
        """Bytes of the images on a page."""
        return sum(len(url) for _, urls in self.rows for url in urls)


def sheets(groups: Sequence[Group]) -> list[Sheet]:
    """Return a sheet for each method with points, from its first seed that has any.

    Runs whose points are not images are left out. Raises :class:`FedblendError` if a checkpoint is damaged.
    """
    found = []
    for group in groups:
        candidates = (_sheet(outcome, group.name) for outcome in group.outcomes)
        found += [sheet for sheet in candidates if sheet is not None][:1]
    return found


def _sheet(outcome: Outcome, method: str) -> Sheet | None:
    data = outcome.facts.get("data", {})
    if data.get("kind") != "image" or not data.get("classes"):
        return None
    with checkpoint.opened(outcome.path) as file:
        if file is None or not set(IN_FILE.values()) <= set(file.keys()):
            return None
        points = file.get_slice(IN_FILE["points"])
        labels, rounds = (file.get_tensor(IN_FILE[name]) for name in ("labels", "rounds"))
        if list(points.get_shape()[1:]) != list(data["shape"]) or not len(labels):
            return None
        point_rounds = [int(round) for round in rounds.unique()]
        rows = [
            (round + 1, [_picture(points, labels, rounds, round, c) for c in range(len(data["classes"]))])
            for round in evenly_spaced(point_rounds, MOST_ROUNDS)
        ]
    step = outcome.config["method"].get("server_step")
    keep = step.get("keep") if isinstance(step, dict) else None
    kept = isinstance(keep, int) and len(labels) >= keep
    return Sheet(method, outcome.seed, tuple(data["classes"]), rows, len(point_rounds), len(labels), kept)


def _picture(points: Any, labels: torch.Tensor, rounds: torch.Tensor, round: int, label: int) -> str:
    """Return the last point of a class in a round as a data URL; empty without a point."""
    found = torch.nonzero((rounds == round) & (labels == label)).flatten().tolist()
    return png_data_url(points[found[-1]].clamp(0, 1).numpy()) if found else ""
