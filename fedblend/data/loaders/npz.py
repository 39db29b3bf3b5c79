"""Any data set as one NumPy archive: x, y and, where there are, clients and a split."""

from __future__ import annotations

import lzma
import tokenize
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, did_you_mean, legible, listed
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.arrays import dataset_of
from fedblend.data.loaders.files import TestShare, existing, sha256_file

KNOWN = ("x", "y", "client", "split", "client_names", "classes")
"""The arrays that are read; others in the file are left alone, unless one seems meant."""

HALVES = tuple(f"{name}_{half}" for name in ("x", "y", "client", "writer") for half in ("train", "test"))
"""The arrays of a file that holds its halves apart."""

ALIKE = 0.75
"""How like a known name (as difflib has it) an unknown one must be to seem meant: ``client_id`` is, ``sizes`` not."""

DAMAGED = (
    OSError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError, MemoryError,
    SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error, lzma.LZMAError,
)  # fmt: skip
"""What NumPy and ``zipfile`` end in at a damaged archive: also where a header is no Python (TokenError) or tells of a
shape beyond all memory (MemoryError), or a member is encrypted (RuntimeError) or packed in an unknown way."""


@part("dataset", "npz")
class Npz:
    """A data set of your own in one ``.npz`` file, with these arrays (no pickled objects):

    - ``x``: uint8 [n, H, W], [n, C, H, W] or [n, H, W, C] (C 1 or 3) are images; numbers [n, d] or
      floats [n, channels, ...] are features.
    - ``y``: whole numbers 0 to classes - 1, or text: classes; floats [n] or [n, q]: regression. Whole numbers
      that do not begin at 0, or of which most never occur, are refused, unless ``classes`` names them.
    - ``client`` (if there are clients): a whole number or a text for each sample.
    - ``split`` (if there is one): 0 or "train", 1 or "test" for each sample. Without it,
      ``test_share`` of each client's samples (else of each class's) is test, by a draw that depends
      on nothing but the file's name.
    - ``client_names``: the name of client number i at place i; ``classes``: the names of the classes.

    Instead of a ``split``, the file may hold the halves apart: ``x_train``, ``y_train``, ``x_test``,
    ``y_test`` (as Keras does), and ``client_train``, ``client_test`` or ``writer_train``, ... .

    Clients are numbered anew, 0 to K - 1, in the order of their numbers or texts. Raises
    :class:`FedblendError` that names the file and the array for anything else, also for a name that is nearly
    one of these; arrays of other names are left alone.
    """

    path: FilePath
    """The file; in an experiment file relative to that file."""
    test_share: TestShare = 0.2
    """Share of each client's samples (else of each class's) that is test, where the file has no split."""

    def load(self) -> Dataset:
        """The data set: x uint8 [n, C, H, W] or float32 [n, ...]; y int64 [n] or float32 [n, q]."""
        path = existing(self.path, "data.path")
        arrays = read_arrays(path)
        return dataset_of(arrays, path.stem, path, self.test_share, {path.name: sha256_file(path)})


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an ``.npz`` file. Raises :class:`FedblendError` if it is none, damaged, or pickled."""
    if path.is_dir():
        raise FedblendError(f"data.path: '{path}' is a folder; it must name an .npz file")
    if not zipfile.is_zipfile(path):
        raise FedblendError(f"{path}: is not a sound .npz archive, or is cut short; numpy.savez writes one")
    try:
        # Never allow pickles: unpickling a file from elsewhere runs whatever code it brings.
        with np.load(path, allow_pickle=False) as archive:
            if "x_train" in archive.files:
                _require_clear_names(archive.files, (*HALVES, "client_names", "writer_names", "classes"), path)
                return _joined(archive, path)
            _require_clear_names(archive.files, KNOWN, path)
            _require_named(archive.files, path)
            return {name: _array(archive, name) for name in archive.files if name in KNOWN}
    except DAMAGED as error:
        pickled = str(error).startswith("Object arrays")
        reason = "holds objects; save plain numbers or text" if pickled else legible(error) or type(error).__name__
        raise FedblendError(f"{path}: is not a sound .npz archive of arrays: {reason}") from None


def _array(archive: Any, name: str) -> np.ndarray:
    """An array of the archive. Raises :class:`ValueError` for a member that is none, which NumPy gives as bytes."""
    array = archive[name]
    if not isinstance(array, np.ndarray):
        raise ValueError(f"'{name}' is no array")
    return array


def _require_clear_names(names: Sequence[str], known: Sequence[str], path: Path) -> None:
    """Raise :class:`FedblendError` for an array that would be passed over though its name is nearly a known one."""
    for name in names:
        near = did_you_mean(name, known, ALIKE)
        if name not in known and near:
            raise FedblendError(
                f"{path}: the array {name!r} is unknown{near}; valid: {', '.join(known)} (give it a name unlike these "
                "if it is none of them)"
            )


def _joined(archive: Any, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that holds its halves apart, as one array each and a split."""
    arrays = {}
    for name in ("x", "y", "client", "writer"):
        halves = [_array(archive, f"{name}_{half}") for half in ("train", "test") if f"{name}_{half}" in archive.files]
        if not halves and name in ("client", "writer"):
            continue
        if len(halves) != 2 or halves[0].ndim == 0 or halves[0].shape[1:] != halves[1].shape[1:]:
            raise FedblendError(f"{path}: '{name}_train' and '{name}_test' must both be there, of one shape a sample")
        arrays["client" if name == "writer" else name] = np.concatenate(halves)
        arrays["split"] = np.repeat(["train", "test"], [len(half) for half in halves])
    for name in ("client_names", "writer_names", "classes"):
        if name in archive.files:
            arrays[name.replace("writer", "client")] = _array(archive, name)
    return arrays


def _require_named(names: Sequence[str], path: Path) -> None:
    """Raise :class:`FedblendError` unless arrays x and y are among those of a file."""
    for needed in ("x", "y"):
        if needed not in names:
            raise FedblendError(
                f"{path}: holds no array '{needed}' (but {listed(names) or 'nothing'}); 'x' and 'y' are needed, "
                f"{', '.join(KNOWN[2:])} are optional"
            )
