"""Paths in experiments: those in a file are relative to the file's folder, all others to the current one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def import_from(folders: Iterable[str]) -> None:
    """Let modules in these folders be imported, here and in processes that are started from here.

    The fedblend that runs goes before them: a folder in one of them that is called so, such as a checkout, would be
    taken for it otherwise.
    """
    ours = str(Path(__file__).resolve().parents[2])
    sys.path += [folder for folder in dict.fromkeys([ours, *folders]) if folder not in sys.path]


class FromFile(str):
    """Text of an experiment file, which knows in what folder the file lies."""

    folder: str

    @classmethod
    def of(cls, text: str, folder: str) -> FromFile:
        """``text`` as it stands in a file in ``folder``."""
        made = cls(text)
        made.folder = folder
        return made


def from_file(value: Any, file: str | Path) -> Any:
    """A file's content, with every text in it marked as that file's (names of fields are left as they are)."""
    if isinstance(value, Mapping):
        return {key: from_file(inner, file) for key, inner in value.items()}
    if isinstance(value, list):
        return [from_file(inner, file) for inner in value]
    return FromFile.of(value, str(Path(file).absolute().parent)) if isinstance(value, str) else value


def absolute(value: Any) -> Any:
    """A path with ``~`` expanded, absolute, so that it names the same file from wherever a run goes on.

    What is no text is given back as it is, for the validation to tell.
    """
    if not isinstance(value, str):
        return value
    folder = value.folder if isinstance(value, FromFile) else ""
    return os.path.abspath(os.path.join(folder, os.path.expanduser(value)))


def absolute_folder(value: Any) -> Any:
    """The path of a folder that is there, absolute; anything else, such as a name, as it is."""
    path = absolute(value)
    return path if isinstance(path, str) and os.path.isdir(path) else value
