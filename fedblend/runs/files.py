"""Atomic writes (temporary name, fsync, rename) and JSON-lines logs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError

BLOCK = 1 << 16
"""Bytes in one read, backwards, to find the end of a file's last complete line."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content`` atomically. Raises :class:`FedblendError` if that fails."""
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        _sync_folder(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise FedblendError(
            f"{path}: could not be written: {error.strerror or error}; the previous file is unchanged. "
            "Free disk space or repair the folder, then repeat the command; resume a run with: fedblend resume"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def append_line(path: Path, value: Any) -> None:
    """Append one JSON line and sync it to the disk. A truncated last line is removed first."""
    try:
        with open(path, "ab", buffering=0) as file:
            end = _whole_lines(path, file.tell())
            if end < file.tell():
                file.truncate(end)
            file.write(f"{json.dumps(value)}\n".encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise FedblendError(
            f"{path}: could not be written: {error.strerror or error}; free disk space or repair the folder, then "
            "run: fedblend resume"
        ) from error


def _whole_lines(path: Path, size: int) -> int:
    """Return the bytes of a file of this size up to the end of its last complete line."""
    with open(path, "rb") as file:
        end = size
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            if (found := file.read(end - start).rfind(b"\n")) >= 0:
                return start + found + 1
            end = start
    return 0


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the JSON lines of a log without a truncated last line.

    Raises :class:`FedblendError` for a damaged line before the last.
    """
    texts = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    lines = []
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            if number < len(texts):
                raise FedblendError(
                    f"{path}: line {number} of {len(texts)} is damaged; restore a copy of the file, or remove the "
                    "run's folder and run it again"
                ) from None
    return lines


def _sync_folder(folder: Path) -> None:
    """Sync a rename to the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
