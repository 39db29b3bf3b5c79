"""FER2013: facial expressions, from one CSV file."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, brief, printable
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import DataFiles, fingerprints, made, parse_numbers, regular_file

SIDE = 48
CLASSES = ("angry", "disgust", "fear", "happy", "sad", "surprise", "neutral")
COLUMNS = ("emotion", "pixels", "usage")
USAGES = {"Training": "train", "PublicTest": "public", "PrivateTest": "private"}

FILES = DataFiles(
    name="fer2013",
    files=("fer2013.csv",),
    folders=("fer2013", "FER2013"),
    address="https://www.kaggle.com/c/challenges-in-representation-learning-facial-expression-recognition-challenge",
)


@part("dataset", "fer2013")
class Fer2013:
    """FER2013: grey images of faces, 48 x 48, 7 expressions, in one CSV file (Goodfellow et al. 2013).

    ``folder`` holds ``fer2013.csv`` with the columns emotion (0 to 6), pixels (2,304 numbers) and Usage. The default
    is ``$FEDBLEND_DATA/fer2013``. The complete file has 28,709 training samples and two test sets of 3,589 samples.
    AggEnhance trains on these faces and does not name its test set. Raises :class:`FedblendError` with the file and
    the line for missing or damaged data.
    """

    folder: FilePath | None = None
    """The folder with fer2013.csv; by default it is searched under $FEDBLEND_DATA."""
    test: Literal["both", "public", "private"] = "both"
    """The test samples: those marked PublicTest, PrivateTest, or both."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1, 48, 48] and y int64 [n]."""
        root = FILES.find(self.folder)
        path = root / FILES.files[0]
        halves: dict[str, list[tuple[np.ndarray, int]]] = {"train": [], "test": []}
        for where, label, pixels, usage in _rows(path):
            half = "train" if usage == "train" else "test"
            if half == "train" or self.test in ("both", usage):
                halves[half].append((_parse_image(pixels, where), label))
        for half, samples in halves.items():
            if not samples:
                kind = "Training" if half == "train" else "of the kind in data.test"
                raise FedblendError(f"{path}: holds no samples {kind}; is it truncated?")
        rule = f"the publisher's own split; test: {self.test}"
        facts = "Goodfellow et al. 2013: FER2013 (research use)", fingerprints([path], root), rule
        arrays = [[np.stack(column) for column in zip(*samples, strict=True)] for samples in halves.values()]
        return made("fer2013", "image", arrays, CLASSES, facts)


def _rows(path: Path) -> Iterator[tuple[str, int, str, str]]:
    """For each row: file and line, the label, the pixels as text, and "train", "public" or "private"."""
    try:
        with open(regular_file(path), encoding="ascii", newline="") as file:
            reader = csv.reader(file)
            header = [word.strip().lower() for word in next(reader, [])]
            if sorted(header) != sorted(COLUMNS):
                found = printable(", ".join(header), 120)
                raise FedblendError(f"{path}: has the columns {found}; expected emotion, pixels, Usage")
            emotion, pixels, usage = (header.index(name) for name in COLUMNS)
            for row in reader:
                where = f"{path}: line {reader.line_num}"
                if len(row) != len(COLUMNS) or row[usage].strip() not in USAGES:
                    valid = f"it must have three columns, with Usage one of {', '.join(USAGES)}"
                    raise FedblendError(f"{where} is truncated or damaged: {valid}")
                if row[emotion].strip() not in map(str, range(len(CLASSES))):
                    raise FedblendError(f"{where} has the emotion {brief(row[emotion])}; valid: 0 to 6")
                yield where, int(row[emotion]), row[pixels], USAGES[row[usage].strip()]
    except (UnicodeDecodeError, csv.Error) as error:
        raise FedblendError(f"{path}: is damaged or no CSV file ({str(error)[:100]}); download it again") from None


def _parse_image(text: str, where: str) -> np.ndarray:
    numbers = parse_numbers(text)
    if numbers is None or len(numbers) != SIDE * SIDE:
        found = "words that are no numbers" if numbers is None else f"{len(numbers)} pixels"
        raise FedblendError(f"{where} is truncated or damaged: it has {found}; expected {SIDE * SIDE} pixels")
    if not np.isin(numbers, np.arange(256)).all():
        raise FedblendError(f"{where} has pixels that are no whole numbers from 0 to 255")
    return numbers.astype(np.uint8).reshape(1, SIDE, SIDE)
