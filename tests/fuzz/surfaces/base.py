"""What all surfaces use: outcomes and cases, the commands that read an input, tiny experiments, changed files."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import mutations
import numpy as np

from fedblend.cli import main
from fedblend.core.errors import FedblendError, printable
from fedblend.runs.faults import user_error

CLEAN, MESSAGE = "clean", "message"


@dataclass
class Outcome:
    """What became of an input: ``clean`` or ``message``, and what was printed."""

    kind: str
    text: str = ""
    code: int = 0


@dataclass
class Case:
    """An input: in words, and what reads it. Errors other than :class:`FedblendError` are the fuzzer's findings."""

    words: str
    run: Callable[[], Outcome]


Surface = Callable[[Random, Path, Path], Case]
"""Takes a random generator, the empty folder of the input, and the folder of real files (:func:`make_real_files`)."""


# Running -----------------------------------------------------------------------------------------------------


def command(folder: Path, *words: object, report: bool = True) -> Case:
    """A command of ``fedblend`` in this process, in ``folder``; without ``report``, runs do not write their page."""
    arguments = [str(word) for word in words]
    report = report or arguments[:1] not in (["run"], ["resume"])

    def run() -> Outcome:
        out, err = io.StringIO(), io.StringIO()
        code: Any = 0
        page = contextlib.nullcontext() if report else mock.patch("fedblend.report.write")
        with (
            page,
            in_folder(folder, ["fedblend", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        kind = CLEAN if code in (0, 130) else MESSAGE
        return Outcome(kind, f"{out.getvalue()}\n{err.getvalue()}", code)

    return Case(f"fedblend {' '.join(map(repr, arguments))}", run)


@contextlib.contextmanager
def in_folder(folder: Path, arguments: list[str]) -> Iterator[None]:
    """Inside, this process works in a folder as a command with these arguments does."""
    before = Path.cwd(), sys.argv, list(sys.path), dict(os.environ)
    os.chdir(folder)
    sys.argv = arguments
    try:
        yield
    finally:
        os.chdir(before[0])
        sys.argv, sys.path[:] = before[1], before[2]
        os.environ.clear()
        os.environ.update(before[3])


def call(words: str, function: Callable[[], Any]) -> Case:
    """A call of a function of fedblend; its errors are told as the command line tells them."""

    def run() -> Outcome:
        try:
            function()
        except FedblendError as error:
            return Outcome(MESSAGE, f"fedblend: error: {printable(str(error))}", 2)
        except Exception as error:
            if (message := user_error(error)) is None:
                raise
            return Outcome(MESSAGE, f"fedblend: error: {printable(message)}", 2)
        return Outcome(CLEAN)

    return Case(words, run)


# Tiny experiments -------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {
    "name": "tiny",
    "rounds": 1,
    "data": {"name": "npz", "path": "tiny.npz"},
    "partition": {"name": "iid", "clients": 3},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"cohort": 2, "epochs": 1, "batch_size": 8, "lr": 0.05},
    "method": {"name": "fedavg"},
    "engine": "loop",
    "ranks": 1,
    "unsafe": True,
}
"""An experiment of some hundredths of a second."""


def tiny(folder: Path, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """The tiny experiment, with its data in ``folder``."""
    table = {**copy.deepcopy(TINY), **copy.deepcopy(changes or {})}
    if table["data"] == TINY["data"]:
        write_npz(folder / "tiny.npz")
    return {key: inner for key, inner in table.items() if inner is not None}


def write_npz(path: Path) -> None:
    """A data set of 45 small images of three writers."""
    np.savez(path, **_arrays())


def _arrays() -> dict[str, np.ndarray]:
    rng, y = np.random.default_rng(0), np.arange(45) % 3
    x = (rng.integers(0, 90, (45, 6, 6)) + y[:, None, None] * 60).astype(np.uint8)
    names = {"client_names": np.array(["ann", "ben", "cia"]), "classes": np.array(["a", "b", "c"])}
    return {"x": x, "y": y, "client": np.arange(45) // 15, "split": np.arange(45) % 5 // 4, **names}


# Changed files ----------------------------------------------------------------------------------------------


def changed_json(rng: Random, raw: bytes) -> bytes:
    """A changed copy of a JSON file."""
    try:
        table = mutations.plain(mutations.of_table(rng, json.loads(raw)), toml=False)
        return json.dumps(table).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return mutations.of_bytes(rng, raw)


def spoil_path(rng: Random, path: Path) -> None:
    """Put something else in a file's place: a folder, a link to nowhere or to itself, an unreadable or endless file."""
    path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    kind = rng.randrange(8)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to("nowhere")
    elif kind == 2:
        path.symlink_to(path.name)
    elif kind == 3:
        path.write_bytes(b"")
    elif kind == 4:
        path.write_bytes(b"x = 1\n")
        path.chmod(0)
    elif kind == 5:
        os.mkfifo(path)
    elif kind == 6:
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
        path.chmod(0)


def changed_lines(rng: Random, raw: bytes) -> bytes:
    """JSON lines with one or two of them changed, doubled, moved or removed."""
    lines = raw.splitlines()
    for _ in range(rng.choice((1, 1, 2))):
        at, kind = rng.randrange(len(lines)) if lines else 0, rng.randrange(8)
        if not lines:
            break
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[at])
        elif kind == 2:
            lines.insert(0, lines.pop(at))
        else:
            lines[at] = changed_json(rng, lines[at]) if lines[at].startswith(b"{") else b"{}"
    return b"\n".join(lines) + b"\n"
