"""A data set in one NumPy archive: the arrays x and y, and optionally clients, a split and names."""

from __future__ import annotations

import sys
import zipfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.core.dataset import Dataset
from fedblend.core.errors import FedblendError, brief, did_you_mean, legible, listed, require_memory
from fedblend.core.registry import FilePath, part
from fedblend.data.loaders.files import (
    TestShare,
    by_half,
    draw_test_half,
    existing_path,
    made,
    regular_file,
    sha256_file,
    trimmed,
    warn_of_repeats,
)

# The archive ----------------------------------------------------------------------------------------------

LISTS = ("client_names", "writer_names", "classes", "labels")  # The arrays of names

ARRAYS = ("x", "y", "client", "split", "client_names", "classes", "labels")
"""The arrays that are read; other arrays are ignored, unless their names are similar to one of these."""

HALVES = tuple(f"{name}_{half}" for name in ("x", "y", "client", "writer") for half in ("train", "test"))
"""The arrays of a file with separate halves."""

SIMILARITY = 0.75
"""Similarity (of difflib) to a valid name at which an unknown name is an error: ``client_id`` is, ``sizes`` is not."""


@part("dataset", "npz")
class Npz:
    """A data set of your own in one ``.npz`` file, with these arrays (no pickled objects):

    - ``x``: uint8 [n, H, W], [n, C, H, W] or [n, H, W, C] (C 1 or 3) are images; numbers [n, d] or
      floats [n, channels, ...] are features. With ``kind = "tokens"`` whole numbers [n, T] are ids of tokens, and
      [n, 2, T] are ids with their attention mask.
    - ``y``: whole numbers 0 to classes - 1, or text: classes; whole numbers 0 and 1, or booleans, [n, L]: which of L
      labels a sample has; floats [n] or [n, q]: regression. Classes that do not begin at 0, or most of which never
      occur, are errors, unless ``classes`` names them. One-hot classes are an error, unless ``labels`` names them.
    - ``client`` (optional): a whole number or a text for each sample.
    - ``split`` (optional): 0 or "train", 1 or "test" for each sample. Without it, ``test_share`` of each client's
      samples (without clients: of each class's) is test, by a draw that depends only on the file's name.
    - ``client_names``: the name of client number i at position i; ``classes``, ``labels``: their names.

    Instead of a ``split``, the file may hold separate halves: ``x_train``, ``y_train``, ``x_test``,
    ``y_test`` (as Keras does), and ``client_train``, ``client_test`` or ``writer_train``, ... .

    Clients are renumbered, 0 to K - 1, in the order of their numbers or texts. Raises :class:`FedblendError` with the
    file and the array for anything else, and for an unknown name that is similar to one of these. Arrays of other
    names are ignored.
    """

    path: FilePath
    """The file; in an experiment file relative to that file."""
    test_share: TestShare = 0.2
    """Share of each client's samples (without clients: of each class's) that is test, for a file without a split."""
    kind_: Literal["tokens"] | None = None
    """What `x` holds: "tokens" for ids of tokens, which are not scaled (default: images or features, by its type)."""

    def load(self) -> Dataset:
        """Load x uint8 [n, C, H, W], float32 [n, ...] or int64 tokens, and y int64 [n], or float32 [n, L] or [n, q]."""
        path = existing_path(self.path, "data.path")
        arrays = read_arrays(path)
        return dataset_of(arrays, path.stem, path, self.test_share, {path.name: sha256_file(path)}, self.kind_)


def read_arrays(path: Path, needed: Sequence[str] = ("x", "y")) -> dict[str, np.ndarray]:
    """Read the arrays of an ``.npz`` file, which must have those ``needed``. Raises :class:`FedblendError`."""
    if path.is_dir():
        raise FedblendError(f"data.path: '{path}' is a folder; it must name an .npz file")
    if not zipfile.is_zipfile(regular_file(path)):
        raise FedblendError(f"{path}: is no valid .npz archive, or is truncated; numpy.savez writes one")
    try:
        # Never allow pickles: unpickling a file runs any code that the file names.
        with np.load(path, allow_pickle=False) as archive:
            unpacked = sum(member.file_size for member in archive.zip.infolist())
            require_memory(unpacked, f"{path}: its content, unpacked,", "is it the right file?")
            if "x_train" in archive.files:
                _require_clear_names(archive.files, (*HALVES, *LISTS), path)
                return _join_halves(archive, path)
            _require_clear_names(archive.files, ARRAYS, path)
            for name in (name for name in needed if name not in archive.files):
                found = f"{path}: holds no array '{name}' (but {listed(archive.files) or 'nothing'})"
                optional = ", ".join(one for one in ARRAYS if one not in needed)
                raise FedblendError(f"{found}; {' and '.join(map(repr, needed))} are needed, {optional} are optional")
            return {name: _array(archive, name) for name in archive.files if name in ARRAYS}
    except FedblendError:
        raise
    # NumPy, zipfile and what unpacks for it raise errors of all kinds for a damaged archive.
    except Exception as error:
        pickled = str(error).startswith("Object arrays")
        reason = "holds objects; save plain numbers or text" if pickled else legible(error) or type(error).__name__
        raise FedblendError(f"{path}: is no valid .npz archive of arrays: {reason}") from None


def _array(archive: Any, name: str) -> np.ndarray:
    """An array of the archive. Raises :class:`ValueError` for other members, which NumPy returns as bytes."""
    array = archive[name]
    if not isinstance(array, np.ndarray):
        raise ValueError(f"'{name}' is no array")
    if array.dtype.kind == "U":
        signs = np.frombuffer(array.tobytes(), np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if signs.max(initial=0) > sys.maxunicode:
            raise ValueError(f"'{name}' holds signs that Unicode does not have")
    return array


def _require_clear_names(names: Sequence[str], valid: Sequence[str], path: Path) -> None:
    """Raise :class:`FedblendError` for an array with an unknown name that is similar to a valid one."""
    for name in names:
        if name not in valid and (suggestion := did_you_mean(name, valid, SIMILARITY)):
            remedy = "give it that name, or one that is not like it"
            raise FedblendError(f"{path}: the array {brief(name)} is unknown{suggestion}; {remedy}")


def _join_halves(archive: Any, path: Path) -> dict[str, np.ndarray]:
    arrays: dict[str, np.ndarray] = {}
    for name in ("x", "y", "client", "writer"):
        both = f"'{name}_train' and '{name}_test'"
        halves = [_array(archive, f"{name}_{half}") for half in ("train", "test") if f"{name}_{half}" in archive.files]
        if not halves and name in ("client", "writer"):
            continue
        if len(halves) != 2 or not all(half.ndim for half in halves) or halves[0].shape[1:] != halves[1].shape[1:]:
            raise FedblendError(f"{path}: needs both {both}, with samples of one shape")
        kinds = [kind_of(half) for half in halves]
        if kinds[0] != kinds[1]:
            raise FedblendError(f"{path}: '{name}_train' holds {kinds[0]}, '{name}_test' {kinds[1]}; valid: one kind")
        counts = [len(half) for half in halves]
        split = np.repeat(["train", "test"], counts)
        if not np.array_equal(split, arrays.setdefault("split", split)):
            of_x = [int((arrays["split"] == half).sum()) for half in ("train", "test")]
            found = f"{both} have {counts[0]} and {counts[1]} entries, 'x_train' and 'x_test' {of_x[0]} and {of_x[1]}"
            raise FedblendError(f"{path}: {found}; each half needs one entry for each of its samples")
        arrays["client" if name == "writer" else name] = np.concatenate(halves)
    lists = {name.replace("writer", "client"): _array(archive, name) for name in LISTS if name in archive.files}
    return arrays | lists


def kind_of(array: np.ndarray) -> str:
    """What an array holds: a test half must hold the same as its training half."""
    if array.dtype == np.uint8 and array.ndim >= 3:
        return "pixels (uint8)"
    return {"f": "floats", **dict.fromkeys("biu", "whole numbers"), **dict.fromkeys("US", "text")}.get(
        array.dtype.kind, str(array.dtype)
    )


def wrong_form(path: Path, name: str, array: np.ndarray, valid: str) -> FedblendError:
    """The error of an array of another type or shape than those that are ``valid``."""
    return FedblendError(f"{path}: '{name}' is {array.dtype} of shape {list(array.shape)}; valid: {valid}")


# A data set from arrays -----------------------------------------------------------------------------------


def dataset_of(
    arrays: dict[str, np.ndarray],
    name: str,
    source: Path,
    test_share: float,
    files: dict[str, str],
    kind: Literal["tokens"] | None = None,
) -> Dataset:
    """Make a data set of the arrays x, y, client, split, client_names, classes and labels (see :class:`Npz`).

    Messages name ``source``; the draw of the test half depends on its last part. ``files`` has SHA-256 by name.
    """
    _require_lengths(arrays, source)
    inputs, x = as_inputs(arrays["x"], source, kind)
    y, classes, labels = _targets(arrays["y"], arrays.get("classes"), arrays.get("labels"), source)
    client, names = _clients(arrays, source)
    if "split" in arrays:
        test, rule = test_rows(arrays["split"], source), "the file's own split"
    else:
        groups = client if client is not None else y if classes else np.zeros(len(y), np.int64)
        test = draw_test_half(groups, test_share, source.name)
        group = "client" if client is not None else "class"
        rule = f"test: {test_share:g} of each {group}, drawn by the file's name"
    halves = by_half(test, x, y) if client is None else by_half(test, x, y, client)
    data = made(name, inputs, halves, classes, (str(source), files, rule), names, labels)
    warn_of_repeats(data)
    return data


def _require_lengths(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Raise :class:`FedblendError` unless there are samples, with one entry in each array, and 1-D arrays of names."""
    n = len(np.atleast_1d(arrays["y"]))
    if n == 0:
        raise FedblendError(f"{path}: 'y' holds no samples; at least two are needed, one to train and one to test on")
    for name, array in arrays.items():
        if name in LISTS and (array.ndim != 1 or not _is_text(array)):
            raise wrong_form(path, name, array, "names as text (or numbers) [n]")
        if name not in LISTS and (array.ndim == 0 or len(array) != n):
            found = f"'{name}' has shape {list(array.shape)} but 'y' has {n} entries"
            raise FedblendError(f"{path}: {found}; each needs one entry for each sample")


def as_inputs(
    x: np.ndarray, path: Path, kind: Literal["tokens"] | None = None
) -> tuple[Literal["image", "features", "tokens"], np.ndarray]:
    """Images as uint8 [n, C, H, W], features as float32 in their shape, or tokens as int64."""
    if kind == "tokens":
        if x.size and x.dtype.kind in "iu" and (x.ndim == 2 or (x.ndim == 3 and x.shape[1] == 2)):
            ids = x.astype(np.int64)
            if ids.min() >= 0 and (ids.ndim == 2 or ids[:, 1].max() <= 1):
                return "tokens", ids
        raise FedblendError(
            f"{path}: 'x' is {x.dtype} of shape {list(x.shape)}; valid for data.kind = \"tokens\": whole numbers from "
            "0, [n, T], or [n, 2, T] with the attention mask (1 to read, 0 for padding) as each sample's second row"
        )
    if x.dtype == np.uint8 and x.ndim in (3, 4):
        if x.ndim == 3:
            x = x[:, None]
        elif x.shape[3] in (1, 3) and x.shape[1] not in (1, 3):
            x = x.transpose(0, 3, 1, 2)
        if x.shape[1] in (1, 3) and x.size:
            return "image", np.ascontiguousarray(x)
    elif x.size and ((x.dtype.kind == "f" and x.ndim >= 2) or (x.dtype.kind in "iub" and x.ndim == 2)):
        # Overflow of float32 gives infinity, for which the check of the data set raises an error.
        with np.errstate(over="ignore"):
            return "features", x.astype(np.float32)
    valid = (
        "images uint8 [n, H, W], [n, C, H, W] or [n, H, W, C] with C 1 or 3; features as numbers [n, d] or floats "
        '[n, channels, ...]; ids of tokens, whole numbers [n, T] or [n, 2, T], with data.kind = "tokens"'
    )
    raise wrong_form(path, "x", x, valid)


def _targets(
    y: np.ndarray, names: np.ndarray | None, labels: np.ndarray | None, path: Path
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Targets, with the names of classes and of labels: classes int64 [n], labels float32 [n, L], or numbers [n, q]."""
    is_table = y.dtype.kind in "iubf" and y.ndim == 2 and y.shape[1] > 1 and names is None
    if is_table and labels is None and np.isin(y, (0, 1)).all() and (y.sum(1) == 1).all():
        valid = "numbers of classes [n], such as y.argmax(1), or names in 'labels' if they are labels"
        found = f"'y' [n, {y.shape[1]}] has one 1 in each row, as one-hot classes have"
        raise FedblendError(f"{path}: {found}; valid: {valid}")
    # A single column of 0 and 1 is refused: two classes [n] are meant.
    if is_table and y.dtype.kind != "f":
        return _label_matrix(y, labels, path)
    if labels is not None:
        raise wrong_form(path, "y", y, f"by 'labels' whole numbers 0 and 1, or booleans, of shape [n, {len(labels)}]")
    if y.dtype.kind == "f" and y.ndim in (1, 2) and names is None:
        return y.astype(np.float32).reshape(len(y), -1), (), ()
    return *_classes(y, names, path), ()


def _label_matrix(
    y: np.ndarray, labels: np.ndarray | None, path: Path
) -> tuple[np.ndarray, tuple[str, ...], tuple[str, ...]]:
    """Which labels each sample has, float32 [n, L], and the names of the labels."""
    count = y.shape[1] if labels is None else len(labels)
    if count != y.shape[1]:
        raise FedblendError(f"{path}: 'y' has {y.shape[1]} columns, 'labels' {count} names; each label needs a column")
    if wrong := sorted({*np.unique(y).tolist()} - {0, 1}):
        valid = "0 and 1 for each label (floats for regression)"
        raise FedblendError(f"{path}: 'y' [n, {count}] holds {wrong[0]}; valid: {valid}")
    named = tuple(map(str, range(count) if labels is None else labels.astype(str)))
    _require_different(named, "labels", path)
    return y.astype(np.float32), (), named


def _require_different(names: Sequence[str], array: str, path: Path) -> None:
    """Raise :class:`FedblendError` for a name that occurs twice: results are kept by name."""
    if double := [name for name, count in Counter(map(trimmed, names)).items() if count > 1]:
        valid = f"{len(names)} different names"
        raise FedblendError(f"{path}: '{array}' has a name twice ({brief(double[0])}); valid: {valid}")


def _classes(y: np.ndarray, names: np.ndarray | None, path: Path) -> tuple[np.ndarray, tuple[str, ...]]:
    if y.dtype.kind not in "iubU" or y.ndim != 1:
        others = "" if names is not None else ", 0 and 1 [n, L] with L from 2 (labels), or floats [n] or [n, q]"
        raise wrong_form(path, "y", y, f"whole numbers or text [n] (classes){others}")
    if names is not None:
        _require_different(names.astype(str).tolist(), "classes", path)
    if y.dtype.kind == "U":
        classes = np.unique(y) if names is None else names.astype(str)
        unknown = np.setdiff1d(y, classes)
        if len(unknown):
            raise FedblendError(f"{path}: 'y' holds '{unknown[0]}'; valid, by 'classes': {', '.join(classes)}")
        order = np.argsort(classes)
        return order[np.searchsorted(classes, y, sorter=order)].astype(np.int64), tuple(map(str, classes))
    y = y.astype(np.int64)
    low, high = (int(y.min()), int(y.max())) if len(y) else (0, 0)
    # With more classes than samples, y holds identifiers, or numbers to predict.
    count = len(names) if names is not None else high + 1 if high < max(len(y), 2) else 0
    if low < 0 or high >= count:
        valid = f"0 to {count - 1}" if names is not None else "0 to classes - 1 (floats for regression)"
        raise FedblendError(f"{path}: labels in 'y' are from {low} to {high}; valid: {valid}")
    used = np.unique(y)
    if names is None and low > 0:
        lost = "class 0" if low == 1 else f"classes 0 to {low - 1}"
        begin = f"labels in 'y' begin at {low}, so {lost} would have no sample"
        raise FedblendError(f"{path}: {begin}; number them from 0, or name all classes in 'classes'")
    if names is None and 2 * len(used) < count:
        reach = f"labels in 'y' reach to {high}, but only {len(used)} of these {count} classes have a sample"
        remedy = f"number them 0 to {len(used) - 1}, or name all classes in 'classes'"
        raise FedblendError(f"{path}: {reach} ({listed(used.tolist())}); {remedy}")
    return y, tuple(map(str, range(count) if names is None else names))


def _clients(arrays: dict[str, np.ndarray], path: Path) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """The client of each sample, int64 0 to K - 1 or ``None``, and the clients' names."""
    if "client" not in arrays:
        return None, ()
    client, names = arrays["client"], arrays.get("client_names")
    if client.ndim != 1 or client.dtype.kind not in "iuU":
        raise wrong_form(path, "client", client, "whole numbers [n] or text")
    ids, codes = np.unique(client, return_inverse=True)
    if names is None or client.dtype.kind == "U":
        return codes.astype(np.int64), tuple(map(str, ids))
    if len(ids) and (ids[0] < 0 or ids[-1] >= len(names)):
        found = f"clients are from {ids[0]} to {ids[-1]} but 'client_names' has {len(names)} names"
        raise FedblendError(f"{path}: {found}; valid: 0 to {len(names) - 1}")
    used = tuple(map(str, names[ids]))
    _require_different(used, "client_names", path)
    return codes.astype(np.int64), used


def test_rows(split: np.ndarray, path: Path) -> np.ndarray:
    """The test samples, bool [n]."""
    is_text = _is_text(split)
    halves = split.astype(str) if is_text else np.empty(0, str)
    bad = halves[~np.isin(halves, ["0", "1", "train", "test", "False", "True"])]
    if not is_text or split.ndim != 1 or len(bad):
        found = f"holds '{bad[0]}'" if len(bad) else f"is {split.dtype} of shape {list(split.shape)}"
        raise FedblendError(f"{path}: 'split' {found}; valid: 0 or 'train', 1 or 'test' for each sample")
    return np.isin(halves, ["1", "test", "True"])


def _is_text(array: np.ndarray) -> bool:
    """Whether entries are text or can be converted to text: numbers, and ASCII bytes."""
    kind = array.dtype.kind
    return kind in "Ubiuf" or (kind == "S" and all(entry.isascii() for entry in array.ravel().tolist()))
