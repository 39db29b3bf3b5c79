"""Files of data sets: find and fingerprint them, read numbers and images, draw a fixed test half."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import struct
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
from pydantic import Field

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError, brief, legible, listed
from fedblend.core.random import stream
from fedblend.core.registry import Float

if TYPE_CHECKING:
    from PIL.Image import Image

TestShare = Annotated[Float, Field(gt=0, lt=1)]
"""Share of the samples that becomes the test half of data without a test half."""

BLOCK = 1 << 20  # Words that are compared at a time


# Finding files --------------------------------------------------------------------------------------------


def existing_path(path: str, field: str) -> Path:
    """The path given in the option ``field``. Raises :class:`FedblendError` if there is no such file or folder."""
    if not Path(path).exists():
        raise FedblendError(f"{field}: there is no '{path}'; give an existing path (relative to the experiment file)")
    return Path(path)


def regular_file(path: Path) -> Path:
    """``path`` itself if it is a file. Raises :class:`FedblendError` otherwise: pipes and devices may have no end."""
    if not path.exists():
        raise FedblendError(f"{path}: there is no such file; repair or remove the link")
    if not path.is_file():
        raise FedblendError(f"{path}: is {'a folder' if path.is_dir() else 'no regular file'}; valid: a file of data")
    return path


def read_ascii(path: Path) -> str:
    """The text of a file. Raises :class:`FedblendError` for other bytes."""
    try:
        return regular_file(path).read_text(encoding="ascii")
    except UnicodeDecodeError:
        raise FedblendError(f"{path}: is no plain text; download it again") from None


def set_data_folder(folder: Path) -> Path:
    """Set $FEDBLEND_DATA for this process and its child processes. Raises :class:`FedblendError` without a folder."""
    if not folder.is_dir():
        raise FedblendError(f"--data {folder}: there is no such folder; give the one that holds your data sets")
    os.environ["FEDBLEND_DATA"] = str(folder.resolve())
    return folder


def data_folder() -> Path | None:
    """The folder named by the environment variable ``FEDBLEND_DATA``, or ``None`` if the variable is not set."""
    value = os.environ.get("FEDBLEND_DATA")
    return Path(value).expanduser() if value else None


@dataclass(frozen=True)
class DataFiles:
    """The files of a data set that fedblend does not download: no SHA-256 of the files at ``address`` is known.

    ``files`` are the paths of all files, relative to their folder ("*" stands for any characters); ``gzipped`` ones may
    end in .gz. ``folders`` are the usual folders, relative to ``$FEDBLEND_DATA``, in the order of their search.
    ``option`` is the data set's option for the folder. ``archive`` is one file there that may stand in its place.
    """

    name: str
    files: tuple[str, ...]
    folders: tuple[str, ...]
    address: str
    option: str = "folder"
    archive: str = ""
    gzipped: bool = False

    def paths(self, root: Path) -> dict[str, Path]:
        """The path of each file that is in ``root``, by its name."""
        endings = (".gz", "") if self.gzipped else ("",)
        found = {name: next((path for end in endings for path in root.glob(name + end)), None) for name in self.files}
        return {name: path for name, path in found.items() if path is not None}

    def find(self, given: str | None) -> Path:
        """The folder with all files, or the archive: ``given``, or else the first usual one."""
        if given is None:
            if (found := self.find_usual()) is None:
                raise self.missing_error()
            return found
        root = existing_path(given, f"data.{self.option}")
        lacking = [name for name in self.files if name not in self.paths(root)]
        if lacking and not (self.archive and root.is_file()):
            raise FedblendError(
                f"data.{self.option}: '{root}' holds no {lacking[0]}; the data set '{self.name}' needs "
                f"{listed(self.files)}{', gzipped or not' if self.gzipped else ''} (from {self.address})"
            )
        return root

    def usual(self) -> list[Path]:
        """The archive and the folders that are searched, in this order."""
        base = data_folder()
        return [base / name for name in (self.archive, *self.folders) if name] if base else []

    def find_usual(self) -> Path | None:
        """The archive or the first usual folder that has all files, or ``None``."""
        for root in self.usual():
            if (root.name == self.archive and root.is_file()) or len(self.paths(root)) == len(self.files):
                return root
        return None

    def missing_error(self) -> FedblendError:
        """The error for files that are in no usual folder."""
        searched = f"they are not in {' nor in '.join(map(str, self.usual()))}"
        if data_folder() is None:
            searched = "$FEDBLEND_DATA is not set, so there is no folder to search"
        return FedblendError(
            f"data: '{self.name}' needs {listed(self.files)}, but {searched}. fedblend does not download them: get "
            f"them from {self.address} and put them into {self.folders[0]}/ under the folder that $FEDBLEND_DATA "
            f"names, or give their folder as data.{self.option}"
        )


# Fingerprints ---------------------------------------------------------------------------------------------


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(regular_file(path), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_array(array: np.ndarray) -> str:
    """SHA-256 of an array's type, shape and bytes in row order, for data without a file of its own."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def fingerprints(paths: Sequence[Path], root: Path) -> dict[str, str]:
    """SHA-256 of files by their path relative to ``root``; two equal files are refused: one has a wrong name."""
    hashes = {path.relative_to(root).as_posix(): sha256_file(path) for path in paths}
    first: dict[str, str] = {}
    for name, sha256 in hashes.items():
        if (other := first.setdefault(sha256, name)) != name:
            raise FedblendError(f"{root / name}: is the same file as {other}; one of the two has a wrong name")
    return hashes


# Reading --------------------------------------------------------------------------------------------------


def parse_numbers(text: str) -> np.ndarray | None:
    """Parse numbers separated by blanks, float64 [n]; ``None`` if the text holds anything else."""
    with warnings.catch_warnings():
        # NumPy only warns about text that is no number, and returns the numbers before it.
        warnings.simplefilter("error")
        try:
            return np.fromstring(text, np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            return None


def read_table(path: Path, columns: int) -> np.ndarray:
    """Read a text file with ``columns`` numbers in each line, float64 [n, columns]. Raises :class:`FedblendError`."""
    text = read_ascii(path)
    lines = text.count("\n") + (not text.endswith("\n"))
    numbers = parse_numbers(text)
    if numbers is None or not len(numbers):
        raise FedblendError(f"{path}: must hold only numbers separated by blanks; download it again")
    if len(numbers) != lines * columns:
        found = f"{len(numbers)} numbers in {lines} lines"
        raise FedblendError(f"{path}: is truncated or another file: {found}; expected {columns} a line")
    return numbers.reshape(-1, columns)


def read_image(path: Path, formats: tuple[str, ...], mode: str, remedy: str, upright: bool = True) -> Image:
    """Read an image file in one of Pillow's modes, "L" or "RGB" (see :func:`converted`).

    ``formats`` are Pillow's names of the formats that are read, whatever the file's name. Without them Pillow chooses
    the format by the file's first bytes, and runs Ghostscript on an EPS file. Raises :class:`FedblendError` with
    ``remedy`` for a damaged file or another format.
    """
    from PIL import Image, UnidentifiedImageError

    # Decoders of several formats raise different errors for a damaged file.
    damaged = (OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, OverflowError, MemoryError)
    try:
        with Image.open(regular_file(path), formats=formats) as image:
            return converted(image, mode, path, upright)
    except UnidentifiedImageError:
        raise FedblendError(f"{path}: is damaged or no image (valid: {', '.join(formats)}); {remedy}") from None
    except (*damaged, struct.error, Image.DecompressionBombError) as error:
        raise FedblendError(f"{path}: is damaged or no image ({legible(error)}); {remedy}") from None


def converted(image: Image, mode: str | None, where: object, upright: bool = True) -> Image:
    """A picture as viewers show it, in mode "L" or "RGB"; without a ``mode`` grey pictures are "L", all others "RGB".

    The colours of a palette are looked up, transparent pixels lie on white, and with ``upright`` the picture is turned
    by its EXIF orientation. Raises :class:`FedblendError` for 16-bit, 32-bit and float pixels, which Pillow would cut
    at 255, and for several frames, of which Pillow would take one.
    """
    from PIL import Image, ImageOps

    if image.mode[0] in "IF":
        valid = "valid: images of 8 bits, or an .npz file of floats"
        raise FedblendError(f"{where}: has more than 8 bits a channel (mode {image.mode}); {valid}")
    frames = False
    # A GIF that was closed has only the frame that was loaded.
    with contextlib.suppress(ValueError):
        frames = getattr(image, "is_animated", False)
    # In MPO, the format of photos from some phones, the first frame is the photo.
    if frames and image.format != "MPO":
        raise FedblendError(f"{where}: holds several frames; valid: one picture, such as a file for each frame")
    if upright:
        image = ImageOps.exif_transpose(image)
    mode = mode or ("L" if image.mode in ("1", "L", "LA") else "RGB")
    if image.mode in ("P", "PA", "LA", "RGBA") or "transparency" in image.info:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert(mode)


# Test half ------------------------------------------------------------------------------------------------


def draw_test_half(groups: np.ndarray, share: float, name: str) -> np.ndarray:
    """Draw the test samples, bool [n]: round(share n_g) samples of each group of n_g.

    The draw depends only on the data set's ``name``, so all runs and seeds have the same test half. A group of one
    sample stays in training.
    """
    n = len(groups)
    shuffled = stream(0, f"test half of {name}").permutation(n)
    order = shuffled[np.argsort(groups[shuffled], kind="stable")]
    _, starts, sizes = np.unique(groups[order], return_index=True, return_counts=True)
    wanted = np.minimum(np.floor(share * sizes + 0.5).astype(np.int64), sizes - 1)
    rank = np.arange(n) - np.repeat(starts, sizes)
    test = np.zeros(n, bool)
    test[order] = rank < np.repeat(wanted, sizes)
    return test


# Names that differ in blanks, and samples in both halves ----------------------------------------------------


def trimmed(name: str) -> str:
    """A name without blanks around it and with single blanks within; a name of blanks alone as it is.

    >>> trimmed("  New   York "), trimmed(" ")
    ('New York', ' ')
    """
    return " ".join(name.split()) or name


def warn_of_blanks(names: Collection[str], where: str) -> None:
    """Warn of different names that are read as one because only blanks differ."""
    if more := len(names) - len({trimmed(name) for name in names}):
        example = next(name for name in names if name != trimmed(name))
        warnings.warn(
            f"{where}: {more} of {len(names)} names differ from others in blanks only, such as {brief(example)}; "
            "such names are read as one",
            stacklevel=2,
        )


def _with_joined_names(data: Dataset) -> Dataset:
    """The data set with trimmed names of clients and classes, of which those that are then the same are one."""
    clients, of_client = _joined(data.client_names, f"data set '{data.name}', clients")
    classes, of_class = _joined(data.classes, f"data set '{data.name}', classes")
    halves = [data.train, data.test]
    if len(clients) < len(of_client):
        halves = [replace(half, client=None if half.client is None else of_client[half.client]) for half in halves]
    if len(classes) < len(of_class):
        halves = [replace(half, y=torch.from_numpy(of_class)[half.y]) for half in halves]
    return replace(data, train=halves[0], test=halves[1], client_names=clients, classes=classes)


def _joined(names: Collection[str], where: str) -> tuple[tuple[str, ...], np.ndarray]:
    """The different trimmed names in their order, and the place of each given name among them."""
    warn_of_blanks(names, where)
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(trimmed(name), len(numbers)) for name in names]
    return tuple(numbers), np.array(places, np.int64)


def warn_of_repeats(data: Dataset) -> None:
    """Warn of test samples that are training samples too: scores on them are too good."""
    if count := repeats(data.train, data.test):
        warnings.warn(
            f"data set '{data.name}': {count:,} of {len(data.test):,} test samples are training samples too (equal "
            "inputs and targets), so that test scores are too good; remove repeated samples, or keep all copies in one "
            "half",
            stacklevel=2,
        )


def repeats(train: Samples, test: Samples) -> int:
    """How many test samples equal a training sample in the bytes of input and target.

    Only samples whose inputs have a sum in common, weighted at random modulo 2^64, are compared.
    """
    halves = [(_rows(half.x), _rows(half.y)) for half in (train, test)]
    words = [x.view(f"u{math.gcd(x.shape[1], 8)}") for x, _ in halves]
    weights = stream(0, "repeats").integers(1, 2**64, words[0].shape[1], np.uint64)
    # Block by block: NumPy converts words to 64 bits.
    step = max(1, BLOCK // len(weights))
    sums = [np.concatenate([one[i : i + step] @ weights for i in range(0, len(one), step)]) for one in words]
    likely = np.isin(sums[1], sums[0])
    if not likely.any():
        return 0
    whole = [
        np.concatenate([x[rows], y[rows]], 1).view(f"V{x.shape[1] + y.shape[1]}").ravel()
        for (x, y), rows in zip(halves, (np.isin(sums[0], sums[1][likely]), likely), strict=True)
    ]
    return int(np.isin(whole[1], whole[0]).sum())


def _rows(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of each row, uint8 [n, bytes]."""
    return tensor.reshape(len(tensor), -1).contiguous().numpy().view(np.uint8)


# Data sets ---------------------------------------------------------------------------------------------------


def by_half(test: np.ndarray, *arrays: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """The arrays of the training half and of the test half, whose samples are ``test``, bool [n]."""
    return [tuple(array[rows] for array in arrays) for rows in (~test, test)]


def made(
    name: str,
    kind: Literal["image", "text", "features", "tokens"],
    halves: Sequence[Sequence[np.ndarray]],
    classes: Sequence[str],
    facts: tuple[str, dict[str, str], str],
    clients: Sequence[str] = (),
    labels: Sequence[str] = (),
    vocabulary: int = 0,
) -> Dataset:
    """A checked data set of two halves, each of the arrays x and y, and perhaps the client of each sample.

    ``facts`` are the source, the SHA-256 of its files, and the rule of the split.
    """
    # Tensors must be writable, which arrays over the bytes of a file are not.
    train, test = (
        Samples(*(torch.from_numpy(np.require(array, requirements="W")) for array in (x, y)), *client)  # type: ignore[arg-type]
        for x, y, *client in halves
    )
    named = dict(zip(("source", "files", "notes"), facts, strict=True))
    return check(Dataset(name, kind, train, test, tuple(classes), tuple(clients), vocabulary, named, tuple(labels)))


def _test_share_hint(data: Dataset) -> str:
    """Why a drawn test half may be empty, and which share would take a sample of the largest client or class."""
    y = data.train.y.numpy()
    groups = data.train.client if data.train.client is not None else y if data.classes else np.zeros(len(y))
    largest = int(np.unique(groups, return_counts=True)[1].max(initial=1))
    more = f"; if it is drawn, give a larger data.test_share: {math.ceil(50 / largest) / 100:g}" if largest > 1 else ""
    return f"; data.test_share takes none of a client or class with a single sample{more}"


def check(data: Dataset) -> Dataset:
    """``data`` with names that differ in blanks only as one. Raises :class:`FedblendError` if it is not sound."""
    for half, samples in (("train", data.train), ("test", data.test)):
        for fault in _faults(data, samples, half):
            raise FedblendError(f"data set '{data.name}', {half} half: {fault}")
    return _with_joined_names(data)


def _faults(data: Dataset, samples: Samples, half: str) -> Iterator[str]:
    """What is wrong with one half; a check may rely on those before it."""
    x, y, shape = samples.x, samples.y, list(data.train.x.shape[1:])
    if len(x) != len(y):
        yield f"x has {len(x)} samples but y has {len(y)}; they must match"
    if len(y) == 0:
        yield f"it is empty; at least one sample is needed{_test_share_hint(data) if half == 'test' else ''}"
    if list(x.shape[1:]) != shape:
        yield f"samples are of shape {list(x.shape[1:])}, the training ones of {shape}; they must match"
    for name, tensor in (("x", x), ("y", y)):
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            bad = int((~tensor.reshape(len(tensor), -1).isfinite()).any(1).sum())
            yield f"{name} holds NaN or infinity in {bad} samples; all numbers must be finite"
    if data.classes and (y.min() < 0 or y.max() >= len(data.classes)):
        yield f"labels reach from {int(y.min())} to {int(y.max())}; valid: 0 to {len(data.classes) - 1}"
