"""Building the C++ kernels once a machine, and calling them.

PyTorch's convolutions of few channels on batches of ten leave most of a processor idle (benchmarks/kernels.py), and a
convolution whose weights differ from sample to sample has to be a grouped one there, which is slower still.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-Wno-psabi")
TIMEOUT = 300
"""Seconds after which a compiler is taken to hang; it needs about two."""


@functools.cache
def library(source: Path = SOURCE) -> ctypes.CDLL | None:
    """The kernels of a file, built if need be; ``None`` where there is no compiler (:func:`missing` says why)."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        return None
    built = _cache() / f"kernels-{_fingerprint(compiler, source)}.so"
    try:
        if not built.exists():
            _build(compiler, source, built)
        return ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError):
        return None


def missing() -> str:
    """Why there are no kernels, or nothing where there are."""
    return "" if library() is not None else "no C++ compiler is usable (install g++, or name one in CXX)"


def _cache() -> Path:
    """The folder that keeps what was built, by XDG's rule."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "fedblend"


def _fingerprint(compiler: str, source: Path) -> str:
    """Everything the machine code depends on: a shared home may be used by processors of several kinds."""
    info = Path("/proc/cpuinfo")
    processor = [line for line in info.read_text().splitlines() if line.startswith(("flags", "Features", "model name"))]
    included = (header.read_bytes() for header in sorted(source.parent.glob("*.h")))
    parts = (source.read_bytes(), *included, repr((compiler, FLAGS, platform.machine(), processor[:2])).encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


def _build(compiler: str, source: Path, built: Path) -> None:
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        command = [compiler, *FLAGS, "-o", str(made), str(source)]
        subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT)
        # Renamed, so that another process never loads half a file.
        os.replace(made, built)


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def keep_memory() -> None:
    """Have the C library keep memory that tensors give back, where it is glibc's.

    A step makes and frees tensors of megabytes. By default each goes back to the system at once, and every page of
    the next one is then cleared and mapped anew.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)
