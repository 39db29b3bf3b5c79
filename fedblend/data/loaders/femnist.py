"""FEMNIST: handwritten characters by writer, in LEAF's JSON or as one NumPy archive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.emnist import ALL
from fedblend.data.loaders.files import data_folder, existing
from fedblend.data.loaders.leaf import is_leaf, read_halves
from fedblend.data.loaders.npz import Npz
from fedblend.data.loaders.places import Home

SIDE = 28
PIXELS = SIDE * SIDE

HOME = Home(
    name="femnist",
    files=("train/*.json", "test/*.json"),
    folders=("femnist", "leaf/femnist", "femnist/data"),
    address="https://github.com/TalwalkarLab/leaf (data/femnist/preprocess.sh -s niid -t sample)",
    option="path",
)
ARCHIVE = "femnist.npz"
ORIGIN = "Caldas et al. 2018: LEAF, FEMNIST (NIST Special Database 19, public domain)"


@part("dataset", "femnist")
class Femnist:
    """FEMNIST: handwritten digits and letters, 28 x 28, 62 classes, each writer a client (LEAF, Caldas et al. 2018).

    ``path`` is LEAF's folder with ``train/*.json`` and ``test/*.json``, or an archive with arrays x, y, client and
    split (as the data set ``npz`` reads it). Without it ``$FEDBLEND_DATA/femnist.npz`` is taken, or the folder
    ``femnist`` or ``leaf/femnist`` there. Paper is white: 255, or 1.0 in LEAF, whose values are rounded to steps of
    1/255 (as which they were scanned). The partition ``natural`` gives the writers; their names are ``client_names``.
    Raises :class:`FedblendError` that names the file for what is damaged or no such data.
    """

    path: FilePath | None = None
    """LEAF's folder, or an .npz file; without it one is looked for under $FEDBLEND_DATA."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 1, 28, 28], y int64 [n], ``client`` the writer."""
        place = existing(self.path, "data.path") if self.path is not None else _usual()
        return _archive(place) if place.is_file() else _folder(place)


def _usual() -> Path:
    """Where the data lie under $FEDBLEND_DATA. Raises, with their address, if they do not."""
    base = data_folder()
    if base and (base / ARCHIVE).is_file():
        return base / ARCHIVE
    for place in [base / sub for sub in HOME.folders] if base else []:
        if is_leaf(place):
            return place
    raise HOME.absent()


def _folder(place: Path) -> Dataset:
    halves, numbers, prints = read_halves(place, _characters)
    made = []
    for half in halves:
        x, y, client = half.joined(numbers)
        made.append(Samples(torch.from_numpy(x), torch.from_numpy(y), client))
    facts: dict[str, Any] = {"source": ORIGIN, "files": prints, "notes": "the folder's own split"}
    return check(Dataset("femnist", "image", made[0], made[1], ALL, tuple(numbers), facts=facts))


def _archive(place: Path) -> Dataset:
    """The archive as the data set ``npz`` reads it, with the names of the 62 classes."""
    data = Npz(path=str(place)).load()
    high = max(int(half.y.max()) for half in (data.train, data.test)) if data.classes else len(ALL)
    if tuple(data.train.x.shape[1:]) != (1, SIDE, SIDE) or data.kind != "image" or high >= len(ALL):
        raise FedblendError(
            f"{place}: is not FEMNIST: samples of shape {list(data.train.x.shape[1:])} and {len(data.classes)} "
            f"classes; expected images [1, {SIDE}, {SIDE}] and labels 0 to {len(ALL) - 1}"
        )
    if data.train.client is None:
        raise FedblendError(f"{place}: holds no array 'client'; FEMNIST needs the writer of each sample")
    return check(replace(data, name="femnist", classes=ALL, facts={**data.facts, "source": f"{ORIGIN}; {place.name}"}))


def _characters(x: list[Any], y: list[Any], whose: str) -> tuple[np.ndarray, np.ndarray]:
    """A writer's pictures uint8 [n, 1, 28, 28] and labels int64 [n] from LEAF's lists."""
    try:
        values = np.array(x, np.float64).reshape(len(y), PIXELS)
        labels = np.array(y)
    except (ValueError, TypeError):
        raise FedblendError(f"{whose}: x holds no lists of {PIXELS} numbers; is it another data set's file?") from None
    if not (np.all(values >= 0) and np.all(values <= 1)):
        raise FedblendError(
            f"{whose}: x reaches from {values.min():g} to {values.max():g}; LEAF's pixels are from 0 to 1"
        )
    if len(y) and (labels.dtype.kind not in "iu" or labels.min() < 0 or labels.max() >= len(ALL)):
        raise FedblendError(f"{whose}: y holds other than labels 0 to {len(ALL) - 1}")
    pixels = np.rint(values * 255).astype(np.uint8)
    return pixels.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)
