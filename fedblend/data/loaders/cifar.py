"""CIFAR10 and CIFAR100 in their binary form."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import DataFiles, data_folder, fingerprints, made, read_ascii, regular_file

SHAPE = (3, 32, 32)
"""Channels, height and width: a record holds 1,024 bytes of red, then of green, then of blue, row by row."""

CIFAR10 = DataFiles(
    name="cifar10",
    files=(*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
    folders=("cifar-10-batches-bin", "cifar10"),
    address="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
)
CIFAR100 = DataFiles(
    name="cifar100",
    files=("train.bin", "test.bin", "fine_label_names.txt", "coarse_label_names.txt"),
    folders=("cifar-100-binary", "cifar100"),
    address="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
)
PICKLED = {"cifar10": ("cifar-10-batches-py", "data_batch_1"), "cifar100": ("cifar-100-python", "train")}
"""Usual folder and first file of the Python version, which is recognised but not read."""
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NOTES = "the publisher's own split"
ORIGIN = "Krizhevsky 2009: Learning multiple layers of features from tiny images; research use with citation"


@part("dataset", "cifar10")
class Cifar10:
    """CIFAR10: 50,000 training and 10,000 test colour images, 32 x 32, 10 classes (Krizhevsky 2009).

    ``folder`` holds the binary version (``cifar-10-binary.tar.gz``): ``data_batch_1.bin`` to ``data_batch_5.bin`` and
    ``test_batch.bin``. The default is ``$FEDBLEND_DATA/cifar-10-batches-bin``. The Python version is not read, because
    it is pickled. Raises :class:`FedblendError` for files that are missing, truncated, equal to another one, or have
    labels other than 0 to 9.
    """

    folder: FilePath | None = None
    """The folder with the six binary files; by default it is searched under $FEDBLEND_DATA."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 3, 32, 32] and y int64 [n]."""
        root = _find(CIFAR10, self.folder)
        paths = [root / name for name in CIFAR10.files]
        if (listing := root / "batches.meta.txt").exists():
            # Another order gives labels another meaning.
            for i, (name, wanted) in enumerate(zip(_read_names(listing, 10), CIFAR10_CLASSES, strict=True)):
                if name != wanted:
                    raise FedblendError(f"{listing}: names label {i} '{name}'; in CIFAR10 it is '{wanted}'")
        facts = f"CIFAR10, {ORIGIN}", fingerprints(paths, root), NOTES
        records = [read_records(path, {"label": 10}) for path in paths]
        sizes = [len(labels) for labels, _ in records[:-1]]
        for path, size in zip(paths, sizes, strict=False):
            # A file may be truncated between two records.
            if size < max(sizes):
                found = f"it has {size:,} images, others {max(sizes):,}"
                raise FedblendError(f"{path}: is truncated: {found}; download it again")
        return made("cifar10", "image", [_half(records[:-1], 0), _half(records[-1:], 0)], CIFAR10_CLASSES, facts)


@part("dataset", "cifar100")
class Cifar100:
    """CIFAR100: 50,000 training and 10,000 test colour images, 32 x 32, 100 classes or 20 (Krizhevsky 2009).

    ``folder`` holds the binary version (``cifar-100-binary.tar.gz``): ``train.bin``, ``test.bin`` and the names of the
    labels. The default is ``$FEDBLEND_DATA/cifar-100-binary``. The Python version is not read, because it is pickled.
    Raises :class:`FedblendError` for files that are missing or truncated, for labels out of range, and for a fine
    label with two coarse ones.
    """

    folder: FilePath | None = None
    """The folder with the binary files; by default it is searched under $FEDBLEND_DATA."""
    labels: Literal["fine", "coarse"] = "fine"
    """The 100 classes, or the 20 groups of five classes."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 3, 32, 32] and y int64 [n]."""
        root = _find(CIFAR100, self.folder)
        paths = [root / name for name in CIFAR100.files]
        facts = f"CIFAR100, {ORIGIN}", fingerprints(paths, root), NOTES
        records = [read_records(path, {"coarse label": 20, "fine label": 100}) for path in paths[:2]]
        train, test = (len(labels) for labels, _ in records)
        if train != 5 * test:
            found = f"the training half has {train:,} images, the test half {test:,}; valid: a fifth of it"
            raise FedblendError(f"{paths[int(train > 5 * test)]}: is truncated: {found}; download it again")
        groups: dict[int, int] = {}
        for coarse, fine in np.unique(np.concatenate([labels for labels, _ in records]), axis=0).tolist():
            if (other := groups.setdefault(fine, coarse)) != coarse:
                both = [other, coarse]
                raise FedblendError(f"{root}: the fine label {fine} comes with the coarse labels {both}; valid: one")
        column, classes = (1, 100) if self.labels == "fine" else (0, 20)
        names = _read_names(root / f"{self.labels}_label_names.txt", classes)
        return made("cifar100", "image", [_half([half], column) for half in records], names, facts)


def _find(files: DataFiles, folder: str | None) -> Path:
    """The folder of the binary version. Raises :class:`FedblendError`, also where only the Python version is found."""
    base = data_folder()
    usual, first = PICKLED[files.name]
    pickled = Path(folder) if folder is not None else base / usual if base else None
    has_binary = (Path(folder) / files.files[0]).exists() if folder is not None else files.find_usual() is not None
    if pickled is not None and (pickled / first).is_file() and not has_binary:
        raise FedblendError(
            f"{'data' if folder is None else 'data.folder'}: '{pickled}' holds the Python version of {files.name}, "
            f"which is pickled and is not read; the binary version is needed: unpack {files.address} into "
            f"{files.folders[0]}/ under the folder that $FEDBLEND_DATA names, or use the data set 'hub'"
        )
    return files.find(folder)


def read_records(path: Path, labels: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Read labels uint8 [n, len(labels)] and images uint8 [n, 3, 32, 32] of one file.

    ``labels`` has the number of classes of each label by its name, in the order of the record.
    """
    raw = np.fromfile(regular_file(path), np.uint8)
    width = len(labels) + math.prod(SHAPE)
    if not len(raw) or len(raw) % width:
        found = f"{len(raw)} bytes are no whole number of records of {width}"
        raise FedblendError(f"{path}: is truncated or another file: {found}; download it again")
    records = raw.reshape(-1, width)
    for column, (name, classes) in enumerate(labels.items()):
        for bad in np.flatnonzero(records[:, column] >= classes):
            found = f"record {bad} has the {name} {records[bad, column]}"
            raise FedblendError(f"{path}: {found}; valid: 0 to {classes - 1}")
    return records[:, : len(labels)], records[:, len(labels) :].reshape(-1, *SHAPE)


def _half(records: list[tuple[np.ndarray, np.ndarray]], column: int) -> tuple[np.ndarray, np.ndarray]:
    y = np.concatenate([labels[:, column] for labels, _ in records]).astype(np.int64)
    return np.concatenate([images for _, images in records]), y


def _read_names(path: Path, number: int) -> tuple[str, ...]:
    """Read the names of labels, one a line. Raises unless they are ``number`` different ones."""
    names = read_ascii(path).split()
    if len(set(names)) != number or len(names) != number:
        raise FedblendError(f"{path}: has {len(set(names))} different names in {len(names)}; expected {number}")
    return tuple(names)
