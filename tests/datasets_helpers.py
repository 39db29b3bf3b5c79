"""Helpers for tests of data sets."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from fedblend.core.errors import FedblendError
from fedblend.core.registry import build

SHARED = Path(os.environ["FEDBLEND_DATA"]) if os.environ.get("FEDBLEND_DATA") else None


def real(path: str) -> Path:
    """A file or folder of the real data; the test is skipped where it is absent."""
    if SHARED is None or not (SHARED / path).exists():
        pytest.skip(f"FEDBLEND_DATA {'holds no ' + path if SHARED else 'is not set'}")
    return SHARED / path


def idx(array: np.ndarray) -> bytes:
    """An array of bytes in MNIST's format, with its header."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def load(name: str, **options):
    """Load a data set by name, with options."""
    return build(
        "dataset", {"name": name, **{k: str(v) if isinstance(v, Path) else v for k, v in options.items()}}
    ).load()


def refused(message: str, name: str, **options) -> str:
    """The message of the error that loading a data set raises."""
    with pytest.raises(FedblendError, match=message) as caught:
        load(name, **options)
    return str(caught.value)


@contextlib.contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler], None]) -> Iterator[str]:
    """The address of a server on this machine that answers each GET request."""
    methods = {"do_GET": answer, "log_message": lambda *said: None}
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (BaseHTTPRequestHandler,), methods))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def change(path: Path, damage: Callable[[bytes], bytes]) -> None:
    """Damage a file's bytes."""
    path.write_bytes(damage(path.read_bytes()))


def cifar(folder: Path, hundred: bool = False) -> np.ndarray:
    """Write small files of the binary version; return the images of the first file."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, first = np.random.default_rng(0), None
    names = ["train.bin", "test.bin"] if hundred else [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]
    for name in names:
        count = 100 if name == "train.bin" else 20
        pictures = rng.integers(0, 256, (count, 3, 32, 32), np.uint8)
        fine = np.arange(count) * 5 % 100 if hundred else np.arange(count) % 10
        labels = np.stack([fine // 5, fine], 1) if hundred else fine[:, None]
        (folder / name).write_bytes(np.hstack([labels.astype(np.uint8), pictures.reshape(count, -1)]).tobytes())
        first = pictures if first is None else first
    if hundred:
        (folder / "fine_label_names.txt").write_text("\n".join(f"fine{i}" for i in range(100)) + "\n")
        (folder / "coarse_label_names.txt").write_text("\n".join(f"coarse{i}" for i in range(20)) + "\n\n")
    return first
