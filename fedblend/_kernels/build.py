"""Compile the C++ kernels once for each kind of processor, and load their functions with ctypes.

PyTorch's convolutions with few channels use a small part of a processor on batches of ten samples
(benchmarks/kernels.py). A convolution with other weights for each sample is a grouped one there, and slower still.

``torch.utils.cpp_extension`` is not used, because it needs ninja and PyTorch's headers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-shared", "-Wno-psabi")
MARCH = "FEDBLEND_MARCH"
"""Environment variable with the instruction set of the kernels, as in g++'s -march; ``native`` is the default."""
CPUINFO = Path("/proc/cpuinfo")
TIMEOUT = 300
"""Seconds after which the compiler is stopped; it needs about five."""


class Pointer:
    """An argument that is an address: a tensor, a ctypes array, an integer, or None for a null pointer."""

    @classmethod
    def from_param(cls, value: Any) -> Any:
        """Convert an argument, as ctypes does for each type of ``argtypes``."""
        if isinstance(value, torch.Tensor):
            return ctypes.c_void_p(value.data_ptr())
        return ctypes.c_void_p.from_param(value)


TYPES: dict[str, Any] = {
    "i": ctypes.c_int32,
    "I": ctypes.c_uint32,
    "q": ctypes.c_int64,
    "Q": ctypes.c_uint64,
    "f": ctypes.c_float,
    "d": ctypes.c_double,
    "P": Pointer,
}
"""Types of arguments by their letter in :mod:`struct`."""


@functools.cache
def function(source: Path, name: str, types: str) -> Callable[..., int]:
    """A C function of a source file; ``types`` has one letter of :data:`TYPES` for each argument.

    Tensors must be contiguous, unless the function takes their strides. :func:`library` must not be ``None``.
    """
    found = getattr(library(source), name)
    found.argtypes = [TYPES[letter] for letter in types]

    def called(*given: Any) -> int:
        try:
            result: int = found(*given)
        except ctypes.ArgumentError as error:
            # So ctypes tells of Ctrl-C while it converts an argument.
            if "KeyboardInterrupt" in str(error):
                raise KeyboardInterrupt from None
            raise
        return result

    return called


def library(source: Path = SOURCE) -> ctypes.CDLL | None:
    """The compiled functions of a source file; ``None`` if they are unusable (:func:`missing` gives the reason)."""
    loaded = _load(source)
    return loaded if isinstance(loaded, ctypes.CDLL) else None


def missing(source: Path = SOURCE) -> str:
    """The reason why the kernels of a source file cannot be used; empty where they can."""
    loaded = _load(source)
    return loaded if isinstance(loaded, str) else ""


_reasons: list[str] = []
"""The different reasons why this process does not use kernels."""


def all_missing() -> str:
    """The reasons why this process does not use kernels; empty where it uses all that were asked for."""
    return "; ".join(_reasons)


@functools.cache
def _load(source: Path) -> ctypes.CDLL | str:
    """The compiled functions of a source file, or the reason why there are none; the first reason is warned of."""
    loaded = _compiled(source)
    if isinstance(loaded, str) and loaded not in _reasons:
        if not _reasons:
            warnings.warn(f"training is slower than possible, because C++ kernels are not used: {loaded}", stacklevel=2)
        _reasons.append(loaded)
    return loaded


def _compiled(source: Path) -> ctypes.CDLL | str:
    """The compiled functions of a source file, or the reason why there are none."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return "no C++ compiler was found (install g++, or name one in CXX)"
    try:
        processor = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        return f"{CPUINFO}, which identifies the processor, cannot be read ({error.strerror})"
    try:
        path = cache() / f"kernels-{_fingerprint(compiler, source, processor)}.so"
    except RuntimeError:
        return "the home directory is unknown (set HOME, or a cache folder in XDG_CACHE_HOME)"
    try:
        if not path.exists():
            _announce(compiler, path.parent)
            _compile(compiler, source, path)
        return _checked(path)
    except subprocess.CalledProcessError as error:
        return f"the C++ compiler '{compiler}' failed with exit code {error.returncode} (name another one in CXX)"
    except subprocess.TimeoutExpired:
        return f"the C++ compiler '{compiler}' took longer than {TIMEOUT} s (name another one in CXX)"
    except OSError as error:
        if error.filename == compiler:
            return f"the C++ compiler '{compiler}' cannot be run ({error.strerror}; install g++, or name one in CXX)"
        return f"kernels cannot be stored in or loaded from {path.parent} ({error}; XDG_CACHE_HOME sets another folder)"


def _checked(path: Path) -> ctypes.CDLL | str:
    """The library in a file of this user, or why it is not loaded.

    A copy in a private folder is loaded: between the check and the loading another file may take the first one's place.
    """
    with path.open("rb") as file:
        owner = os.fstat(file.fileno()).st_uid
        if hasattr(os, "getuid") and owner != os.getuid():
            return f"{path} is owned by another user, {owner} (delete it, or set another folder in XDG_CACHE_HOME)"
        content = file.read()
    try:
        # A library that is loaded needs its file no longer; on Windows the file cannot be removed.
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            (copy := Path(folder) / path.name).write_bytes(content)
            return ctypes.CDLL(str(copy))
    except OSError as error:
        return f"kernels cannot be loaded from {tempfile.gettempdir()} ({error}; TMPDIR sets another folder)"


@functools.cache
def _announce(compiler: str, folder: Path) -> None:
    """Print, once in a process, that compiling takes some seconds: a first run is silent for as long."""
    line = f"fedblend: '{compiler}' compiles the C++ kernels into {folder}, once for this processor (about 10 s)"
    print(line, file=sys.stderr, flush=True)


def _flags() -> tuple[str, ...]:
    return (*FLAGS, f"-march={os.environ.get(MARCH) or 'native'}")


def cache() -> Path:
    """The folder of kernels and of choices of engines, by XDG's rule. Raises :class:`RuntimeError` without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedblend"


def _fingerprint(compiler: str, source: Path, processor: str) -> str:
    """A hash of everything that the machine code depends on: processors of several kinds may share a home directory."""
    kinds = [line for line in processor.splitlines() if line.startswith(("flags", "Features", "model name"))]
    included = (header.read_bytes() for header in sorted(source.parent.glob("*.h")))
    parts = (source.read_bytes(), *included, repr((compiler, _flags(), platform.machine(), kinds[:2])).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _compile(compiler: str, source: Path, path: Path) -> None:
    path.parent.parent.mkdir(parents=True, exist_ok=True)
    # Code from this folder is run, so only its owner may write to it.
    path.parent.mkdir(mode=0o700, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        unfinished = Path(folder) / path.name
        command = [compiler, *_flags(), "-o", str(unfinished), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
        # Renamed, so that another process never loads half a file.
        os.replace(unfinished, path)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """Make glibc keep the memory of freed tensors for later ones; without effect on other C libraries.

    A training step allocates and frees tensors of megabytes. By default, glibc returns each to the system, which
    clears and maps every page of the next one anew.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, TypeError):
        # Another C library, or Windows, which has no library of the program itself.
        return
    mallopt(M_MMAP_THRESHOLD, 1 << 30)
    mallopt(M_TRIM_THRESHOLD, 1 << 30)
