"""Pictures in folders, one folder a class."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import TestShare, draw_test_half, existing
from fedblend.data.loaders.pictures import read_picture

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""The formats of files with these endings, by Pillow's names; one with another's ending is read as well."""


@part("dataset", "image-folder")
class ImageFolder:
    """Pictures under ``path``: ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or only ``CLASS/*.png``.

    Classes are the folders' names in alphabetical order. Without ``train`` and ``test``,
    ``test_share`` of each class is test, by a draw that depends on nothing but the folder's name.
    Raises :class:`FedblendError` that names the file for what is no picture, is damaged, or is of another
    size.
    """

    path: FilePath
    """The folder; in an experiment file relative to that file."""
    size: Count | None = None
    """Height and width in pixels to which pictures are resized (bilinear); without it all must be of one size."""
    grey: bool = False
    """One channel instead of red, green and blue."""
    test_share: TestShare = 0.2
    """Share of each class that is test, where there are no folders `train` and `test`."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 1 or 3, H, W], y int64 [n]."""
        root = existing(self.path, "data.path")
        if not root.is_dir():
            raise FedblendError(f"data.path: '{root}' is a file; it must name a folder with a folder for each class")
        halves = [root / "train", root / "test"]
        own = all(half.is_dir() for half in halves)
        classes = _classes(halves[0] if own else root)
        listed = [_listed(half, classes) for half in (halves if own else [root])]
        digest = hashlib.sha256()
        read = [(self._read([file for file, _ in files], root, digest), _labels(files)) for files in listed]
        if not own:
            ((x, y),) = read
            test = draw_test_half(y, self.test_share, root.name)
            read = [(x[~test], y[~test]), (x[test], y[test])]
        count = sum(len(files) for files in listed)
        facts = {
            "source": str(root),
            "files": {f"{count} pictures, paths and contents": digest.hexdigest()},
            "notes": "the folder's own split" if own else f"test: {self.test_share:g} of each class, drawn by name",
        }
        train, test_half = (Samples(torch.from_numpy(x), torch.from_numpy(y)) for x, y in read)
        return check(Dataset(root.name, "image", train, test_half, classes, facts=facts))

    def _read(self, files: list[Path], root: Path, digest: hashlib._Hash) -> np.ndarray:
        """The pictures as uint8 [n, C, H, W]; each one's path and bytes go into ``digest``."""
        from PIL import Image

        pictures: list[np.ndarray] = []
        for file in files:
            raw = file.read_bytes()
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + raw)
            picture = read_picture(file, FORMATS, "L" if self.grey else "RGB", "mend it or take it away")
            if self.size:
                picture = picture.resize((self.size, self.size), Image.Resampling.BILINEAR)
            pixels = np.asarray(picture, np.uint8)
            if pictures and pixels.shape != pictures[0].shape:
                this, first = ("{1} x {0}".format(*p.shape) for p in (pixels, pictures[0]))
                raise FedblendError(
                    f"{file}: is of {this} pixels (width x height), {files[0].name} of {first}; "
                    "give data.size to bring all to one size"
                )
            pictures.append(pixels)
        stacked = np.stack(pictures)
        return stacked[:, None] if self.grey else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def _classes(folder: Path) -> tuple[str, ...]:
    """The names of the folders in ``folder``, in alphabetical order. Raises if there are none."""
    names = sorted(f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith("."))
    if not names:
        raise FedblendError(f"{folder}: holds no folders; one folder of pictures for each class is needed")
    return tuple(names)


def _listed(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Every picture under ``folder`` with its class, class by class, in alphabetical order."""
    extra = sorted(set(_classes(folder)) - set(classes))
    if extra:
        raise FedblendError(f"{folder / extra[0]}: is no class of the training half; valid: {', '.join(classes)}")
    listed = []
    for label, name in enumerate(classes):
        place = folder / name
        inside = sorted(place.iterdir()) if place.is_dir() else []
        files = [f for f in inside if f.suffix.lower() in SUFFIXES and not f.name.startswith(".")]
        if not files:
            raise FedblendError(f"{place}: holds no pictures; valid: {', '.join(SUFFIXES)}")
        listed += [(f, label) for f in files]
    return listed


def _labels(files: list[tuple[Path, int]]) -> np.ndarray:
    return np.array([label for _, label in files], np.int64)
