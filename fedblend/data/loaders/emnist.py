"""EMNIST: handwritten letters and digits in MNIST's format, in six arrangements of classes."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.idx import read_pair
from fedblend.data.loaders.places import Home, fingerprints

SIDE = 28
ALL = (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase)
"""The 62 characters in the order of their labels, in EMNIST "byclass" and in LEAF's FEMNIST."""
UNLIKE = "abdefghnqrt"
"""The lower-case letters that "balanced" and "bymerge" tell from their capitals."""

CLASSES = {
    "balanced": (*string.digits, *string.ascii_uppercase, *UNLIKE),
    "byclass": ALL,
    "bymerge": (*string.digits, *string.ascii_uppercase, *UNLIKE),
    "letters": tuple(string.ascii_uppercase),
    "digits": tuple(string.digits),
    "mnist": tuple(string.digits),
}
"""The names of the labels of each arrangement, in order."""


@part("dataset", "emnist")
class Emnist:
    """EMNIST: handwritten letters and digits, 28 x 28, in six arrangements (Cohen et al. 2017; NIST SD19, idx files).

    ``folder`` holds ``emnist-SPLIT-{train,test}-{images-idx3,labels-idx1}-ubyte``, gzipped or not. Without it they are
    looked for in ``$FEDBLEND_DATA/EMNIST/raw``, ``EMNIST`` and ``emnist``. The files hold pictures column by column;
    here they stand upright. Letters are counted from 1 in "letters"; here from 0. Raises :class:`FedblendError` for
    files that are missing or damaged, or hold other labels than that arrangement has.
    """

    folder: FilePath | None = None
    """The folder with the four idx files of the arrangement; without it it is looked for under $FEDBLEND_DATA."""
    split: Literal["balanced", "byclass", "bymerge", "letters", "digits", "mnist"] = "balanced"
    """The arrangement: which classes there are, and which samples of each."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 1, 28, 28], ink as 255, y int64 [n]."""
        stems = [
            f"emnist-{self.split}-{half}-{kind}-ubyte"
            for half in ("train", "test")
            for kind in ("images-idx3", "labels-idx1")
        ]
        place, paths = _find(self.folder, stems)
        classes = CLASSES[self.split]
        halves = [_read(paths[i], paths[i + 1], len(classes), self.split == "letters") for i in (0, 2)]
        facts = {
            "source": f"Cohen et al. 2017: EMNIST, '{self.split}' (NIST Special Database 19, public domain)",
            "files": fingerprints(paths, place),
            "notes": "the publisher's own split; pictures turned upright",
        }
        return check(Dataset(f"emnist-{self.split}", "image", halves[0], halves[1], classes, facts=facts))


def _find(folder: str | None, stems: list[str]) -> tuple[Path, list[Path]]:
    """The folder and the paths of four idx files, gzipped or not."""
    for ending in (".gz", ""):
        home = Home(
            name="emnist",
            files=tuple(stem + ending for stem in stems),
            folders=("EMNIST/raw", "EMNIST", "emnist"),
            address="https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        )
        try:
            place = home.find(folder)
        except FedblendError:
            if not ending:
                raise
            continue
        return place, [place / name for name in home.files]
    raise AssertionError("unreachable")


def _read(images: Path, labels: Path, classes: int, from_one: bool) -> Samples:
    x, y = read_pair(images, labels, SIDE, classes + from_one)
    y = y - from_one
    if len(y) and y.min() < 0:
        raise FedblendError(f"{labels}: holds the label 0; valid: 1 to {classes}")
    # Stored column by column: rows and columns change places.
    return Samples(torch.from_numpy(np.ascontiguousarray(x.transpose(0, 1, 3, 2))), torch.from_numpy(y))
