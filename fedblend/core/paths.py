"""Paths in experiments: relative to the file's folder if they are from a file, else to the current folder."""

from __future__ import annotations

import codecs
import os
import stat
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fedblend.core.errors import FedblendError, brief

Content = TypeVar("Content", str, bytes)


def import_from(folders: Iterable[str]) -> None:
    """Add folders to the import path of this process and of the processes that it starts.

    The running fedblend is added first, so that a folder named fedblend in one of them, such as a checkout, does not
    replace it.
    """
    own = str(Path(__file__).resolve().parents[2])
    sys.path += [folder for folder in dict.fromkeys([own, *folders]) if folder not in sys.path]


def read_text(path: str | Path, remedy: str, errors: str = "strict") -> str:
    """The text of a regular file, in UTF-8. ``errors`` says what becomes of other bytes, as in :func:`open`.

    A byte-order mark, which Windows' Notepad writes, is no part of the text.
    Pipes and devices are not read: they may have no end. Raises :class:`FedblendError` that ends in ``remedy``.
    """
    return _read(path, remedy, lambda file: file.read_text(encoding="utf-8-sig", errors=errors))


def read_bytes(path: str | Path, remedy: str) -> bytes:
    """The bytes of a regular file, as :func:`read_text` reads a text."""
    return _read(path, remedy, Path.read_bytes)


def _read(path: str | Path, remedy: str, read: Callable[[Path], Content]) -> Content:
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode):
            return read(Path(path))
        reason = "is a folder" if stat.S_ISDIR(mode) else "is no regular file"
    except FileNotFoundError:
        reason = "no such file"
    except UnicodeDecodeError as error:
        utf16 = error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        reason = "is UTF-16; save it as UTF-8" if utf16 else f"is no text in UTF-8 ({error})"
    except (OSError, ValueError) as error:
        reason = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    raise FedblendError(f"{path}: {reason}; {remedy}")


class FileText(str):
    """Text of a configuration file, with the folder of that file.

    The folder is stored with the text, because one table holds values of a file and of the command line (``--set``),
    whose paths are relative to different folders.
    """

    folder: str

    def __new__(cls, text: str, folder: str = "") -> FileText:
        """``text`` of a file in ``folder``."""
        file_text = super().__new__(cls, text)
        file_text.folder = folder
        return file_text


def from_file(value: Any, file: str | Path) -> Any:
    """The content of a file, with every string value as :class:`FileText`; keys are unchanged."""
    if isinstance(value, Mapping):
        return {key: from_file(inner, file) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_file(inner, file) for inner in value]
    return FileText(value, str(Path(file).absolute().parent)) if isinstance(value, str) else value


def given_path(value: Any, field: str) -> Path:
    """A path that a caller in Python gives, with ``~`` expanded. Raises :class:`FedblendError` that names ``field``."""
    if not isinstance(value, (str, os.PathLike)) or not str(value):
        raise FedblendError(f"{field}: {brief(value)} is not valid; give a path")
    return Path(os.path.expanduser(value))


def absolute(value: Any) -> Any:
    """A path as an absolute one with ``~`` expanded, independent of the folder in which a run is resumed.

    A value of another type is returned unchanged; validation rejects it.
    """
    if not isinstance(value, (str, os.PathLike)):
        return value
    return os.path.abspath(os.path.join(getattr(value, "folder", ""), os.path.expanduser(value)))


def absolute_folder(value: Any) -> Any:
    """The absolute path of an existing folder; any other value, such as a name, unchanged."""
    path = absolute(value)
    return path if isinstance(path, str) and os.path.isdir(path) else value


def absolute_file(value: Any) -> Any:
    """The absolute path of an existing file; any other value, such as a name, unchanged."""
    path = absolute(value)
    return path if isinstance(path, str) and os.path.isfile(path) else value
