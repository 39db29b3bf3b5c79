"""Any data set as one NumPy archive: x, y and, where there are, clients and a split."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.data.dataset import Dataset, Samples, check
from fedblend.data.loaders.files import TestShare, draw_test_half, existing, sha256_file
from fedblend.errors import FedblendError, did_you_mean, listed
from fedblend.parts import FilePath, part

KNOWN = ("x", "y", "client", "split", "client_names", "classes")
"""The arrays that are read; others in the file are left alone, unless one seems meant."""

HALVES = tuple(f"{name}_{half}" for name in ("x", "y", "client", "writer") for half in ("train", "test"))
"""The arrays of a file that holds its halves apart."""

ALIKE = 0.75
"""How like a known name (as difflib has it) an unknown one must be to seem meant: ``client_id`` is, ``sizes`` not."""


@part("dataset", "npz")
class Npz:
    """A data set of your own in one ``.npz`` file, with these arrays (no pickled objects):

    - ``x``: uint8 [n, H, W], [n, C, H, W] or [n, H, W, C] (C 1 or 3) are images; numbers [n, d] or
      floats [n, channels, ...] are features.
    - ``y``: whole numbers 0 to classes - 1, or text: classes; floats [n] or [n, q]: regression. Whole numbers of
      which most never occur are refused, unless ``classes`` names them.
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
        _require_lengths(arrays, path)
        kind, x = _inputs(arrays["x"], path)
        y, classes = _targets(arrays["y"], arrays.get("classes"), path)
        client, names = _clients(arrays, path)
        if "split" in arrays:
            test, rule = _split(arrays["split"], path), "the file's own split"
        else:
            by = client if client is not None else y if classes else np.zeros(len(y), np.int64)
            test = draw_test_half(by, self.test_share, path.name)
            group = "client" if client is not None else "class"
            rule = f"test: {self.test_share:g} of each {group}, drawn by the file's name"
        halves = [
            Samples(_tensor(x, rows), _tensor(y, rows), None if client is None else client[rows])
            for rows in (~test, test)
        ]
        facts: dict[str, Any] = {"source": str(path), "files": {path.name: sha256_file(path)}, "notes": rule}
        return check(Dataset(path.stem, kind, halves[0], halves[1], classes, names, facts=facts))


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
            return {name: archive[name] for name in archive.files if name in KNOWN}
    except (OSError, ValueError, EOFError, AttributeError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        reason = "holds objects; save plain numbers or text" if "allow_pickle" in str(error) else str(error)
        raise FedblendError(f"{path}: is not a sound .npz archive of arrays: {reason}") from None


def _require_clear_names(names: Sequence[str], known: Sequence[str], path: Path) -> None:
    """Raise :class:`FedblendError` for an array that would be passed over though its name is nearly a known one."""
    for name in names:
        near = did_you_mean(name, known, ALIKE)
        if name not in known and near:
            raise FedblendError(
                f"{path}: the array '{name}' is unknown{near}; valid: {', '.join(known)} (give it a name unlike these "
                "if it is none of them)"
            )


def _joined(archive: Any, path: Path) -> dict[str, np.ndarray]:
    """The arrays of a file that holds its halves apart, as one array each and a split."""
    arrays = {}
    for name in ("x", "y", "client", "writer"):
        halves = [archive[f"{name}_{half}"] for half in ("train", "test") if f"{name}_{half}" in archive.files]
        if not halves and name in ("client", "writer"):
            continue
        if len(halves) != 2 or halves[0].ndim == 0 or halves[0].shape[1:] != halves[1].shape[1:]:
            raise FedblendError(f"{path}: '{name}_train' and '{name}_test' must both be there, of one shape a sample")
        arrays["client" if name == "writer" else name] = np.concatenate(halves)
        arrays["split"] = np.repeat(["train", "test"], [len(half) for half in halves])
    for name in ("client_names", "writer_names", "classes"):
        if name in archive.files:
            arrays[name.replace("writer", "client")] = archive[name]
    return arrays


def _require_named(names: Sequence[str], path: Path) -> None:
    """Raise :class:`FedblendError` unless arrays x and y are among those of a file."""
    for needed in ("x", "y"):
        if needed not in names:
            raise FedblendError(
                f"{path}: holds no array '{needed}' (but {listed(names) or 'nothing'}); 'x' and 'y' are needed, "
                f"{', '.join(KNOWN[2:])} are optional"
            )


def _require_lengths(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Raise :class:`FedblendError` unless there are samples and every array has one entry a sample."""
    n = len(np.atleast_1d(arrays["y"]))
    if n == 0:
        raise FedblendError(f"{path}: 'y' holds no samples; at least two are needed, to train and to test on")
    for name in ("x", "y", "client", "split"):
        if name in arrays and (arrays[name].ndim == 0 or len(arrays[name]) != n):
            raise FedblendError(
                f"{path}: '{name}' is of shape {list(arrays[name].shape)} but 'y' has {n} entries; "
                "each needs one entry a sample"
            )


def _inputs(x: np.ndarray, path: Path) -> tuple[Literal["image", "features"], np.ndarray]:
    """Images as uint8 [n, C, H, W], or features as float32 in their shape."""
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        if x.ndim == 3:
            x = x[:, None]
        elif x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        if x.shape[1] in (1, 3) and x.size:
            return "image", np.ascontiguousarray(x)
    elif x.size and ((x.dtype.kind == "f" and x.ndim >= 2) or (x.dtype.kind in "iub" and x.ndim == 2)):
        # What overflows float32 becomes infinite, and the check tells of it.
        with np.errstate(over="ignore"):
            return "features", x.astype(np.float32)
    raise FedblendError(
        f"{path}: 'x' is {x.dtype} of shape {list(x.shape)}; valid: images uint8 [n, H, W], [n, C, H, W] or "
        "[n, H, W, C] with C 1 or 3; features as numbers [n, d] or floats [n, channels, ...]"
    )


def _targets(y: np.ndarray, names: np.ndarray | None, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    """Labels as int64 [n] with the names of the classes, or numbers as float32 [n, q] with none."""
    if y.dtype.kind == "f" and y.ndim in (1, 2) and names is None:
        return y.astype(np.float32).reshape(len(y), -1), ()
    if y.dtype.kind not in "iubU" or y.ndim != 1:
        beside = " beside names of classes" if names is not None else ""
        raise FedblendError(
            f"{path}: 'y' is {y.dtype} of shape {list(y.shape)}{beside}; valid: whole numbers or text [n] "
            "(classes), or floats [n] or [n, q] (regression)"
        )
    if y.dtype.kind == "U":
        words = np.unique(y) if names is None else names.astype(str)
        unknown = np.setdiff1d(y, words)
        if len(unknown):
            raise FedblendError(f"{path}: 'y' holds '{unknown[0]}'; valid, after 'classes': {', '.join(words)}")
        order = np.argsort(words)
        return order[np.searchsorted(words, y, sorter=order)].astype(np.int64), tuple(map(str, words))
    y = y.astype(np.int64)
    low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
    # More classes than samples are no classes: such a y is an id, or a number to predict.
    count = len(names) if names is not None else high + 1 if high < max(len(y), 2) else 0
    if low < 0 or high >= count:
        valid = f"0 to {count - 1}" if names is not None else "0 to classes - 1 (floats for regression)"
        raise FedblendError(f"{path}: labels in 'y' reach from {low} to {high}; valid: {valid}")
    used = np.unique(y)
    if names is None and 2 * len(used) < count:
        raise FedblendError(
            f"{path}: labels in 'y' reach to {high}, but only {len(used)} of these {count} classes have a sample "
            f"({listed(used.tolist())}); number them 0 to {len(used) - 1}, or name all classes in 'classes'"
        )
    return y, tuple(map(str, range(count) if names is None else names))


def _clients(arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The client of each sample, int64 0 to K - 1, and the clients' names."""
    if "client" not in arrays:
        return None, ()
    client, names = arrays["client"], arrays.get("client_names")
    if client.ndim != 1 or client.dtype.kind not in "iuU":
        raise FedblendError(
            f"{path}: 'client' is {client.dtype} of shape {list(client.shape)}; valid: numbers [n] or text"
        )
    ids, codes = np.unique(client, return_inverse=True)
    if names is None or client.dtype.kind == "U":
        return codes.astype(np.int64), tuple(map(str, ids))
    if len(ids) and (ids[0] < 0 or ids[-1] >= len(names)):
        raise FedblendError(
            f"{path}: clients reach from {ids[0]} to {ids[-1]} but 'client_names' has {len(names)} names; "
            f"valid: 0 to {len(names) - 1}"
        )
    return codes.astype(np.int64), tuple(map(str, names[ids]))


def _split(split: np.ndarray, path: Path) -> np.ndarray:
    """Which samples are test, bool [n]."""
    words = split.astype(str)
    bad = ~np.isin(words, ["0", "1", "train", "test", "False", "True"])
    if split.ndim != 1 or bad.any():
        found = f"holds '{words[bad][0]}'" if bad.any() else f"is of shape {list(split.shape)}"
        raise FedblendError(f"{path}: 'split' {found}; valid: 0 or 'train', 1 or 'test' for each sample")
    return np.isin(words, ["1", "test", "True"])


def _tensor(array: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array[rows])
