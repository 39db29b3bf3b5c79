"""CIFAR's Python form: pickled dictionaries, of which data only is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.errors import FedblendError
from fedblend.data.loaders.plain_pickle import read_plain

SHAPE = (3, 32, 32)
"""Channels, height and width: a record holds 1,024 bytes of red, then of green, then of blue, row by row."""
PIXELS = 3 * 32 * 32


def read_pickled(path: Path, labels: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Labels uint8 [n, len(labels)] and pictures uint8 [n, 3, 32, 32] of a file; ``labels`` are their numbers of
    classes by name: "coarse label" is the list under the key ``coarse_labels``.

    Raises :class:`FedblendError` for a file that is damaged or no data only, and for labels out of range.
    """
    batch = _dictionary(path)
    pictures = _entry(batch, "data", path)
    if not isinstance(pictures, np.ndarray) or pictures.dtype != np.uint8 or pictures.shape[1:] != (PIXELS,):
        raise FedblendError(f"{path}: its 'data' is no array of bytes of {PIXELS} a picture; fetch the file anew")
    columns = []
    for name, classes in labels.items():
        key = name.replace(" ", "_") + "s"
        column = np.asarray(_entry(batch, key, path))
        if column.shape != (len(pictures),) or column.dtype.kind not in "iu":
            raise FedblendError(f"{path}: its '{key}' are not one whole number for each of {len(pictures)} pictures")
        bad = np.flatnonzero((column < 0) | (column >= classes))
        if len(bad):
            raise FedblendError(f"{path}: record {bad[0]} holds the {name} {column[bad[0]]}; valid: 0 to {classes - 1}")
        columns.append(column.astype(np.uint8))
    return np.stack(columns, 1), pictures.reshape(-1, *SHAPE)


def pickled_names(path: Path, key: str, number: int) -> tuple[str, ...]:
    """The names of labels in a file of names. Raises if there are not ``number`` of them."""
    names = _entry(_dictionary(path), key, path)
    if not isinstance(names, list) or not all(isinstance(name, str | bytes) for name in names):
        raise FedblendError(f"{path}: its '{key}' is no list of names; fetch the file anew")
    return require_different(path, [n if isinstance(n, str) else n.decode("latin-1") for n in names], number)


def require_different(path: Path, names: list[str], number: int) -> tuple[str, ...]:
    """The names that a file told. Raises unless they are ``number`` different ones."""
    if len(set(names)) != number or len(names) != number:
        raise FedblendError(f"{path}: holds {len(set(names))} different names in {len(names)}; expected {number}")
    return tuple(names)


def _dictionary(path: Path) -> dict[Any, Any]:
    read = read_plain(path)
    if not isinstance(read, dict):
        raise FedblendError(f"{path}: holds a {type(read).__name__}, not CIFAR's dictionary; fetch it anew")
    return read


def _entry(batch: dict[Any, Any], key: str, path: Path) -> Any:
    """An entry by its key, which Python 3 may have written as bytes."""
    for written in (key, key.encode()):
        if written in batch:
            return batch[written]
    raise FedblendError(f"{path}: holds no '{key}'; is it another file of CIFAR's?")
