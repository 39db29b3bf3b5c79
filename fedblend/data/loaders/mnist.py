"""MNIST and Fashion-MNIST: four idx files, from a folder, a package of the system, or the net."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import data_folder, existing, sha256_file
from fedblend.data.loaders.idx import read_pair

SIDE = 28
"""Height and width of the images in pixels."""

FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Source:
    """Where the four files of one data set may come from."""

    name: str
    origin: str
    address: str
    sha256: dict[str, str]
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    debian: str | None = None

    @property
    def system_folder(self) -> Path | None:
        """Where the Debian package, if there is one, puts the files."""
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

    ``folder`` holds the four idx files, gzipped or not. Without it they are looked for in
    ``$FEDBLEND_DATA/mnist`` and ``$FEDBLEND_DATA/MNIST/raw``, and else fetched once (11 MB, checked
    against their SHA-256). Raises :class:`FedblendError` for files that are missing or damaged.
    """

    folder: FilePath | None = None
    """The folder with the four idx files, gzipped or not; without it they are looked for, else fetched."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 1, 28, 28], y int64 [n]."""
        return load_idx(MNIST, self.folder)


@part("dataset", "fashion-mnist")
class FashionMnist:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28, 10 classes; MIT.

    ``folder`` holds the four idx files, gzipped or not. Without it they are looked for in
    ``$FEDBLEND_DATA/fashion-mnist``, then where Debian's package ``dataset-fashion-mnist`` puts them,
    and else fetched once (31 MB, checked against their SHA-256). Raises :class:`FedblendError` for
    files that are missing or damaged.
    """

    folder: FilePath | None = None
    """The folder with the four idx files, gzipped or not; without it they are looked for, else fetched."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, 1, 28, 28], y int64 [n]."""
        return load_idx(FASHION_MNIST, self.folder)


def load_idx(source: Source, folder: str | None) -> Dataset:
    """Read the four files of ``source`` as one data set with its publisher's split."""
    paths = find(source, folder)
    halves = {}
    for half, (images, labels) in FILES.items():
        x, y = read_pair(paths[images], paths[labels], SIDE, len(source.classes))
        # One copy: an array over the bytes of a file is read-only, which tensors cannot be.
        halves[half] = Samples(torch.from_numpy(np.array(x)), torch.from_numpy(y))
    facts: dict[str, Any] = {
        "source": source.origin,
        "files": {path.name: sha256_file(path) for path in paths.values()},
        "notes": "the publisher's own split",
    }
    return check(Dataset(source.name, "image", halves["train"], halves["test"], source.classes, facts=facts))


def find(source: Source, folder: str | None) -> dict[str, Path]:
    """The path of each of the four files: in ``folder``, in the usual places, or fetched from the net."""
    return at_hand(source, folder) or {name: _fetch(source, name) for name in source.sha256}


def at_hand(source: Source, folder: str | None = None) -> dict[str, Path]:
    """The path of each of the four files in ``folder``, or in the usual places; nothing where they must be fetched."""
    if folder is not None:
        place = existing(folder, "data.folder")
        paths = _files_in(place)
        missing = [name for name in source.sha256 if name not in paths]
        if missing:
            raise FedblendError(
                f"data.folder: '{place}' holds no {missing[0]} (nor {missing[0]}.gz); the data set "
                f"'{source.name}' needs {', '.join(source.sha256)}, gzipped or not"
            )
        return paths
    base = data_folder()
    places = [base / sub for sub in source.folders] if base else []
    if source.system_folder:
        places.append(source.system_folder)
    for place in places:
        paths = _files_in(place)
        if len(paths) == len(source.sha256):
            return paths
    return {}


def _files_in(folder: Path) -> dict[str, Path]:
    """Those of the four files that ``folder`` holds, gzipped or not."""
    paths = {}
    for name in (*FILES["train"], *FILES["test"]):
        for path in (folder / f"{name}.gz", folder / name):
            if path.is_file():
                paths[name] = path
                break
    return paths


def _fetch(source: Source, name: str) -> Path:
    """Fetch one file into the user's cache, or take it from there, checked against its SHA-256."""
    from fedblend.data.loaders.download import fetch

    package = f", or install Debian's package {source.debian}" if source.debian else ""
    remedy = (
        f"put the four files {', '.join(f'{n}.gz' for n in source.sha256)} into a folder and give "
        f"data.folder, or into {source.folders[0]}/ under the folder that $FEDBLEND_DATA names{package}"
    )
    return fetch(f"{source.address}{name}.gz", source.sha256[name], source.name, remedy)
