"""PyTorch ``Dataset`` objects of one's own, as a data set for experiments."""

from __future__ import annotations

import dataclasses
import os
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedblend.core.errors import FedblendError, listed
from fedblend.core.paths import given_path
from fedblend.data.loaders.files import converted
from fedblend.data.loaders.image_folder import HALVES
from fedblend.data.loaders.npz import Npz, kind_of

Samples = Any
"""An object with ``len`` and samples by number, such as a ``torch.utils.data.Dataset``."""

FIELDS = {
    "x": ("x", "image", "img", "pixel_values", "input", "inputs", "features", "data"),
    "y": ("y", "label", "labels", "target", "targets"),
}
"""Names of the input and of the target in samples with named fields, as data sets of Hugging Face have them."""

MARK = "from_torch"  # An array of the files that :func:`from_torch` has written, which it may replace


def from_torch(
    train: Samples | Mapping[Any, Samples],
    path: str | Path,
    *,
    test: Samples | Mapping[Any, Samples] | None = None,
    clients: Sequence[Any] | None = None,
    classes: Sequence[str] | None = None,
    labels: Sequence[str] | None = None,
    kind: Literal["tokens"] | None = None,
) -> Npz:
    """Write data sets of PyTorch to an ``.npz`` file; return the part that reads it, for ``Experiment(data=...)``.

    A file, because a run can then be resumed, attacked and reported by other processes. ``train`` is one data set for
    each client by name, or one for all, with ``clients`` (a number or a name for each sample) if it has clients.
    ``test`` has the same form, without ``clients``; by default a fifth of each client's samples is test. ``classes``
    and ``labels`` are their names. Samples are pairs (x, y) of arrays, tensors or pictures, or have named fields
    (a dict, a named tuple, a dataclass) of which one is an input and one a target, such as ``image`` and ``label``
    (:data:`FIELDS`); other fields are left out. y is a whole number (a class), whole numbers or booleans (1 for each
    label that the sample has), or floats to predict. Pillow's pictures are stored as viewers show them: a palette's
    colours, transparent pixels on white, upright by EXIF. Pictures that were scaled to [0, 1] are stored as the pixels
    that they were. With ``kind="tokens"`` x are ids of tokens, whole numbers [T], or [2, T] with their attention mask.
    A file that is there is replaced only if it was written so. Raises :class:`FedblendError`.

        data = fedblend.from_torch({"north": north, "south": south}, "two.npz")
        fedblend.run(fedblend.Experiment(data=data, partition="natural"))
    """
    if isinstance(train, Mapping) and clients is not None:
        raise FedblendError("clients: not valid beside a data set for each client; its keys are the clients")
    if (test is not None and isinstance(test, Mapping) != isinstance(train, Mapping)) or (test and clients is not None):
        raise FedblendError("test: not of the form of train; valid: a data set for each client in both, or in none")
    halves = [_half(train, clients), *([] if test is None else [_half(test, None)])]
    arrays: dict[str, Any] = {
        "x": _as_pixels(_join("x", "train and test", [half[0] for half in halves])),
        "y": _join("y", "train and test", [half[1] for half in halves]),
        MARK: np.array(True),
    }
    if len(halves) == 2:
        arrays["split"] = np.repeat(["train", "test"], [len(half[1]) for half in halves])
    if owners := [half[2] for half in halves if half[2] is not None]:
        arrays["client"] = np.concatenate(owners)
    for field, names in (("classes", classes), ("labels", labels)):
        if names is not None:
            arrays[field] = np.array([str(name) for name in names])
    target = given_path(path, "path").absolute()
    _require_own(target)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.npz")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        np.savez(temporary, **arrays)
        os.replace(temporary, target)
    except OSError as error:
        raise FedblendError(f"{target}: cannot be written ({error.strerror})") from None
    finally:
        temporary.unlink(missing_ok=True)
    return Npz(str(target), kind_=kind)


def _require_own(target: Path) -> None:
    """Raise :class:`FedblendError` if there is a file that :func:`from_torch` has not written."""
    try:
        with np.load(target, allow_pickle=False) as archive:
            is_own = MARK in archive.files
    except FileNotFoundError:
        return
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        is_own = False
    if not is_own:
        raise FedblendError(f"{target}: is a file that from_torch has not written; name another file, or remove it")


def _half(
    given: Samples | Mapping[Any, Samples], clients: Sequence[Any] | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Inputs, targets and clients of one data set, or of one for each client."""
    if not isinstance(given, Mapping):
        x, y = _stack(given, "the data set")
        if clients is not None and len(clients) != len(y):
            raise FedblendError(f"clients: {len(clients)} for {len(y)} samples; valid: one for each sample")
        return x, y, None if clients is None else _owners(clients)
    if not given:
        raise FedblendError("from_torch: there are no clients; give a data set for each")
    if "train" in given and {*given} <= {name for names in HALVES for name in names}:
        valid = 'a data set for each client, or from_torch(data["train"], path, test=data["test"])'
        raise FedblendError(f"from_torch: the keys {listed(list(given))} are halves, not clients; valid: {valid}")
    pairs = [_stack(samples, f"client {name}") for name, samples in given.items()]
    owner = np.repeat([str(name) for name in given], [len(y) for _, y in pairs])
    x, y = (_join(name, "clients", [pair[i] for pair in pairs]) for i, name in enumerate("xy"))
    return x, y, owner


def _owners(clients: Sequence[Any]) -> np.ndarray:
    """The client of each sample as whole numbers or as text, never as objects, which would be pickled."""
    owners = np.array(clients)
    if owners.dtype.kind in "OU" and all(isinstance(owner, str) for owner in clients):
        owners = owners.astype(str)
    elif owners.dtype.kind == "O" and all(type(owner) is int for owner in clients):
        owners = owners.astype(np.int64)
    elif owners.dtype.kind not in "iu":
        kinds = listed(sorted({type(owner).__name__ for owner in clients}))
        raise FedblendError(f"clients: holds {kinds}; valid: a whole number for each sample, or a text for each")
    return owners


def _join(name: str, owners: str, arrays: Sequence[np.ndarray]) -> np.ndarray:
    """One array of all. Raises :class:`FedblendError` for samples of several shapes or kinds of type."""
    where = f"from_torch: {name} of {owners}"
    if len(shapes := {array.shape[1:] for array in arrays}) > 1:
        raise FedblendError(f"{where}: samples of shapes {sorted(map(list, shapes))}; valid: one shape")
    if len(kinds := {kind_of(array) for array in arrays}) > 1:
        raise FedblendError(f"{where}: both {' and '.join(sorted(kinds))}; valid: one kind")
    return np.concatenate(arrays)


def _stack(samples: Samples, whose: str) -> tuple[np.ndarray, np.ndarray]:
    """All samples as arrays [n, ...] and [n] or [n, q]."""
    try:
        pairs = [_pair(samples[i]) for i in range(len(samples))]
        if not pairs:
            raise ValueError("it holds no samples")
        x, y = (np.stack([_array(entry) for entry in column]) for column in zip(*pairs, strict=True))
    except (ValueError, TypeError, LookupError) as error:
        numbered = hasattr(samples, "__len__")
        valid = "pairs (x, y) of one shape" if numbered else "samples by number, such as list(DATA_SET) of an iterable"
        raise FedblendError(f"from_torch: {whose}: {error}; valid: {valid}") from None
    return x, y


def _pair(sample: Any) -> tuple[Any, Any]:
    """The input and the target of a sample. Raises :class:`ValueError` for a sample of unknown form."""
    if dataclasses.is_dataclass(sample):
        sample = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
    elif hasattr(sample, "_asdict"):
        sample = sample._asdict()
    if isinstance(sample, Mapping):
        x, y = ([name for name in names if name in sample] for names in FIELDS.values())
        if len(x) == len(y) == 1:
            return sample[x[0]], sample[y[0]]
        inputs, targets = (", ".join(names) for names in FIELDS.values())
        found = f"of which not exactly one is an input ({inputs}) and one a target ({targets})"
        remedy = "choose them: [(one[INPUT], one[TARGET]) for one in DATA_SET]"
        raise ValueError(f"a sample has the fields {listed(list(sample))}, {found}; {remedy}")
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        entries = f" of {len(sample)} entries" if isinstance(sample, tuple | list) else ""
        raise ValueError(f"a sample is a {type(sample).__name__}{entries}")
    return sample[0], sample[1]


def _array(entry: Any) -> np.ndarray:
    """An array, a tensor of any device, also one that requires a gradient, or a picture as [H, W] or [C, H, W]."""
    from PIL import Image

    if isinstance(entry, Image.Image):
        pixels = np.asarray(converted(entry, None, "from_torch: a picture"))
        return pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    array = np.asarray(entry.detach().cpu() if hasattr(entry, "detach") else entry)
    if array.dtype.kind == "O":
        # NumPy would pickle objects.
        raise ValueError(f"an input or a target is a {type(entry).__name__}, not numbers")
    return array


def _as_pixels(x: np.ndarray) -> np.ndarray:
    """Pictures [n, C, H, W] that were scaled from pixels to [0, 1], as pixels; anything else as it is."""
    if x.ndim != 4 or x.shape[1] not in (1, 3) or x.dtype.kind != "f":
        return x
    pixels = np.rint(x.astype(np.float64) * 255)
    same = (x >= 0).all() and (x <= 1).all() and np.array_equal((pixels / 255).astype(x.dtype), x)
    return pixels.astype(np.uint8) if same else x
