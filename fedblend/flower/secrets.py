"""A site's secret, and random numbers at real sites, which nobody can continue or compute back."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.errors import FedblendError
from fedblend.core.files import TEMPORARY, sole_writer
from fedblend.core.paths import read_bytes

KEY_BYTES = 32  # Length of a site's secret
BLOCK_BYTES = 1 << 15  # Random bytes that are fetched at a time


def secret_generator(key: bytes | None = None) -> np.random.Generator:
    """A cryptographic generator for real sites, whose numbers nobody can continue or compute back.

    Without a key its bits are the operating system's random bytes (``os.urandom``), because NumPy's own generators can
    be reconstructed from enough of their numbers. With a secret key they are SHAKE-256 of the key and a counter, so the
    same key gives the same numbers again. A million numbers take about a second.
    """
    return np.random.Generator(_SecretBits(key))  # type: ignore[arg-type]


class _SecretBits:
    """Cryptographic bits in the form that NumPy's ``Generator`` takes: a capsule of NumPy's C struct ``bitgen_t``."""

    class Functions(ctypes.Structure):
        """The struct: a state, which is not used here, and four functions of it."""

        _fields_ = [(name, ctypes.c_void_p) for name in ("state", "uint64", "uint32", "double", "raw")]

    def __init__(self, key: bytes | None) -> None:
        words = _secret_words(key)

        def function(result: type, compute: Callable[[int], float]) -> Any:
            return ctypes.CFUNCTYPE(result, ctypes.c_void_p)(lambda state: compute(next(words)))

        # As long as this object exists: the struct holds addresses of them only.
        self._kept = (
            function(ctypes.c_uint64, lambda word: word),
            function(ctypes.c_uint32, lambda word: word >> 32),
            function(ctypes.c_double, lambda word: (word >> 11) * 2.0**-53),
        )
        addresses = [ctypes.cast(one, ctypes.c_void_p).value for one in self._kept]
        self._functions = self.Functions(None, *addresses, addresses[0])
        new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
            ("PyCapsule_New", ctypes.pythonapi)
        )
        self.capsule = new(ctypes.addressof(self._functions), b"BitGenerator", None)
        self.lock = threading.Lock()


def _secret_words(key: bytes | None) -> Iterator[int]:
    block = 0
    while True:
        text = b"" if key is None else key + block.to_bytes(8, "little")
        content = os.urandom(BLOCK_BYTES) if key is None else hashlib.shake_256(text).digest(BLOCK_BYTES)
        yield from np.frombuffer(content, "<u8").tolist()
        block += 1


def site_secret(folder: Path) -> bytes:
    """Return a site's secret, the file ``key`` in the folder ``audit.shared``; it is drawn at its first use.

    Raises :class:`FedblendError` if others can read the folder or the file, or if it is damaged.
    """
    path = folder / "key"
    private_folder(folder, "this site's secret")
    try:
        if not path.exists():
            with sole_writer(folder):
                _create(path, secrets.token_bytes(KEY_BYTES))
        mode = path.stat().st_mode
    except OSError as error:
        raise FedblendError(f"{path}: cannot be used as this site's secret: {error.strerror}") from None
    secret = read_bytes(path, "it is this site's secret; restore it from a copy")
    if mode & 0o077:
        raise FedblendError(f"{path}: other users can read this site's secret; run: chmod 600 {path}")
    if len(secret) != KEY_BYTES:
        raise FedblendError(
            f"{path}: is damaged: {len(secret)} bytes, not {KEY_BYTES}; restore it from a copy. Without a copy, "
            "remove it, and run: fedblend site audit --accept"
        )
    return secret


def private_folder(folder: Path, what: str) -> None:
    """Make the folder of ``what``. Raises :class:`FedblendError` if it cannot be used, or if others can read it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mode = folder.stat().st_mode
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used for {what}: {error.strerror}") from None
    if mode & 0o077:
        raise FedblendError(f"{folder}: other users can read {what}; run: chmod 700 {folder}")


def _create(path: Path, content: bytes) -> None:
    """Create a file that only its owner can read, whole or not at all; leave one that another process created."""
    handle, temporary = tempfile.mkstemp(TEMPORARY, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)
