"""What every loader needs: paths, fingerprints of what was read, and a fixed rule for a test half."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from fedblend.core.errors import FedblendError
from fedblend.core.random import stream
from fedblend.core.registry import Float

TestShare = Annotated[Float, Field(gt=0, lt=1)]
"""Share of the samples that becomes the test half where the data comes without one."""

READ_AT_ONCE = 1 << 20


def existing(path: str, field: str) -> Path:
    """The path of the option ``field``. Raises if nothing is there."""
    found = Path(path)
    if not found.exists():
        raise FedblendError(
            f"{field}: there is no '{found}'; give an existing path (in an experiment file it is relative to that file)"
        )
    return found


def look_in(folder: Path) -> Path:
    """Look for data sets in ``folder``, here and in every process begun from here.

    Raises :class:`FedblendError` if it is no folder.
    """
    if not folder.is_dir():
        raise FedblendError(f"--data {folder}: there is no such folder; give the one that holds your data sets")
    os.environ["FEDBLEND_DATA"] = str(folder.resolve())
    return folder


def data_folder() -> Path | None:
    """The folder named by the environment variable ``FEDBLEND_DATA``, or ``None`` if it is not set."""
    named = os.environ.get("FEDBLEND_DATA")
    return Path(named).expanduser() if named else None


def sha256_file(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(READ_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()


def sha256_array(array: np.ndarray) -> str:
    """SHA-256 of an array's type, shape and bytes in row order, for data that has no file of its own."""
    digest = hashlib.sha256(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def draw_test_half(groups: np.ndarray, share: float, name: str) -> np.ndarray:
    """Which samples are test, bool [n]: of each group of n_g samples, round(share n_g) by a fixed draw.

    The draw is keyed by the data set's ``name`` and by nothing else, so that every run, whatever its
    seed, is judged on the same test half. A group of one sample stays in training.
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
