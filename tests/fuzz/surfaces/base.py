"""What all surfaces use: outcomes and cases, the commands that read an input, tiny experiments, changed files."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import os
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import mutations
import numpy as np
import tomli_w

from fedblend.cli import main
from fedblend.core.errors import FedblendError, printable
from fedblend.runs.faults import user_error


@dataclass
class Outcome:
    """What became of an input: what was printed, and the exit code."""

    text: str = ""
    code: int = 0


@dataclass
class Case:
    """An input: in words, and what reads it. Errors other than :class:`FedblendError` are the fuzzer's findings."""

    words: str
    run: Callable[[], Outcome]


# Running -----------------------------------------------------------------------------------------------------


def command(folder: Path, *words: object, report: bool = True) -> Case:
    """A command of ``fedblend`` in this process, in ``folder``; without ``report``, runs do not write their page."""
    arguments = [str(word) for word in words]
    report = report or arguments[:1] not in (["run"], ["resume"])

    def run() -> Outcome:
        out, err, code = io.StringIO(), io.StringIO(), 0
        with (
            contextlib.nullcontext() if report else mock.patch("fedblend.report.write"),
            in_folder(folder, ["fedblend", *arguments]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            try:
                main()
            except SystemExit as end:
                code = end.code or 0
        return Outcome(f"{out.getvalue()}\n{err.getvalue()}", code)

    return Case(f"fedblend {' '.join(map(repr, arguments))}", run)


@contextlib.contextmanager
def in_folder(folder: Path, arguments: list[str]) -> Iterator[None]:
    """Inside, this process works in a folder as a command with these arguments does."""
    with (
        contextlib.chdir(folder),
        mock.patch.object(sys, "argv", arguments),
        mock.patch.object(sys, "path", list(sys.path)),
        mock.patch.dict(os.environ),
    ):
        yield


def call(words: str, function: Callable[[], Any]) -> Case:
    """A call of a function of fedblend; its errors are told as the command line tells them."""

    def run() -> Outcome:
        try:
            function()
        except Exception as error:
            message = str(error) if isinstance(error, FedblendError) else user_error(error)
            if message is None:
                raise
            return Outcome(f"fedblend: error: {printable(message)}", 2)
        return Outcome()

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
    """Write a data set of 45 small images of three writers."""
    rng, y = np.random.default_rng(0), np.arange(45) % 3
    x = (rng.integers(0, 90, (45, 6, 6)) + y[:, None, None] * 60).astype(np.uint8)
    names = {"client_names": np.array(["ann", "ben", "cia"]), "classes": np.array(["a", "b", "c"])}
    np.savez(path, x=x, y=y, client=np.arange(45) // 15, split=np.arange(45) % 5 // 4, **names)


def finished_run(folder: Path, real: Path) -> Path:
    """Copy a finished run into ``folder / "out"``, and write the tiny experiment; return the run's folder."""
    shutil.copytree(real / "runs" / "fedavg", folder / "out")
    (folder / "experiment.toml").write_text(tomli_w.dumps(tiny(folder)))
    return next((folder / "out").rglob("config.toml")).parent


# Changed files ----------------------------------------------------------------------------------------------


def changed_json(rng: Random, raw: bytes) -> bytes:
    """A changed copy of a JSON file."""
    try:
        table = mutations.plain(mutations.of_table(rng, json.loads(raw)), toml=False)
        return json.dumps(table).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return mutations.of_bytes(rng, raw)


def changed_toml(rng: Random, raw: bytes) -> bytes:
    """A changed copy of a TOML file."""
    try:
        table = mutations.plain(mutations.of_table(rng, tomllib.loads(raw.decode())), toml=True)
        return tomli_w.dumps(table if isinstance(table, dict) else {}).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError):
        return raw


def changed_lines(rng: Random, raw: bytes) -> bytes:
    """JSON lines with one or two of them changed, doubled, moved or removed."""
    lines = raw.splitlines()
    for _ in range(min(rng.choice((1, 1, 2)), len(lines))):
        at, kind = rng.randrange(len(lines)), rng.randrange(8)
        if kind == 0:
            lines.insert(at, lines[at])
        elif kind == 1:
            lines.insert(0, lines.pop(at))
        else:
            lines[at : at + 1] = [changed_json(rng, lines[at])] if kind > 2 else []
    return b"\n".join(lines) + b"\n"


def spoil_path(rng: Random, path: Path) -> None:
    """Put something else in a file's place: a folder, a link to nowhere or to itself, an unreadable or endless file."""
    path.unlink() if path.is_file() or path.is_symlink() else shutil.rmtree(path, ignore_errors=True)
    kind = rng.randrange(8)
    if kind == 0:
        os.mkfifo(path)
    elif kind <= 3:
        path.symlink_to(("nowhere", path.name, "/dev/zero")[kind - 1])
    elif kind <= 5:
        path.mkdir()
    else:
        path.write_bytes(b"" if kind == 6 else b"x = 1\n")
    if kind in (5, 7):
        path.chmod(0)
