"""Files that are never half-written: a temporary name, fsync, rename."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError

BLOCK = 1 << 16
"""Bytes that are read at a time, backwards, to find the end of a file's last whole line."""


def write_atomically(path: Path, content: bytes | str) -> None:
    """Replace ``path`` by ``content``, wholly or not at all. Raises :class:`FedblendError` if that fails."""
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
            f"{path}: could not be written: {error.strerror or error}; what was there before is untouched. "
            "Make room or mend the folder, and give the command again; a run goes on with: fedblend resume"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Replace ``path`` by ``value`` as indented JSON."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def append_line(path: Path, value: Any) -> None:
    """Add one JSON line and have it on the disk when this returns. A last line cut short by a kill is taken away."""
    try:
        with open(path, "ab", buffering=0) as file:
            end = _whole_lines(path, file.tell())
            if end < file.tell():
                file.truncate(end)
            file.write(f"{json.dumps(value)}\n".encode())
            os.fsync(file.fileno())
    except OSError as error:
        raise FedblendError(
            f"{path}: could not be written: {error.strerror or error}; make room or mend the folder, then go on "
            "with: fedblend resume"
        ) from error


def _whole_lines(path: Path, size: int) -> int:
    """Bytes of a file of this size up to the end of its last whole line."""
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
    """The whole JSON lines of a log; a last line cut short by a kill is left out.

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
                    f"{path}: line {number} of {len(texts)} is damaged; put back a copy of the file, or remove the "
                    "run's folder and run it anew"
                ) from None
    return lines


def _sync_folder(folder: Path) -> None:
    """Have a rename on the disk, not only in the system's memory."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
