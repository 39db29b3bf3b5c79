"""A data set from plain arrays: x, y and, where there are, clients, a split and names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedblend.core.dataset import Dataset, Samples, check
from fedblend.core.errors import FedblendError, listed
from fedblend.data.loaders.files import draw_test_half


def dataset_of(
    arrays: dict[str, np.ndarray], name: str, source: Path, test_share: float, files: dict[str, str]
) -> Dataset:
    """The data set of the arrays x, y, client, split, client_names and classes, as :class:`Npz` describes them.

    ``source`` stands in messages; its own name keys the draw of a test half. ``files`` are SHA-256 by name. Raises
    :class:`FedblendError` that names the source and the array that is not as it should be.
    """
    _require_lengths(arrays, source)
    kind, x = _inputs(arrays["x"], source)
    y, classes = _targets(arrays["y"], arrays.get("classes"), source)
    client, names = _clients(arrays, source)
    if "split" in arrays:
        test, rule = _split(arrays["split"], source), "the file's own split"
    else:
        by = client if client is not None else y if classes else np.zeros(len(y), np.int64)
        test = draw_test_half(by, test_share, source.name)
        group = "client" if client is not None else "class"
        rule = f"test: {test_share:g} of each {group}, drawn by the file's name"
    train_half, test_half = (
        Samples(_tensor(x, rows), _tensor(y, rows), None if client is None else client[rows]) for rows in (~test, test)
    )
    facts: dict[str, Any] = {"source": str(source), "files": files, "notes": rule}
    return check(Dataset(name, kind, train_half, test_half, classes, names, facts=facts))


def _require_lengths(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Raise :class:`FedblendError` unless there are samples, each with an entry in every array, and names in a row."""
    n = len(np.atleast_1d(arrays["y"]))
    if n == 0:
        raise FedblendError(f"{path}: 'y' holds no samples; at least two are needed, to train and to test on")
    for name in ("x", "y", "client", "split"):
        if name in arrays and (arrays[name].ndim == 0 or len(arrays[name]) != n):
            raise FedblendError(
                f"{path}: '{name}' is of shape {list(arrays[name].shape)} but 'y' has {n} entries; "
                "each needs one entry a sample"
            )
    for name in ("client_names", "classes"):
        if name in arrays and (arrays[name].ndim != 1 or not _are_words(arrays[name])):
            raise FedblendError(
                f"{path}: '{name}' is {arrays[name].dtype} of shape {list(arrays[name].shape)}; valid: names as text "
                "(or numbers), in one row"
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
    if names is None and low > 0:
        raise FedblendError(
            f"{path}: labels in 'y' begin at {low}, so that {'class 0' if low == 1 else f'classes 0 to {low - 1}'} "
            "would have no sample; number them from 0, or name all classes in 'classes'"
        )
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
    if not _are_words(split):
        raise FedblendError(f"{path}: 'split' is {split.dtype}; valid: 0 or 'train', 1 or 'test' for each sample")
    words = split.astype(str)
    bad = ~np.isin(words, ["0", "1", "train", "test", "False", "True"])
    if split.ndim != 1 or bad.any():
        found = f"holds '{words[bad][0]}'" if bad.any() else f"is of shape {list(split.shape)}"
        raise FedblendError(f"{path}: 'split' {found}; valid: 0 or 'train', 1 or 'test' for each sample")
    return np.isin(words, ["1", "test", "True"])


def _are_words(array: np.ndarray) -> bool:
    """Whether entries are text, or can be told as text: numbers, and bytes if they are ASCII."""
    kind = array.dtype.kind
    return kind in "Ubiuf" or (kind == "S" and all(entry.isascii() for entry in array.ravel().tolist()))


def _tensor(array: np.ndarray, rows: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array[rows])
