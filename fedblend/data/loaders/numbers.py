"""Numbers as text, many at a time."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np

from fedblend.core.errors import FedblendError


def parse_numbers(text: str) -> np.ndarray | None:
    """The numbers in a text with blanks between them, float64 [n]; ``None`` if anything else is among them."""
    with warnings.catch_warnings():
        # NumPy only warns of what it cannot read, and gives what stood before it.
        warnings.simplefilter("error")
        try:
            return np.fromstring(text, np.float64, sep=" ")
        except (DeprecationWarning, ValueError):
            return None


def read_table(path: Path, columns: int) -> np.ndarray:
    """A text file of lines with ``columns`` numbers each, float64 [n, columns].

    Raises :class:`FedblendError` that names the file for anything else.
    """
    try:
        text = path.read_text(encoding="ascii")
    except UnicodeDecodeError:
        raise FedblendError(f"{path}: is no plain text; fetch it anew") from None
    lines = text.count("\n") + (not text.endswith("\n"))
    numbers = parse_numbers(text)
    if numbers is None or not len(numbers):
        raise FedblendError(f"{path}: holds other than numbers with blanks between them; fetch it anew")
    if len(numbers) != lines * columns:
        raise FedblendError(
            f"{path}: is truncated or another file: {len(numbers)} numbers in {lines} lines; expected {columns} a line"
        )
    return numbers.reshape(-1, columns)
