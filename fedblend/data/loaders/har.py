"""UCI HAR: windows of a smartphone's motion sensors, each person a client."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import DataFiles, TestShare, by_half, draw_test_half, fingerprints, made, read_table
from fedblend.data.loaders.npz import read_arrays, wrong_form

SIGNALS = tuple(f"{signal}_{axis}" for signal in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
"""The channels of a window: acceleration without gravity in g, angular velocity in rad/s, acceleration in g."""
TIME = 128  # Steps of a window: 2.56 s at 50 Hz
FEATURES = 561
CLASSES = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
HALVES = ("train", "test")

FILES = DataFiles(
    name="har",
    files=tuple(
        f"{half}/{name}_{half}.txt"
        for half in HALVES
        for name in ("y", "subject", *(f"Inertial Signals/{signal}" for signal in SIGNALS))
    ),
    folders=("UCI HAR Dataset", "har", "uci-har"),
    address="https://archive.ics.uci.edu/dataset/240/human+activity+recognition+using+smartphones",
    option="path",
    archive="uci-har.npz",
)


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
        path = FILES.find(self.path)
        arrays, files = (_read_archive if path.is_file() else _read_folder)(path)
        labels, numbers = arrays["y"], arrays["client"]
        x = arrays["x" if self.inputs == "windows" else "features"]
        if x is None:
            raise FedblendError(f'{path}: holds no features (X_train.txt and X_test.txt); valid: inputs = "windows"')
        test, rule = arrays["split"] == "test", "the file's own split"
        if self.split == "recordings":
            recording = recordings(arrays["x"])
            first = np.unique(recording, return_index=True)[1]
            test = draw_test_half((numbers * len(CLASSES) + labels)[first], self.test_share, "har")[recording]
            rule = f"test: {self.test_share:g} of the recordings of each person and activity, drawn by name"
        people, client = np.unique(numbers, return_inverse=True)
        chosen = np.full(len(client), self.person is None) | (numbers == self.person)
        if not chosen.any():
            raise FedblendError(f"data.person: {self.person} is not in {path}; valid: {people.tolist()}")
        halves = by_half(test[chosen], x[chosen], labels[chosen], client[chosen].astype(np.int64))
        source = "Anguita et al. 2013: Human activity recognition using smartphones (UCI; CC BY 4.0)"
        names = [f"person {number}" for number in people]
        return made("har", "features", halves, CLASSES, (source, files, rule), names)


def recordings(signals: np.ndarray) -> np.ndarray:
    """The recording of each window of ``signals`` [n, 9, 128], int64 [n], numbered in the order of their first windows.

    Windows with an equal half, and chains of such windows, are one recording.
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


def _read_archive(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays x, y, client and split of an archive, without features, and its SHA-256."""
    arrays: dict[str, Any] = {**read_arrays(path, ("x", "y", "client", "split")), "features": None}
    n = len(np.atleast_1d(arrays["y"]))
    whole = "iu", (n,), f"whole numbers [{n}]"
    forms = {"x": ("f", (n, 9, TIME), f"floats [{n}, 9, {TIME}]"), "y": whole, "client": whole}
    for name, (kinds, shape, valid) in {**forms, "split": ("U", (n,), f"train or test [{n}]")}.items():
        if arrays[name].dtype.kind not in kinds or arrays[name].shape != shape:
            raise wrong_form(path, name, arrays[name], valid)
    if not np.isin(arrays["split"], ["train", "test"]).all():
        raise FedblendError(f"{path}: 'split' must hold only 'train' and 'test'")
    arrays |= {"x": arrays["x"].astype(np.float32), "client": arrays["client"].astype(np.int64)}
    return {**arrays, "y": _labels(arrays["y"], path, 0)}, fingerprints([path], path.parent)


def _read_folder(root: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The arrays of the publisher's folder, the training half first, and the SHA-256 of its files."""
    features = [root / half / f"X_{half}.txt" for half in HALVES]
    features = features if all(path.exists() for path in features) else []
    halves = [_read_half(root, half, bool(features)) for half in HALVES]
    arrays: dict[str, Any] = {name: np.concatenate([half[name] for half in halves]) for name in halves[0]}
    paths = [*(root / name for name in FILES.files), *features]
    return {"features": None, **arrays}, fingerprints(paths, root)


def _read_half(root: Path, half: str, has_features: bool) -> dict[str, np.ndarray]:
    path = root / half / f"y_{half}.txt"
    y = _labels(read_table(path, 1)[:, 0], path, 1)

    def table(name: str, width: int) -> np.ndarray:
        read = read_table(root / half / f"{name}_{half}.txt", width)
        if len(read) != len(y):
            found = f"{root / half / name}_{half}.txt: has {len(read)} windows"
            raise FedblendError(f"{found}, but {path} has {len(y)} labels; valid: as many")
        return read

    client = table("subject", 1)[:, 0].astype(np.int64)
    x = np.stack([table(f"Inertial Signals/{name}", TIME) for name in SIGNALS], axis=1).astype(np.float32)
    more = {"features": table("X", FEATURES).astype(np.float32)} if has_features else {}
    return {"x": x, "y": y, "client": client, "split": np.full(len(y), half), **more}


def _labels(y: np.ndarray, where: Path, first: int) -> np.ndarray:
    """Labels from 0, int64. Raises unless they are whole numbers from ``first`` to ``first`` + 5."""
    for bad in y[~np.isin(y, np.arange(first, first + len(CLASSES)))]:
        raise FedblendError(f"{where}: has the label {bad}; valid: {first} to {first + len(CLASSES) - 1}")
    return y.astype(np.int64) - first
