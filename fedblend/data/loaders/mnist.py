"""MNIST and Fashion-MNIST: four idx files from a folder, a Debian package, or a download."""

from __future__ import annotations

import functools
import gzip
import io
import math
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import DataFiles, made, regular_file, sha256_file

SIDE = 28  # Height and width of the images in pixels
FILES = tuple(f"{half}-{kind}-ubyte" for half in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


@dataclass(frozen=True, kw_only=True)
class Source(DataFiles):
    """The four files of a data set, which are downloaded gzipped from ``address`` where they are in no usual folder."""

    files: tuple[str, ...] = FILES
    gzipped: bool = True
    origin: str = ""
    sha256: tuple[str, ...] = ()
    """Of each gzipped file."""
    classes: tuple[str, ...] = ()
    debian: str = ""
    """A Debian package that has the files."""

    def usual(self) -> list[Path]:
        packaged = Path("/usr/share/datasets") / self.debian.removeprefix("dataset-")
        return [*super().usual(), *([packaged] if self.debian else [])]


MNIST = Source(
    name="mnist",
    origin="LeCun, Cortes, Burges: The MNIST database of handwritten digits; CC BY-SA 3.0",
    address="https://ossci-datasets.s3.amazonaws.com/mnist/",
    sha256=(
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
    folders=("mnist", "mnist/raw", "MNIST/raw", "MNIST"),
    classes=tuple("0123456789"),
)

FASHION_MNIST = Source(
    name="fashion-mnist",
    origin="Xiao, Rasul, Vollgraf 2017: Fashion-MNIST (Zalando Research); MIT",
    address="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    sha256=(
        "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    ),
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

    As ``mnist``; the files are searched in ``$FEDBLEND_DATA/fashion-mnist``, then in the folder of Debian's package
    ``dataset-fashion-mnist``, and otherwise downloaded once (31 MB).
    """

    folder: FilePath | None = None
    """The folder with the four idx files, gzipped or not; by default they are searched, otherwise downloaded."""

    def load(self) -> Dataset:
        """Load x uint8 [n, 1, 28, 28] and y int64 [n]."""
        return load_idx(FASHION_MNIST, self.folder)


def load_idx(source: Source, folder: str | None) -> Dataset:
    """Read the four files of ``source`` as one data set with its publisher's split; download them if need be."""
    paths = local_files(source, folder) or {name: _download(source, i) for i, name in enumerate(FILES)}
    halves = [read_pair(paths[FILES[i]], paths[FILES[i + 1]], SIDE, len(source.classes)) for i in (0, 2)]
    hashes = {path.name: sha256_file(path) for path in paths.values()}
    return made(source.name, "image", halves, source.classes, (source.origin, hashes, "the publisher's own split"))


def local_files(source: Source, folder: str | None = None) -> dict[str, Path]:
    """The path of each of the four files in ``folder`` or a usual folder; empty if they must be downloaded."""
    root = source.find_usual() if folder is None else source.find(folder)
    return source.paths(root) if root else {}


def _download(source: Source, number: int) -> Path:
    package = f", or install Debian's package {source.debian}" if source.debian else ""
    remedy = (
        f"put the four files {', '.join(f'{n}.gz' for n in FILES)} into a folder and give "
        f"data.folder, or into {source.folders[0]}/ under the folder that $FEDBLEND_DATA names{package}"
    )
    return download(f"{source.address}{FILES[number]}.gz", source.sha256[number], source.name, remedy)


# Downloads, with progress, resume after a break, and a check of the SHA-256 ------------------------------------


TIMEOUT_S = 30  # Seconds without a response after which a download fails
BLOCK = 1 << 16  # Bytes that are written at a time


def _resume(kept: Path, url: str, output_file: str, pooch: Any) -> None:
    """A downloader for pooch that stores received bytes in ``kept``, and requests only the remaining bytes.

    If the server ignores the range and sends the whole file, ``kept`` is overwritten. pooch checks the SHA-256 of the
    complete file.
    """
    import requests
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    label = TextColumn("downloading {task.description}")
    columns = (label, BarColumn(), DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    done = kept.stat().st_size if kept.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={done}-"} if done else {})
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S) as response:
        if response.status_code == requests.codes.requested_range_not_satisfiable:
            # The part is as long as the file: it is complete, or a part of another file.
            os.replace(kept, output_file)
            return
        response.raise_for_status()
        is_partial = response.status_code == requests.codes.partial_content
        length = response.headers.get("Content-Length")
        kept.parent.mkdir(parents=True, exist_ok=True)
        done = done if is_partial else 0
        total = done + int(length) if length else None
        with open(kept, "ab" if is_partial else "wb") as file, progress:
            task = progress.add_task(kept.stem, completed=done, total=total)
            for block in response.iter_content(BLOCK):
                progress.advance(task, file.write(block))
    if total is not None and kept.stat().st_size < total:
        raise requests.ConnectionError("the connection was lost; the next attempt resumes here")
    os.replace(kept, output_file)


def download(url: str, sha256: str, folder: str, remedy: str) -> Path:
    """Download ``url`` into the user's cache, unless it is there, and return its path.

    Raises :class:`FedblendError` with ``remedy`` if the download fails or the file has another SHA-256.
    """
    import pooch
    import requests

    name = url.rsplit("/", 1)[-1]
    cache = Path(pooch.os_cache("fedblend")) / folder
    try:
        pooch.get_logger().setLevel("WARNING")
        downloader = functools.partial(_resume, cache / f"{name}.part")
        return Path(pooch.retrieve(url, f"sha256:{sha256}", fname=name, path=cache, downloader=downloader))
    except (requests.RequestException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        if error.args and getattr(error.args[0], "reason", None) and isinstance(error, requests.ConnectionError):
            # The message of requests has several lines.
            reason = f"no connection to {urlsplit(url).netloc}"
        raise FedblendError(f"{folder}: cannot download {name} from {url} ({reason}); {remedy}") from None


# The idx format -------------------------------------------------------------------------------------------

UNSIGNED_BYTE = 0x08
"""Third byte of the magic number for elements that are unsigned bytes, the only type of these data sets."""

KINDS = {1: "labels", 3: "images"}

LARGEST = 2**30  # Most bytes of an array; the largest half of these data sets, of EMNIST, has 5.5 * 10^8


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file, gzipped or not, with an array of ``dimensions`` axes, uint8.

    Images have 3 axes ([n, H, W], magic number 0x00000803), labels 1 ([n], 0x00000801). Raises :class:`FedblendError`
    with the file if it cannot be unpacked, has another magic number, or is not as long as its header's shape requires.
    """
    magic = struct.pack(">BBBB", 0, 0, UNSIGNED_BYTE, dimensions)
    header, body, shape = 4 + 4 * dimensions, b"", ()
    try:
        with _opened(path) as file:
            head = file.read(header)
            if head[:4] == magic and len(head) == header:
                shape = struct.unpack(f">{dimensions}I", head[4:])
                # One byte more than expected, and no more: a small gzipped file may unpack to any size.
                body = file.read(math.prod(shape) + 1) if math.prod(shape) <= LARGEST else b""
    except (EOFError, OSError, zlib.error) as error:
        raise FedblendError(f"{path}: truncated or damaged, cannot be unpacked ({error}); download it again") from None
    size = math.prod(shape)
    if head[:4] != magic:
        begin = f"0x{head[:4].hex() or '(nothing)'}; idx {KINDS[dimensions]} begin with 0x{magic.hex()}"
        raise FedblendError(f"{path}: begins with {begin}. Is it another file under this name?")
    if len(head) < header:
        raise FedblendError(f"{path}: is truncated: {len(head)} bytes, less than its header of {header}")
    if size > LARGEST:
        raise FedblendError(f"{path}: is damaged: its header has shape {list(shape)}, more than {LARGEST} bytes")
    if len(body) != size:
        fault, found = ("is truncated", str(header + len(body))) if len(body) < size else ("is too long", "more")
        needs = f"its header has shape {list(shape)}, which needs {header + size} bytes"
        raise FedblendError(f"{path}: {fault}: {needs}, but the file has {found}; download it again")
    return np.frombuffer(body, np.uint8).reshape(shape)


def read_pair(images: Path, labels: Path, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Read images uint8 [n, 1, size, size] and labels int64 [n]. Raises :class:`FedblendError` if they do not match."""
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (size, size):
        raise FedblendError(f"{images}: images have {x.shape[1]} x {x.shape[2]} pixels; expected {size} x {size}")
    if len(x) != len(y):
        raise FedblendError(f"{images} has {len(x)} images but {labels} has {len(y)} labels; valid: those of one half")
    if len(y) and y.max() >= classes:
        raise FedblendError(f"{labels}: has the label {y.max()}; valid: 0 to {classes - 1}")
    return x[:, None], y.astype(np.int64)


def _opened(path: Path) -> io.BufferedIOBase:
    """The open file, unpacked as it is read if it is gzipped (by its first bytes, not its name)."""
    with open(regular_file(path), "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return gzip.open(path) if is_packed else open(path, "rb")
