"""Attacks that are kept, each in a folder of its own, so that a study of them can be stopped and gone on with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.analysis.attacks.outcome import TABLE, attack_run
from fedblend.analysis.attacks.snapshot import RoundSnapshot
from fedblend.core.engine import TrainTask
from fedblend.experiment.config import Experiment
from fedblend.experiment.setup import make_setup
from fedblend.runs.directory import RunDirectory

IMAGES, CURVE = "images.npz", 50
"""The file of original and rebuilt pictures, and how many points of an attack's costs are kept."""
MEASURES = ("mse", "psnr", "ssim", "cost")


def untrained(experiment: Experiment, path: Path) -> RoundSnapshot:
    """The first round of an experiment that need not have been run; attacks on it would be kept in ``path``."""
    setup = make_setup(experiment)
    return RoundSnapshot(RunDirectory(path), setup, 0, TrainTask(0, setup.weights(), None, setup.sizes(0)), ())


def victims(moment: RoundSnapshot, images: int, number: int) -> list[int]:
    """The first clients that hold a batch; the same for all methods, since the split is."""
    return np.flatnonzero(moment.task.sizes >= images)[:number].tolist()


def attacked(folder: Path, moment: RoundSnapshot, client: int, **settings: Any) -> dict[str, Any]:
    """One attack's table, with its costs: the one that is kept in a folder, or a new one's."""
    if not is_kept(folder):
        made = attack_run(moment, moment.round, client, **settings)
        if made.rebuilt.stopped:
            raise KeyboardInterrupt
        scale, order = moment.setup.scale, torch.from_numpy(made.likeness.rebuilt)
        folder.mkdir(parents=True, exist_ok=True)
        pictures = {"original": scale.to_unit(made.scene.x), "rebuilt": scale.to_unit(made.rebuilt.x[order])}
        np.savez(folder / IMAGES, **{name: x.detach().numpy() for name, x in pictures.items()})
        np.save(folder / "curve.npy", made.rebuilt.curve)
        made.write(folder)  # last, since its table says that the attack is kept
    return table_of(folder)


def is_kept(folder: Path) -> bool:
    """Whether an attack is there."""
    return (folder / TABLE).is_file()


def table_of(folder: Path) -> dict[str, Any]:
    """The table of an attack that is kept, with its costs."""
    table: dict[str, Any] = json.loads((folder / TABLE).read_text(encoding="utf-8"))
    return table | {"curve": _thinned(np.load(folder / "curve.npy"))}


def pictures(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The original pictures of an attack that is kept, and beside each what was rebuilt of it: [B, C, H, W] both."""
    with np.load(folder / IMAGES) as arrays:
        return arrays["original"], arrays["rebuilt"]


def means(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over clients, and of several the standard error; an image rebuilt to the last bit would have no PSNR."""
    row: dict[str, Any] = {"clients": [table["client"] for table in tables]}
    for measure in MEASURES:
        values = np.array([table[measure] for table in tables], float)
        row[measure] = round(float(values.mean()), 5)
        if len(values) > 1:
            row[f"{measure}_error"] = round(float(values.std(ddof=1) / np.sqrt(len(values))), 5)
    return row


def _thinned(curve: np.ndarray) -> list[list[float]]:
    """Iterations and costs, evenly chosen, the last among them."""
    chosen = np.unique(np.linspace(0, len(curve) - 1, CURVE).round().astype(int))
    return [[int(k), round(float(curve[k]), 6)] for k in chosen]
