"""CIFAR10 and CIFAR100: the binary form, and which form lies where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.cifar_pickled import PIXELS, SHAPE, pickled_names, read_pickled, require_different
from fedblend.data.loaders.places import Home, fingerprints

TEN = Home(
    name="cifar10",
    files=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    folders=("cifar-10-batches-bin", "cifar10"),
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
HUNDRED = Home(
    name="cifar100",
    files=("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
    folders=("cifar-100-binary", "cifar100"),
    address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)
TEN_PYTHON = Home(
    name="cifar10",
    files=(*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"),
    folders=("cifar-10-batches-py",),
    address="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
)
HUNDRED_PYTHON = Home(
    name="cifar100",
    files=("train", "test", "meta"),
    folders=("cifar-100-python",),
    address="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
)
TEN_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NOTES = "the publisher's own split"
ORIGIN = "Krizhevsky 2009: Learning multiple layers of features from tiny images; research use with citation"


@part("dataset", "cifar10")
class Cifar10:
    """CIFAR10: 50,000 training and 10,000 test colour pictures, 32 x 32, 10 classes (Krizhevsky 2009).

    ``folder`` holds the binary form (``data_batch_1.bin`` to ``data_batch_5.bin`` and ``test_batch.bin``) or the
    Python form (the same names without ``.bin``, and ``batches.meta``), of which data only is read: nothing that a
    pickle asks for is run. Without it both are looked for in ``$FEDBLEND_DATA/cifar-10-batches-bin`` and
    ``$FEDBLEND_DATA/cifar-10-batches-py``. Raises :class:`FedblendError` for files that are missing, cut short,
    twice the same, or hold other labels than 0 to 9.
    """

    folder: FilePath | None = None
    """The folder with the six files of one form; without it they are looked for under $FEDBLEND_DATA."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 3, 32, 32], y int64 [n]."""
        home, place = _find(TEN, TEN_PYTHON, self.folder)
        paths = [place / name for name in home.files]
        if home is TEN_PYTHON:
            _require_names(paths.pop(), pickled_names(place / "batches.meta", "label_names", 10), TEN_CLASSES)
        elif (names := place / "batches.meta.txt").exists():
            _require_names(names, _names(names, 10), TEN_CLASSES)
        facts: dict[str, Any] = {"source": f"CIFAR10, {ORIGIN}", "files": fingerprints(paths, place), "notes": NOTES}
        reader = read_pickled if home is TEN_PYTHON else read_records
        read = [reader(path, {"label": 10}) for path in paths]
        _require_alike({path: len(labels) for path, (labels, _) in zip(paths[:-1], read[:-1], strict=True)})
        train, test = _samples(read[:-1], 0), _samples(read[-1:], 0)
        return check(Dataset("cifar10", "image", train, test, TEN_CLASSES, facts=facts))


@part("dataset", "cifar100")
class Cifar100:
    """CIFAR100: 50,000 training and 10,000 test colour pictures, 32 x 32, 100 classes or 20 (Krizhevsky 2009).

    ``folder`` holds the binary form (``train.bin``, ``test.bin`` and the names of labels) or the Python form
    (``train``, ``test`` and ``meta``), of which data only is read: nothing that a pickle asks for is run. Without it
    both are looked for in ``$FEDBLEND_DATA/cifar-100-binary`` and ``$FEDBLEND_DATA/cifar-100-python``. Raises
    :class:`FedblendError` for files that are missing or cut short, for labels out of range, and for a fine label that
    comes with two coarse ones.
    """

    folder: FilePath | None = None
    """The folder with the files of one form; without it they are looked for under $FEDBLEND_DATA."""
    labels: Literal["fine", "coarse"] = "fine"
    """Whether to tell 100 classes apart, or the 20 groups of five of them."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 3, 32, 32], y int64 [n]."""
        home, place = _find(HUNDRED, HUNDRED_PYTHON, self.folder)
        paths = [place / name for name in home.files]
        facts: dict[str, Any] = {"source": f"CIFAR100, {ORIGIN}", "files": fingerprints(paths, place), "notes": NOTES}
        reader = read_pickled if home is HUNDRED_PYTHON else read_records
        read = [reader(path, {"coarse label": 20, "fine label": 100}) for path in paths[:2]]
        _require_fifth(paths, [len(labels) for labels, _ in read])
        _require_nested(np.concatenate([labels for labels, _ in read]), place)
        column, classes = (1, 100) if self.labels == "fine" else (0, 20)
        if home is HUNDRED_PYTHON:
            names = pickled_names(paths[2], f"{self.labels}_label_names", classes)
        else:
            names = _names(place / f"{self.labels}_label_names.txt", classes)
        train, test = (_samples([half], column) for half in read)
        return check(Dataset("cifar100", "image", train, test, names, facts=facts))


def read_records(path: Path, labels: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Labels uint8 [n, len(labels)] and pictures uint8 [n, 3, 32, 32] of a file; ``labels`` are their numbers of
    classes by name, in the order of the record.

    Raises :class:`FedblendError` if the file is no whole number of records, or a label is out of range.
    """
    raw = np.fromfile(path, np.uint8)
    width = len(labels) + PIXELS
    if not len(raw) or len(raw) % width:
        raise FedblendError(
            f"{path}: is truncated or another file: {len(raw)} bytes are no whole number of records of {width}; "
            "fetch it anew"
        )
    records = raw.reshape(-1, width)
    for column, (name, classes) in enumerate(labels.items()):
        bad = np.flatnonzero(records[:, column] >= classes)
        if len(bad):
            raise FedblendError(
                f"{path}: record {bad[0]} holds the {name} {records[bad[0], column]}; valid: 0 to {classes - 1}"
            )
    return records[:, : len(labels)], records[:, len(labels) :].reshape(-1, *SHAPE)


def _require_alike(sizes: Mapping[Path, int]) -> None:
    """Raise an error if files that hold as many pictures each do not: one may be cut between two records."""
    most = max(sizes.values())
    for path, size in sizes.items():
        if size < most:
            raise FedblendError(f"{path}: is cut short: it holds {size:,} pictures, others {most:,}; fetch it anew")


def _require_fifth(paths: Sequence[Path], sizes: Sequence[int]) -> None:
    """Raise an error if the test half does not hold a fifth of the training half's pictures."""
    train, test = sizes
    if train != 5 * test:
        short = paths[0] if train < 5 * test else paths[1]
        raise FedblendError(
            f"{short}: is cut short: training holds {train:,} pictures, tests {test:,}; valid: a fifth; fetch it anew"
        )


def _samples(read: list[tuple[np.ndarray, np.ndarray]], column: int) -> Samples:
    x = np.concatenate([pictures for _, pictures in read])
    y = np.concatenate([labels[:, column] for labels, _ in read]).astype(np.int64)
    return Samples(torch.from_numpy(x), torch.from_numpy(y))


def _find(binary: Home, python: Home, folder: str | None) -> tuple[Home, Path]:
    """Which form lies where: the binary one where both do. Raises, naming the binary form, if neither does."""
    if folder is not None:
        if (Path(folder) / python.files[0]).is_file() and not (Path(folder) / binary.files[0]).exists():
            return python, python.find(folder)
        return binary, binary.find(folder)
    for home in (binary, python):
        place = home.found()
        if place is not None:
            return home, place
    raise binary.absent()


def _names(path: Path, number: int) -> tuple[str, ...]:
    """The names of labels, one a line. Raises if there are not ``number`` of them."""
    try:
        names = path.read_text(encoding="ascii").split()
    except UnicodeDecodeError:
        raise FedblendError(f"{path}: is no list of names in plain text; fetch it anew") from None
    return require_different(path, names, number)


def _require_names(path: Path, found: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise unless a file told these names in this order: another order would be another meaning of labels."""
    if found != names:
        wrong = next(i for i, pair in enumerate(zip(found, names, strict=True)) if pair[0] != pair[1])
        raise FedblendError(f"{path}: calls label {wrong} '{found[wrong]}'; in CIFAR10 it is '{names[wrong]}'")


def _require_nested(labels: np.ndarray, place: Path) -> None:
    """Raise unless every fine label always comes with one coarse label."""
    pairs = np.unique(labels, axis=0)
    fine, times = np.unique(pairs[:, 1], return_counts=True)
    if len(fine) < len(pairs):
        bad = int(fine[times > 1][0])
        groups = pairs[pairs[:, 1] == bad][:, 0].tolist()
        raise FedblendError(f"{place}: the fine label {bad} comes with the coarse labels {groups}; each belongs to one")
