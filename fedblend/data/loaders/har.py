"""UCI HAR: windows of a smartphone's motion sensors, each person a client."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import (
    DataFiles,
    TestShare,
    check,
    data_folder,
    draw_test_half,
    existing_path,
    fingerprints,
    read_table,
)
from fedblend.data.loaders.npz import read_arrays

SIGNALS = tuple(f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""The channels of a window: acceleration without gravity in g, angular velocity in rad/s, acceleration in g."""
TIME = 128
"""Steps of a window: 2.56 s at 50 Hz."""
FEATURES = 561
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
ARCHIVE = "uci-har.npz"

FILES = DataFiles(
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
    """All windows of both halves."""

    signals: np.ndarray
    """float32 [n, 9, 128]."""
    features: np.ndarray | None
    """float32 [n, 561], or ``None`` if there are none."""
    labels: np.ndarray
    """int64 [n], 0 to 5."""
    people: np.ndarray
    """Number of the person of each window, int64 [n]."""
    test: np.ndarray
    """The publisher's test half, bool [n]."""
    files: dict[str, str]
    """SHA-256 by file."""


@part("dataset", "har")
class Har:
    """UCI HAR: 10,299 windows of a smartphone's motion by 30 people, 6 activities (Anguita et al. 2013; CC BY 4.0).

    ``path`` is the publisher's folder "UCI HAR Dataset", or an archive with arrays x [n, 9, 128], y, client and split.
    The default is ``$FEDBLEND_DATA/uci-har.npz``, then the publisher's folder there. Each person is a client.

    Windows overlap by half, so half of a test window may be in training if single windows are drawn. By default whole
    *recordings* are test: chains of windows that share a half. ``test_share`` of the recordings of each person and
    activity are test, drawn by the data set's name. Raises :class:`FedblendError` with the file for missing or damaged
    data.
    """

    path: FilePath | None = None
    """The publisher's folder, or an .npz file; by default it is searched under $FEDBLEND_DATA."""
    inputs: Literal["windows", "features"] = "windows"
    """Channels x time (for the model "cnn1d"), or the publisher's 561 features of each window, if the path has them."""
    split: Literal["recordings", "file"] = "recordings"
    """Drawn recordings, or the publisher's split, which tests on nine other people."""
    test_share: TestShare = 0.25
    """Share of the recordings of each person and activity that is test."""
    person: Count | None = None
    """One person only, by number from 1 to 30; the default is all."""

    def load(self) -> Dataset:
        """Load x float32 [n, 9, 128] or [n, 561], y int64 [n], and the people as ``client``."""
        base = data_folder()
        if self.path is not None:
            path = existing_path(self.path, "data.path")
        elif base and (base / ARCHIVE).is_file():
            path = base / ARCHIVE
        else:
            path = FILES.find(None)
        windows = _read_archive(path) if path.is_file() else _read_folder(path)
        x = windows.signals if self.inputs == "windows" else windows.features
        if x is None:
            raise FedblendError(f'{path}: holds no features (X_train.txt and X_test.txt); valid: inputs = "windows"')
        test, rule = windows.test, "the file's own split"
        if self.split == "recordings":
            test = self._draw_recordings(windows)
            rule = f"test: {self.test_share:g} of the recordings of each person and activity, drawn by name"
        people, client = np.unique(windows.people, return_inverse=True)
        chosen = np.ones(len(client), bool) if self.person is None else windows.people == self.person
        if not chosen.any():
            raise FedblendError(f"data.person: {self.person} is not in {path}; valid: {people.tolist()}")
        halves = []
        for rows in (chosen & ~test, chosen & test):
            owner = client[rows].astype(np.int64)
            halves.append(Samples(torch.from_numpy(x[rows]), torch.from_numpy(windows.labels[rows]), owner))
        names = tuple(f"person {number}" for number in people)
        source = "Anguita et al. 2013: Human activity recognition using smartphones (UCI; CC BY 4.0)"
        facts: dict[str, Any] = {"source": source, "files": windows.files, "notes": rule}
        return check(Dataset("har", "features", halves[0], halves[1], CLASSES, names, facts=facts))

    def _draw_recordings(self, windows: Windows) -> np.ndarray:
        """Draw the test windows, bool [n]: whole recordings of each person and activity."""
        recording = recordings(windows.signals)
        first = np.unique(recording, return_index=True)[1]
        group = windows.people.astype(np.int64) * len(CLASSES) + windows.labels
        return draw_test_half(group[first], self.test_share, "har")[recording]


def recordings(signals: np.ndarray) -> np.ndarray:
    """The recording of each window, int64 [n], numbered in the order of their first windows.

    Windows with an equal half, and chains of such windows, are one recording. ``signals`` is [n, 9, 128].
    """
    n, half = len(signals), signals.shape[2] // 2
    halves = np.ascontiguousarray(np.concatenate([signals[:, :, :half], signals[:, :, half:]])).reshape(2 * n, -1)
    whole = halves.view(np.dtype((np.void, halves.shape[1] * halves.itemsize))).ravel()
    number = np.unique(whole, return_inverse=True)[1]
    # A window links its two halves. Each half takes the least number of all that it is linked to, until none changes.
    least = np.arange(int(number.max()) + 1)
    while True:
        before = least.copy()
        linked = np.minimum(least[number[:n]], least[number[n:]])
        np.minimum.at(least, number[:n], linked)
        np.minimum.at(least, number[n:], linked)
        least = least[least]  # chains become half as long, so that a long one takes few steps
        if np.array_equal(least, before):
            break
    _, first, recording = np.unique(least[number[:n]], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[recording]


def _read_archive(path: Path) -> Windows:
    """Read windows from an archive with the arrays x, y, client and split."""
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
        raise FedblendError(f"{path}: 'split' must hold only 'train' and 'test'")
    labels = _labels(arrays["y"], str(path), 0)
    files = fingerprints([path], path.parent)
    test = arrays["split"] == "test"
    return Windows(x.astype(np.float32), None, labels, arrays["client"].astype(np.int64), test, files)


def _read_folder(folder: Path) -> Windows:
    """Read windows from the publisher's folder: the training half, then the test half."""
    root = FILES.find(str(folder))
    paths = [root / name for name in FILES.files]
    halves = ("train", "test")
    features = [root / half / f"X_{half}.txt" for half in halves]
    parts = [_read_half(root, half) for half in halves]
    has_features = all(path.exists() for path in features)
    tables = [read_table(path, FEATURES).astype(np.float32) for path in features] if has_features else None
    for path, table, (_, labels, _) in zip(features, tables or [], parts, strict=bool(tables)):
        if len(table) != len(labels):
            raise FedblendError(f"{path}: has {len(table)} windows, but there are {len(labels)} labels")
    return Windows(
        np.concatenate([signals for signals, _, _ in parts]),
        np.concatenate(tables) if tables else None,
        np.concatenate([labels for _, labels, _ in parts]),
        np.concatenate([people for _, _, people in parts]),
        np.repeat([False, True], [len(labels) for _, labels, _ in parts]),
        fingerprints(paths + (features if has_features else []), root),
    )


def _read_half(root: Path, half: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Read signals, labels and people of one half of the publisher's folder."""
    path = root / half / f"y_{half}.txt"
    labels = _labels(read_table(path, 1)[:, 0], str(path), 1)
    columns = {root / half / f"subject_{half}.txt": 1}
    columns |= {root / half / "Inertial Signals" / f"{name}_{half}.txt": TIME for name in SIGNALS}
    tables = []
    for other, width in columns.items():
        table = read_table(other, width)
        if len(table) != len(labels):
            raise FedblendError(f"{other}: has {len(table)} windows, but {path} has {len(labels)} labels")
        tables.append(table)
    return np.stack(tables[1:], axis=1).astype(np.float32), labels, tables[0][:, 0].astype(np.int64)


def _labels(y: np.ndarray, where: str, first: int) -> np.ndarray:
    """Labels from 0, int64. Raises unless they are whole numbers from ``first`` to ``first`` + 5."""
    valid = np.isin(y, np.arange(first, first + len(CLASSES)))
    if not valid.all():
        raise FedblendError(f"{where}: has the label {y[~valid][0]}; valid: {first} to {first + len(CLASSES) - 1}")
    return y.astype(np.int64) - first
