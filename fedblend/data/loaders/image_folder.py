"""Images in folders, one folder for each class."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, FilePath, part
from fedblend.data.loaders.files import (
    TestShare,
    by_half,
    draw_test_half,
    existing_path,
    made,
    read_image,
    regular_file,
    warn_of_repeats,
)

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "PPM", "TIFF", "WEBP")
"""Pillow's names of the formats with these suffixes; each format is read under each suffix."""

HALVES = (("train", "training"), ("test", "testing", "val", "valid", "validation"))
"""Names of the folders of the training and the test half, in small letters; the first that is there is read."""


@part("dataset", "image-folder")
class ImageFolder:
    """Images under ``path``: ``train/CLASS/*.png`` and ``test/CLASS/*.png``, or only ``CLASS/*.png``.

    With ``clients``, a folder for each client lies above those of its classes: ``train/CLIENT/CLASS/*.png``, or
    ``CLIENT/CLASS/*.png``. Classes are the folders' names in alphabetical order. Without a folder ``test``, a folder
    ``val``, ``valid`` or ``validation`` beside ``train`` is the test half. Without ``train`` and ``test``,
    ``test_share`` of each class (of each client's images, with ``clients``) is test, by a draw that depends only on the
    folder's name. Files with other endings than those of images are left out. Raises :class:`FedblendError` with the
    file for damaged images, images of another size, and images with more than 8 bits a channel.
    """

    path: FilePath
    """The folder; in an experiment file relative to that file."""
    size: Count | None = None
    """Height and width in pixels to which images are resized (bilinear); by default all must have one size."""
    grey: bool = False
    """One channel instead of red, green and blue."""
    clients: bool = False
    """Whether a folder for each client, such as a hospital, lies above its classes' folders."""
    test_share: TestShare = 0.2
    """Share of each class, or of each client's images, that is test, without folders `train` and `test`."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1 or 3, H, W] and y int64 [n]."""
        return load_classes(self.path, "image", SUFFIXES, self.clients, self.test_share, self._read)

    def _read(self, files: list[Path], root: Path, digest: hashlib._Hash) -> np.ndarray:
        """Read images as uint8 [n, C, H, W], and add their paths and bytes to ``digest``."""
        from PIL import Image

        images: list[np.ndarray] = []
        for file in files:
            read_counted(file, root, digest)
            image = read_image(file, FORMATS, "L" if self.grey else "RGB", "repair or remove it")
            if self.size:
                image = image.resize((self.size, self.size), Image.Resampling.BILINEAR)
            pixels = np.asarray(image, np.uint8)
            if images and pixels.shape != images[0].shape:
                this, first = ("{1} x {0}".format(*p.shape) for p in (pixels, images[0]))
                found = f"has {this} pixels (width x height), {files[0].name} has {first}"
                raise FedblendError(f"{file}: {found}; give data.size to resize all images")
            images.append(pixels)
        stacked = np.stack(images)
        return stacked[:, None] if self.grey else np.ascontiguousarray(stacked.transpose(0, 3, 1, 2))


def read_counted(file: Path, root: Path, digest: hashlib._Hash) -> bytes:
    """The bytes of a file, which are added to ``digest`` with its path below ``root``."""
    raw = regular_file(file).read_bytes()
    digest.update(file.relative_to(root).as_posix().encode() + b"\0" + raw)
    return raw


def load_classes(
    path: str,
    kind: Literal["image", "features"],
    suffixes: tuple[str, ...],
    by_client: bool,
    test_share: float,
    read: Callable[[list[Path], Path, hashlib._Hash], np.ndarray],
) -> Dataset:
    """Load the samples in ``train/CLASS/`` and ``test/CLASS/``, or in ``CLASS/``, one file a sample.

    ``by_client``: folders of clients lie above those of classes. ``read`` makes an array [n, ...] of some files, and
    adds their paths (below the folder) and bytes to a checksum.
    """
    root = existing_path(path, "data.path")
    if not root.is_dir():
        raise FedblendError(f"data.path: '{root}' is a file; it must be a folder with a folder for each class")
    halves = _halves(root)
    has_halves = halves != [root]
    clients = sorted({name for half in halves for name in _folders(half, "client")}) if by_client else []
    groups = [[half / name for name in clients if (half / name).is_dir()] if clients else [half] for half in halves]
    classes = sorted({name for folder in groups[0] for name in _folders(folder, "class")})
    files = [[one for folder in group for one in _labelled(folder, classes, suffixes, by_client)] for group in groups]
    digest = hashlib.sha256()
    arrays = []
    for half in files:
        x, y = read([path for path, _ in half], root, digest), np.array([label for _, label in half], np.int64)
        owner = [np.array([clients.index(path.parent.parent.name) for path, _ in half], np.int64)] if clients else []
        arrays.append((x, y, *owner))
    if not has_halves:
        arrays = by_half(draw_test_half(arrays[0][-1], test_share, root.name), *arrays[0])
    shapes = [list(x.shape[1:]) for x, *_ in arrays]
    if shapes[0] != shapes[1]:
        raise FedblendError(f"{root}: samples of train/ are of shape {shapes[0]}, those of test/ of {shapes[1]}")
    hashes = {f"{sum(map(len, files))} files, paths and contents": digest.hexdigest()}
    drawn = f"test: {test_share:g} of each {'client' if clients else 'class'}, drawn by name"
    facts = str(root), hashes, "the folder's own split" if has_halves else drawn
    data = made(root.name, kind, arrays, classes, facts, clients)
    warn_of_repeats(data)
    return data


def _halves(root: Path) -> list[Path]:
    """The folders of the training and the test half, or only ``root``. Raises for one half without the other."""
    folders = {one.name.lower(): one for one in root.iterdir() if one.is_dir()}
    found = [path for names in HALVES for path in [folders[name] for name in names if name in folders][:1]]
    # A class may have such a name, as a train among vehicles has.
    if len(found) == 1 and any(one.is_dir() and not one.name.startswith(".") for one in found[0].iterdir()):
        valid = f"'train' and 'test' (or 'val', 'valid', 'validation'), or data.path = '{found[0]}'"
        raise FedblendError(f"{root}: has the folder '{found[0].name}', but no other half; valid: {valid}")
    return found if len(found) == 2 else [root]


def _folders(folder: Path, of: str) -> list[str]:
    """The names of the folders in ``folder``, one for each class or client. Raises if there are none."""
    names = [f.name for f in folder.iterdir() if f.is_dir() and not f.name.startswith(".")]
    if not names:
        raise FedblendError(f"{folder}: holds no folders; one folder for each {of} is needed")
    return names


def _labelled(
    folder: Path, classes: Sequence[str], suffixes: tuple[str, ...], may_lack: bool
) -> list[tuple[Path, int]]:
    """Each file under ``folder`` with its label, in alphabetical order; ``may_lack``: not all classes need be there."""
    extra = sorted(set(_folders(folder, "class")) - set(classes))
    if extra:
        raise FedblendError(f"{folder / extra[0]}: is no class of the training half; valid: {', '.join(classes)}")
    labelled: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        root = folder / name
        if may_lack and not root.is_dir():
            continue
        entries = sorted(root.iterdir()) if root.is_dir() else []
        files = [f for f in entries if f.suffix.lower() in suffixes and not f.name.startswith(".")]
        deeper = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        if deeper and (files or may_lack):
            raise FedblendError(f"{deeper[0]}: is a folder in the folder of a class; valid: only files there")
        if not files:
            hint = "; with a folder for each client above those of classes, give data.clients = true" if deeper else ""
            raise FedblendError(f"{root}: holds no samples; valid: {', '.join(suffixes)}{hint}")
        labelled += [(f, label) for f in files]
    return labelled
