"""The idx format of MNIST and its heirs: a magic number, the shape, then the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from fedblend.core.errors import FedblendError

UNSIGNED_BYTE = 0x08
"""Third byte of the magic number: elements are unsigned bytes, the only type these data sets use."""

KINDS = {1: "labels", 3: "images"}


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """The uint8 array in an idx file, gzipped or not, which must have ``dimensions`` axes.

    Images have 3 ([n, H, W], magic number 0x00000803), labels 1 ([n], 0x00000801). Raises
    :class:`FedblendError` that names the file if it cannot be unpacked, if the magic number is
    another, or if the bytes are fewer or more than the shape in the header asks for.
    """
    raw = _bytes(path)
    kind = KINDS.get(dimensions, f"arrays of {dimensions} axes")
    magic = struct.pack(">BBBB", 0, 0, UNSIGNED_BYTE, dimensions)
    if raw[:4] != magic:
        raise FedblendError(
            f"{path}: begins with 0x{raw[:4].hex() or '(nothing)'}; idx {kind} begin with 0x{magic.hex()}. "
            "Is it another file under this name?"
        )
    header = 4 + 4 * dimensions
    if len(raw) < header:
        raise FedblendError(f"{path}: is truncated: {len(raw)} bytes, less than its header of {header}")
    shape = struct.unpack(f">{dimensions}I", raw[4:header])
    expected = header + math.prod(shape)
    if len(raw) != expected:
        fault = "is truncated" if len(raw) < expected else "is too long"
        raise FedblendError(
            f"{path}: {fault}: its header tells of shape {list(shape)}, which takes {expected} bytes, "
            f"but it holds {len(raw)}; fetch it anew"
        )
    return np.frombuffer(raw, np.uint8, offset=header).reshape(shape)


def read_pair(images: Path, labels: Path, size: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 1, size, size] and labels int64 [n]; raises if they are not a pair of this kind."""
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if x.shape[1:] != (size, size):
        found = f"{x.shape[1]} x {x.shape[2]}"
        raise FedblendError(f"{images}: images are of {found} pixels; expected {size} x {size}")
    if len(x) != len(y):
        raise FedblendError(
            f"{images} holds {len(x)} images but {labels} holds {len(y)} labels; the two must be of one half"
        )
    if len(y) and y.max() >= classes:
        raise FedblendError(f"{labels}: holds the label {y.max()}; valid: 0 to {classes - 1}")
    return x[:, None], y.astype(np.int64)


def _bytes(path: Path) -> bytes:
    """The file's content, unpacked if it is gzipped (told by its first bytes, whatever its name)."""
    raw = path.read_bytes()
    if raw[:2] != b"\x1f\x8b":
        return raw
    try:
        return gzip.decompress(raw)
    except (EOFError, OSError, zlib.error) as error:
        raise FedblendError(f"{path}: truncated or damaged, cannot be unpacked ({error}); fetch it anew") from None
