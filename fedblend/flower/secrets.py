"""Random numbers at real sites, which nobody can continue or compute back."""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

BLOCK_BYTES = 1 << 15
"""Random bytes that are fetched at a time."""


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
    """Endless random whole numbers of 64 bits."""
    block = 0
    while True:
        text = b"" if key is None else key + block.to_bytes(8, "little")
        content = os.urandom(BLOCK_BYTES) if key is None else hashlib.shake_256(text).digest(BLOCK_BYTES)
        yield from np.frombuffer(content, "<u8").tolist()
        block += 1
