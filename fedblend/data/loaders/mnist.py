"""MNIST and Fashion-MNIST: four idx files from a folder, a Debian package, or a download."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import check, data_folder, existing_path, regular_file, sha256_file

SIDE = 28
"""Height and width of the images in pixels."""

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Source:
    """Where the four files of a data set are searched, and their download."""

    name: str
    origin: str
    address: str
    sha256: dict[str, str]
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    debian: str | None = None

    @property
    def system_folder(self) -> Path | None:
        """The folder of the Debian package's files, or ``None`` without a package."""
        return Path("/usr/share/datasets") / self.debian.removeprefix("dataset-") if self.debian else None


MNIST = Source(
    name="mnist",
    origin="LeCun, Cortes, Burges: The MNIST database of handwritten digits; CC BY-SA 3.0",
    address="https://ossci-datasets.s3.amazonaws.com/mnist/",
    sha256={
        "train-images-idx3-ubyte": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "train-labels-idx1-ubyte": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "t10k-images-idx3-ubyte": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "t10k-labels-idx1-ubyte": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    },
    folders=("mnist", "mnist/raw", "MNIST/raw", "MNIST"),
    classes=tuple("0123456789"),
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    origin="Xiao, Rasul, Vollgraf 2017: Fashion-MNIST (Zalando Research); MIT",
    address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    sha256={
        "train-images-idx3-ubyte": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "train-labels-idx1-ubyte": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "t10k-images-idx3-ubyte": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "t10k-labels-idx1-ubyte": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    },
    folders=("fashion-mnist", "fashion-mnist/raw", "FashionMNIST/raw", "FashionMNIST"),
    classes=(
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
        "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    debian="dataset-fashion-mnist",
)  # fmt: skip


@part("dataset", "mnist")
class Mnist:
    """MNIST: 60,000 training and 10,000 test images of digits, 28 x 28, ink as 255; CC BY-SA 3.0.

    ``folder`` holds the four idx files, gzipped or not. By default they are searched in ``$FEDBLEND_DATA/mnist`` and
    ``$FEDBLEND_DATA/MNIST/raw``, and otherwise downloaded once (11 MB, checked against their SHA-256).
    Raises :class:`FedblendError` for files that are missing or damaged.
    """

    folder: FilePath | None = None
    """The folder with the four idx files, gzipped or not; by default they are searched, otherwise downloaded."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1, 28, 28] and y int64 [n]."""
        return load_idx(MNIST, self.folder)


@part("dataset", "fashion-mnist")
class FashionMnist:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28, 10 classes; MIT.

    ``folder`` holds the four idx files, gzipped or not. By default they are searched in
    ``$FEDBLEND_DATA/fashion-mnist``, then in the folder of Debian's package ``dataset-fashion-mnist``, and otherwise
    downloaded once (31 MB, checked against their SHA-256). Raises :class:`FedblendError` for files that are missing or
    damaged.
    """

    folder: FilePath | None = None
    """The folder with the four idx files, gzipped or not; by default they are searched, otherwise downloaded."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1, 28, 28] and y int64 [n]."""
        return load_idx(FASHION_MNIST, self.folder)


def load_idx(source: Source, folder: str | None) -> Dataset:
    """Read the four files of ``source`` as one data set with its publisher's split; download them if need be."""
    paths = local_files(source, folder) or {name: _download(source, name) for name in source.sha256}
    halves = {}
    for half, (images, labels) in FILES.items():
        x, y = read_pair(paths[images], paths[labels], SIDE, len(source.classes))
        # A copy, because an array over the bytes of a file is read-only, and tensors must be writable.
        halves[half] = Samples(torch.from_numpy(np.array(x)), torch.from_numpy(y))
    facts: dict[str, Any] = {
        "source": source.origin,
        "files": {path.name: sha256_file(path) for path in paths.values()},
        "notes": "the publisher's own split",
    }
    return check(Dataset(source.name, "image", halves["train"], halves["test"], source.classes, facts=facts))


def local_files(source: Source, folder: str | None = None) -> dict[str, Path]:
    """The path of each of the four files in ``folder`` or a usual folder; empty if they must be downloaded."""
    if folder is not None:
        root = existing_path(folder, "data.folder")
        paths = _files_in(root)
        missing = [name for name in source.sha256 if name not in paths]
        if missing:
            raise FedblendError(
                f"data.folder: '{root}' holds no {missing[0]} (nor {missing[0]}.gz); the data set "
                f"'{source.name}' needs {', '.join(source.sha256)}, gzipped or not"
            )
        return paths
    base = data_folder()
    roots = [base / folder for folder in source.folders] if base else []
    if source.system_folder:
        roots.append(source.system_folder)
    for root in roots:
        paths = _files_in(root)
        if len(paths) == len(source.sha256):
            return paths
    return {}


def _files_in(folder: Path) -> dict[str, Path]:
    """The paths of those of the four files that are in ``folder``, gzipped or not."""
    paths = {}
    for name in (*FILES["train"], *FILES["test"]):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                paths[name] = path
                break
    return paths


def _download(source: Source, name: str) -> Path:
    """Download one file into the user's cache, unless it is there, and check its SHA-256."""
    from fedblend.data.loaders.download import download

    package = f", or install Debian's package {source.debian}" if source.debian else ""
    remedy = (
        f"put the four files {', '.join(f'{n}.gz' for n in source.sha256)} into a folder and give "
        f"data.folder, or into {source.folders[0]}/ under the folder that $FEDBLEND_DATA names{package}"
    )
    return download(f"{source.address}{name}.gz", source.sha256[name], source.name, remedy)


# The idx format -------------------------------------------------------------------------------------------

UNSIGNED_BYTE = 0x08
"""Third byte of the magic number for elements that are unsigned bytes, the only type of these data sets."""

KINDS = {1: "labels", 3: "images"}

LARGEST = 2**30
"""Most bytes of an array; the largest half of these data sets, of EMNIST, has 5.5 * 10^8."""


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file, gzipped or not, with an array of ``dimensions`` axes, uint8.

    Images have 3 axes ([n, H, W], magic number 0x00000803), labels 1 ([n], 0x00000801). Raises :class:`FedblendError`
    with the file if it cannot be unpacked, has another magic number, or is not as long as its header's shape requires.
    """
    kind = KINDS.get(dimensions, f"arrays of {dimensions} axes")
    magic = struct.pack(">BBBB", 0, 0, UNSIGNED_BYTE, dimensions)
    header = 4 + 4 * dimensions
    file = _opened(path)
    try:
        with file:
            head = file.read(header)
            if head[:4] != magic:
                raise FedblendError(
                    f"{path}: begins with 0x{head[:4].hex() or '(nothing)'}; idx {kind} begin with 0x{magic.hex()}. "
                    "Is it another file under this name?"
                )
            if len(head) < header:
                raise FedblendError(f"{path}: is truncated: {len(head)} bytes, less than its header of {header}")
            shape = struct.unpack(f">{dimensions}I", head[4:])
            size = math.prod(shape)
            if size > LARGEST:
                raise FedblendError(
                    f"{path}: is damaged: its header has shape {list(shape)}, more than {LARGEST} bytes; download it "
                    "again"
                )
            # One byte more than expected, and no more: a small gzipped file may unpack to any size.
            body = file.read(size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise FedblendError(f"{path}: truncated or damaged, cannot be unpacked ({error}); download it again") from None
    if len(body) != size:
        fault, found = ("is truncated", str(header + len(body))) if len(body) < size else ("is too long", "more")
        raise FedblendError(
            f"{path}: {fault}: its header has shape {list(shape)}, which needs {header + size} bytes, "
            f"but the file has {found}; download it again"
        )
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_pair(images: Path, labels: Path, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images uint8 [n, 1, size, size] and labels int64 [n]. Raises :class:`FedblendError` if they do not match."""
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (size, size):
        found = f"{x.shape[1]} x {x.shape[2]}"
        raise FedblendError(f"{images}: images have {found} pixels; expected {size} x {size}")
    if len(x) != len(y):
        raise FedblendError(
            f"{images} has {len(x)} images but {labels} has {len(y)} labels; the two must be of one half"
        )
    if len(y) and y.max() >= classes:
        raise FedblendError(f"{labels}: has the label {y.max()}; valid: 0 to {classes - 1}")
    return x[:, None], y.astype(np.int64)


def _opened(path: Path) -> BinaryIO:
    """The open file, unpacked as it is read if it is gzipped (by its first bytes, not its name)."""
    file = open(regular_file(path), "rb")  # noqa: SIM115 (closed by the caller)
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    file.close()
    return cast(BinaryIO, gzip.open(path))
