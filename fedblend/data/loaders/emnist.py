"""EMNIST: handwritten letters and digits in MNIST's format, in six splits."""

from __future__ import annotations

import string
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import DataFiles, fingerprints, made
from fedblend.data.loaders.mnist import read_pair

SIDE = 28
CHARACTERS = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
"""The 62 characters in the order of their labels, in EMNIST "byclass" and in LEAF's FEMNIST."""
FILES = DataFiles(
    name="emnist",
    files=tuple(f"{half}-{kind}-ubyte" for half in ("train", "test") for kind in ("images-idx3", "labels-idx1")),
    folders=("EMNIST/raw", "EMNIST", "emnist"),
    address="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
    gzipped=True,
)
LOWER_CASE = "abdefghnqrt"  # The lower-case letters that are classes of their own in "balanced" and "bymerge"

CLASSES = {
    "balanced": (*string.digits, *string.ascii_uppercase, *LOWER_CASE),
    "byclass": CHARACTERS,
    "bymerge": (*string.digits, *string.ascii_uppercase, *LOWER_CASE),
    "letters": tuple(string.ascii_uppercase),
    "digits": tuple(string.digits),
    "mnist": tuple(string.digits),
}
"""The classes of each split, in the order of their labels."""


@part("dataset", "emnist")
class Emnist:
    """EMNIST: handwritten letters and digits, 28 x 28, in six splits (Cohen et al. 2017; NIST SD19, idx files).

    ``folder`` holds ``emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte``, gzipped or not. By default they are
    searched in ``$FEDBLEND_DATA/EMNIST/raw``, ``EMNIST`` and ``emnist``. The files store images column by column; the
    loader transposes them, so they are upright. Labels of "letters" start at 1 in the files and at 0 here. Raises
    :class:`FedblendError` for files that are missing or damaged, or have labels outside of the split's classes.
    """

    folder: FilePath | None = None
    """The folder with the four idx files of the split; by default it is searched under $FEDBLEND_DATA."""
    split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    """The publisher's name of the classes and the samples."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1, 28, 28], ink as 255, and y int64 [n]."""
        files = replace(FILES, files=tuple(f"emnist-{self.split}-{name}" for name in FILES.files))
        root = files.find(self.folder)
        paths = [files.paths(root)[name] for name in files.files]
        classes = CLASSES[self.split]
        halves = [_read(paths[i], paths[i + 1], len(classes), self.split == "letters") for i in (0, 2)]
        source = f"Cohen et al. 2017: EMNIST, '{self.split}' (NIST Special Database 19, public domain)"
        facts = source, fingerprints(paths, root), "the publisher's own split; images transposed"
        return made(f"emnist-{self.split}", "image", halves, classes, facts)


def _read(images: Path, labels: Path, classes: int, from_one: bool) -> tuple[np.ndarray, np.ndarray]:
    x, y = read_pair(images, labels, SIDE, classes + from_one)
    y = y - from_one
    if len(y) and y.min() < 0:
        raise FedblendError(f"{labels}: has the label 0; valid: 1 to {classes}")
    # Stored column by column.
    return np.ascontiguousarray(x.transpose(0, 1, 3, 2)), y
