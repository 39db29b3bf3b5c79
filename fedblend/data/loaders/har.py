"""UCI HAR: windows of a smartphone's motion sensors, each person a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import TestShare, data_folder, draw_test_half, existing
from fedblend.data.loaders.npz import read_arrays
from fedblend.data.loaders.numbers import read_table
from fedblend.data.loaders.places import Home, fingerprints

SIGNALS = tuple(f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""The channels of a window, in order: acceleration without gravity in g, turning in rad/s, acceleration in g."""
TIME = 128
"""Steps of a window: 2.56 s at 50 Hz."""
FEATURES = 561
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
ARCHIVE = "uci-har.npz"

HOME = Home(
    name="har",
    files=tuple(
        f"{half}/{name}_{half}.txt"
        for half in ("train", "test")
        for name in ("y", "subject", *(f"Inertial Signals/{signal}" for signal in SIGNALS))
    ),
    folders=("UCI HAR Dataset", "har", "uci-har"),
    address="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    option="path",
)


@dataclass(frozen=True)
class Windows:
    """All windows: signals float32 [n, 9, 128], features float32 [n, 561] if read, labels, people, and the file's
    own test half.
    """

    signals: np.ndarray
    features: np.ndarray | None
    labels: np.ndarray
    people: np.ndarray
    test: np.ndarray
    files: dict[str, str]


@part("dataset", "har")
class Har:
    """UCI HAR: 10,299 windows of a smartphone's motion by 30 people, 6 activities (Anguita et al. 2013; CC BY 4.0).

    ``path`` is the publisher's folder "UCI HAR Dataset", or an archive with arrays x [n, 9, 128], y, client and split;
    without it ``$FEDBLEND_DATA/uci-har.npz`` is taken, or that folder there. Each person is a client.

    Windows overlap by half, so a split that draws windows tests on what was half seen in training. By default
    whole *recordings*, the chains of windows that share a half, are test: ``test_share`` of those of each person and
    activity, drawn by the data set's name. Raises :class:`FedblendError` that names the file for what is missing or
    damaged.
    """

    path: FilePath | None = None
    """The publisher's folder, or an .npz file; without it one is looked for under $FEDBLEND_DATA."""
    inputs: Literal["windows", "features"] = "windows"
    """Channels x time (for the model "cnn1d"), or the publisher's 561 features of each window, if they are there."""
    split: Literal["recordings", "file"] = "recordings"
    """Whether recordings are drawn, or the file's own split is taken (the publisher tests on nine people apart)."""
    test_share: TestShare = 0.25
    """Share of the recordings of each person and activity that is test."""
    person: Count | None = None
    """One person by number, 1 to 30, as if alone; all, if not given."""

    def load(self) -> Dataset:
        """The data set: x float32 [n, 9, 128] or [n, 561], y int64 [n], ``client`` the person."""
        place = existing(self.path, "data.path") if self.path is not None else _usual()
        read = _archive(place) if place.is_file() else _folder(place)
        x = read.signals if self.inputs == "windows" else read.features
        if x is None:
            raise FedblendError(f'{place}: holds no features (X_train.txt and X_test.txt); valid: inputs = "windows"')
        test, rule = read.test, "the file's own split"
        if self.split == "recordings":
            test = self._drawn(read)
            rule = f"test: {self.test_share:g} of the recordings of each person and activity, drawn by name"
        people, client = np.unique(read.people, return_inverse=True)
        taken = np.ones(len(client), bool) if self.person is None else read.people == self.person
        if not taken.any():
            raise FedblendError(f"data.person: {self.person} is nobody in {place}; valid: {people.tolist()}")
        halves = [_samples(x, read.labels, client, taken & half) for half in (~test, test)]
        names = tuple(f"person {number}" for number in people)
        source = "Anguita et al. 2013: Human activity recognition using smartphones (UCI; CC BY 4.0)"
        facts: dict[str, Any] = {"source": source, "files": read.files, "notes": rule}
        return check(Dataset("har", "features", halves[0], halves[1], CLASSES, names, facts=facts))

    def _drawn(self, read: Windows) -> np.ndarray:
        """Which windows are test, bool [n]: of each person and activity, whole recordings."""
        of = recordings(read.signals)
        first = np.unique(of, return_index=True)[1]
        group = read.people.astype(np.int64) * len(CLASSES) + read.labels
        return draw_test_half(group[first], self.test_share, "har")[of]


def recordings(signals: np.ndarray) -> np.ndarray:
    """The recording of each window, int64 [n], numbered in the order of their first windows: two windows are of one
    recording if a half of the one is a half of the other, or of a third of it, and so on. ``signals`` is [n, 9, 128].
    """
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    n, half = len(signals), signals.shape[2] // 2
    halves = np.ascontiguousarray(np.concatenate([signals[:, :, :half], signals[:, :, half:]])).reshape(2 * n, -1)
    whole = halves.view(np.dtype((np.void, halves.shape[1] * halves.itemsize))).ravel()
    number = np.unique(whole, return_inverse=True)[1]
    count = int(number.max()) + 1
    links = coo_array((np.ones(n), (number[:n], number[n:])), shape=(count, count))
    chain = connected_components(links, directed=False)[1][number[:n]]
    _, first, of = np.unique(chain, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[of]


def _samples(x: np.ndarray, y: np.ndarray, client: np.ndarray, rows: np.ndarray) -> Samples:
    return Samples(torch.from_numpy(x[rows]), torch.from_numpy(y[rows]), client[rows].astype(np.int64))


def _usual() -> Path:
    """Where the data lie under $FEDBLEND_DATA. Raises, with their address, if they do not."""
    base = data_folder()
    if base and (base / ARCHIVE).is_file():
        return base / ARCHIVE
    return HOME.find(None)


def _archive(path: Path) -> Windows:
    """Windows from an archive with the arrays x, y, client and split."""
    arrays = read_arrays(path)
    missing = [name for name in ("x", "y", "client", "split") if name not in arrays]
    if missing:
        raise FedblendError(f"{path}: holds no array '{missing[0]}'; x, y, client and split are needed")
    x, n = arrays["x"], len(np.atleast_1d(arrays["y"]))
    if x.dtype.kind != "f" or x.shape != (n, len(SIGNALS), TIME):
        raise FedblendError(f"{path}: 'x' is {x.dtype} of shape {list(x.shape)}; expected floats [{n}, 9, {TIME}]")
    for name in ("y", "client", "split"):
        kinds = "U" if name == "split" else "iu"
        if arrays[name].dtype.kind not in kinds or arrays[name].shape != (n,):
            raise FedblendError(
                f"{path}: '{name}' is {arrays[name].dtype} of shape {list(arrays[name].shape)}; expected "
                f"{'train or test' if name == 'split' else 'whole numbers'} [{n}]"
            )
    if not np.isin(arrays["split"], ["train", "test"]).all():
        raise FedblendError(f"{path}: 'split' holds other than train and test")
    labels = _labels(arrays["y"], str(path), 0)
    files = fingerprints([path], path.parent)
    test = arrays["split"] == "test"
    return Windows(x.astype(np.float32), None, labels, arrays["client"].astype(np.int64), test, files)


def _folder(place: Path) -> Windows:
    """Windows from the publisher's folder: both of its halves in a row."""
    place = HOME.find(str(place))
    paths = [place / name for name in HOME.files]
    halves = ("train", "test")
    features = [place / half / f"X_{half}.txt" for half in halves]
    read = [_half(place, half) for half in halves]
    has_features = all(path.exists() for path in features)
    tables = [read_table(path, FEATURES).astype(np.float32) for path in features] if has_features else None
    for path, table, (_, labels, _) in zip(features, tables or [], read, strict=bool(tables)):
        if len(table) != len(labels):
            raise FedblendError(f"{path}: holds {len(table)} windows, but there are {len(labels)} labels")
    return Windows(
        np.concatenate([signals for signals, _, _ in read]),
        np.concatenate(tables) if tables else None,
        np.concatenate([labels for _, labels, _ in read]),
        np.concatenate([people for _, _, people in read]),
        np.repeat([False, True], [len(labels) for _, labels, _ in read]),
        fingerprints(paths + (features if has_features else []), place),
    )


def _half(place: Path, half: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Signals, labels and people of one half of the publisher's folder."""
    path = place / half / f"y_{half}.txt"
    labels = _labels(read_table(path, 1)[:, 0], str(path), 1)
    columns = {place / half / f"subject_{half}.txt": 1}
    columns |= {place / half / "Inertial Signals" / f"{name}_{half}.txt": TIME for name in SIGNALS}
    tables = []
    for other, width in columns.items():
        table = read_table(other, width)
        if len(table) != len(labels):
            raise FedblendError(f"{other}: holds {len(table)} windows, but {path} holds {len(labels)} labels")
        tables.append(table)
    return np.stack(tables[1:], axis=1).astype(np.float32), labels, tables[0][:, 0].astype(np.int64)


def _labels(y: np.ndarray, where: str, first: int) -> np.ndarray:
    """Labels from 0, int64. Raises unless they are whole numbers from ``first`` to ``first`` + 5."""
    valid = np.isin(y, np.arange(first, first + len(CLASSES)))
    if not valid.all():
        raise FedblendError(f"{where}: holds the label {y[~valid][0]}; valid: {first} to {first + len(CLASSES) - 1}")
    return y.astype(np.int64) - first
