"""Numbers by client: lists, and columns of CSV files."""

from __future__ import annotations

import csv
import functools
import io
import os
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from fedblend.core.errors import FedblendError
from fedblend.core.paths import read_text
from fedblend.core.registry import FilePath, Positive


def _with_column(path: str) -> str:
    if not all(path.rpartition(":")):
        raise ValueError('write a list of a number for each client, or "FILE.csv:COLUMN"')
    return path


Column = Annotated[tuple[Positive, ...], Field(min_length=1)] | Annotated[FilePath, AfterValidator(_with_column)]
"""A number above 0 for each client: a list, or "FILE.csv:COLUMN", where the file has a line for each, in order."""


def read_columns(path: str, *names: str) -> np.ndarray:
    """Columns of numbers of a CSV file with headings, float64 [columns, lines]; read again once the file has changed.

    Raises :class:`FedblendError` if the file cannot be read, or lacks a column or a number.
    """
    try:
        changed = os.stat(path).st_mtime_ns
    except OSError:
        changed = 0
    return _read(path, names, changed)


@functools.lru_cache(maxsize=16)
def _read(path: str, names: tuple[str, ...], changed: int) -> np.ndarray:
    lines = csv.DictReader(io.StringIO(read_text(path, f"give a CSV file with columns {', '.join(names)}")))
    try:
        rows = [[float(line[name]) for name in names] for line in lines]
    except (KeyError, TypeError, ValueError) as error:
        told = f"line {lines.line_num}: {type(error).__name__}: {error}"
        raise FedblendError(f"{path}: {told}; valid: a number in each of the columns {', '.join(names)}") from None
    return np.array(rows, np.float64).reshape(-1, len(names)).T


def column(given: tuple[float, ...] | str) -> np.ndarray:
    """The numbers of a :data:`Column`, float64 [clients]."""
    if isinstance(given, tuple):
        return np.array(given, np.float64)
    path, _, name = given.rpartition(":")
    return np.asarray(read_columns(path, name)[0])


def require_column(given: tuple[float, ...] | str, clients: int, field: str) -> None:
    """Raise :class:`FedblendError` unless a :data:`Column` has a number above 0 for each client."""
    numbers = column(given)
    if len(numbers) != clients or not (np.isfinite(numbers) & (numbers > 0)).all():
        told = f"{len(numbers)} numbers, the least {numbers.min(initial=np.inf):g}, for {clients} clients"
        raise FedblendError(f"{field}: {told}; valid: a number above 0 for each")
