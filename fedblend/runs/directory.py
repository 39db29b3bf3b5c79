"""A run directory: everything about one run, readable without fedblend.

config.toml                the full resolved experiment
facts.json                 versions, data checksums, model size, scale, split measures, command
split.json                 classes by clients (of the first clients, where there are very many)
metrics.jsonl              one line a round, line 0 the untrained model
checkpoint.safetensors     the state after the last checkpointed round
status.json                running, done, stopped or failed, and why

A study's folder holds one such folder a run, and ``study.json``: all its experiments, begun or not.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from fedblend.core.errors import FedblendError, listed
from fedblend.core.paths import import_from
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.tables import read_toml, write_toml
from fedblend.runs.files import append_line, read_lines, write_atomically, write_json

CONFIG = "config.toml"
FACTS = "facts.json"
SPLIT = "split.json"
METRICS = "metrics.jsonl"
STATUS = "status.json"
LOCK = "run.lock"
STUDY_LOCK = "study.lock"
STUDY = "study.json"


class RunDirectory:
    """One run's folder. Reading needs no lock; writing happens inside :meth:`locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder is a run directory."""
        return (path / CONFIG).is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for this process; the system frees it if the process is killed.

        Raises :class:`FedblendError` if another process holds it.
        """
        with _locked_folder(self.path, LOCK, "this run directory"):
            yield

    def create(self, experiment: Experiment, facts: dict[str, Any], split: dict[str, Any]) -> None:
        """Write what stays the same for the whole run; the configuration last, since it makes the folder a run."""
        if self.is_run(self.path):
            raise FedblendError(
                f"{self.path}: another process has just begun a run here; give another folder with --out"
            )
        (self.path / METRICS).unlink(missing_ok=True)
        write_json(self.path / FACTS, facts)
        write_atomically(self.path / SPLIT, json.dumps(split))
        write_atomically(self.path / CONFIG, write_toml(as_table(experiment)))

    def experiment(self) -> Experiment:
        """The experiment of this run. Raises :class:`FedblendError` that names the file if it holds none."""
        if not self.is_run(self.path):
            raise FedblendError(f"{self.path}: is not a run directory (it has no {CONFIG})")
        table = read_toml(self.path / CONFIG)
        import_from(self.import_from())
        try:
            return resolve(table)
        except FedblendError as error:
            raise FedblendError(f"{self.path / CONFIG}: {error}") from None

    def import_from(self) -> list[str]:
        """The folders in which parts of the user's own lay when the run began; none if this is no run."""
        return list(self.facts().get("import_from", [])) if self.is_run(self.path) else []

    def set_experiment(self, experiment: Experiment) -> None:
        """Replace the configuration (a run that goes on for more rounds)."""
        write_atomically(self.path / CONFIG, write_toml(as_table(experiment)))

    def update_facts(self, facts: dict[str, Any]) -> None:
        """Replace some facts, where they are others than before."""
        before = self.facts()
        if any(before.get(name) != value for name, value in facts.items()):
            write_json(self.path / FACTS, before | facts)

    def facts(self) -> dict[str, Any]:
        """Versions, checksums and sizes."""
        return self._json(FACTS)

    def split(self) -> dict[str, Any]:
        """The classes-by-clients table and its measures."""
        return self._json(SPLIT)

    def status(self) -> dict[str, Any]:
        """``state`` (running, done, stopped, failed, killed), ``round`` and, where there is one, ``reason``.

        A run that is killed cannot write so itself: it is one that says it is running, or says nothing yet, in a
        folder no process holds.
        """
        told = {"state": "running", "round": 0, **self._json(STATUS)}
        return {**told, "state": "killed"} if told["state"] == "running" and not self.is_locked() else told

    def is_locked(self) -> bool:
        """Whether a process is inside :meth:`locked`."""
        try:
            with open(self.path / LOCK) as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            # No lock was ever made here, or this file system (of a copy) knows none.
            return False
        return False

    def set_status(self, state: str, round: int, reason: str = "") -> None:
        """Say how the run stands."""
        write_json(self.path / STATUS, {"state": state, "round": round, **({"reason": reason} if reason else {})})

    def metrics(self) -> list[dict[str, Any]]:
        """One record a round."""
        return read_lines(self.path / METRICS)

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append one record, on the disk when this returns."""
        append_line(self.path / METRICS, record)

    def truncate_metrics(self, last_round: int) -> list[dict[str, Any]]:
        """Drop records after ``last_round`` (they will be made again), and a line cut short by a kill."""
        kept = [record for record in self.metrics() if record["round"] <= last_round]
        write_atomically(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)


@contextmanager
def locked_study(folder: Path) -> Iterator[None]:
    """Hold a study's folder for this command. Raises :class:`FedblendError` if another one works on it."""
    with _locked_folder(folder, STUDY_LOCK, "this study"):
        yield


@contextmanager
def _locked_folder(folder: Path, name: str, what: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / name, "w")  # noqa: SIM115 (held for the whole run)
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used as a folder for runs: {error.strerror}") from None
    with handle:
        try:
            _lock_file(handle)
        except BlockingIOError:
            raise FedblendError(
                f"{folder}: {what} is in use by another process; wait for it, stop it, or give another folder "
                "(--out on the command line)"
            ) from None
        yield


def _lock_file(handle: IO[str]) -> None:
    """Lock a file for this process. Raises :class:`BlockingIOError` if another one holds it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # Whoever only looks (is_held) holds it for a moment too.
        time.sleep(0.1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON table; empty if there is no such file. Raises :class:`FedblendError` if it is damaged."""
    try:
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FedblendError(f"{path}: is damaged: {error}") from None
    if not isinstance(table, dict):
        raise FedblendError(f"{path}: is damaged: it holds no table")
    return table


def write_study(folder: Path, name: str, experiments: dict[str, dict[str, Any]]) -> None:
    """Keep a study's experiments, by the names of their folders; runs that have begun stay as they were listed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used as a folder for runs: {error.strerror}") from None
    before = read_study(folder)
    begun = {slug: table for slug, table in before.items() if RunDirectory.is_run(folder / slug)}
    write_json(folder / STUDY, {"name": name, "experiments": {**before, **experiments, **begun}})


def remove_study(folder: Path, made: list[Path]) -> None:
    """Forget a study of which no run has begun, and those of the folders ``made`` for it that are empty."""
    for name in (STUDY, STUDY_LOCK):
        (folder / name).unlink(missing_ok=True)
    for path in made:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def read_study(folder: Path) -> dict[str, dict[str, Any]]:
    """The resolved experiments of a study's folder, by the names of their folders; empty if it keeps none."""
    return read_json(folder / STUDY).get("experiments", {})


def unstarted_runs(paths: Sequence[Path]) -> dict[Path, list[str]]:
    """Of the studies in folders: the names of the runs that they are to make and have not begun, by study."""
    folders = [folder for path in paths if not RunDirectory.is_run(path) for folder in (path, *studies_in(path))]
    left = {f: [slug for slug in read_study(f) if not RunDirectory.is_run(f / slug)] for f in folders}
    return {folder: slugs for folder, slugs in left.items() if slugs}


def has_runs(folder: Path) -> bool:
    """Whether a folder holds run directories."""
    return folder.is_dir() and any(RunDirectory.is_run(p) for p in folder.iterdir() if p.is_dir())


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """The runs named by paths: a run directory itself, or all runs below a folder, each study's in its own order.

    Raises :class:`FedblendError` for a path below which there is none.
    """
    found: list[RunDirectory] = []
    for path in paths:
        if not path.is_dir():
            raise FedblendError(f"{path}: no such run; give a run directory, or a study's folder")
        below = [path] if RunDirectory.is_run(path) else _runs_below(path)
        if not below:
            raise FedblendError(f"{path}: holds no run (no {CONFIG} in it or in any folder below)")
        found += map(RunDirectory, below)
    return found


def only_run(path: Path) -> RunDirectory:
    """The one run that a path names. Raises :class:`FedblendError` where it holds none, or several."""
    runs = find_runs([path])
    if len(runs) > 1:
        names = [run.path.relative_to(path) for run in runs]
        raise FedblendError(f"{path}: holds {len(runs)} runs; name one of them: {listed(names)}")
    return runs[0]


def _runs_below(folder: Path) -> list[Path]:
    """The run directories in a folder, in its study's order, and then those below its other folders."""
    return [*runs_in(folder), *(run for other in _non_run_folders(folder) for run in _runs_below(other))]


def runs_in(folder: Path) -> list[Path]:
    """The run directories that lie in a folder itself, in the order of its study."""
    listed_first = list(read_study(folder))
    inside = [p for p in _subfolders(folder) if RunDirectory.is_run(p)]
    return sorted(inside, key=lambda p: listed_first.index(p.name) if p.name in listed_first else len(listed_first))


def studies_in(folder: Path) -> list[Path]:
    """The folders in a folder that are no runs but hold some, however deep."""
    return [other for other in _non_run_folders(folder) if _runs_below(other)]


def _non_run_folders(folder: Path) -> list[Path]:
    """The folders in a folder that are no runs; a link is none of them, since it may lead back."""
    return [p for p in _subfolders(folder) if not (RunDirectory.is_run(p) or p.is_symlink() or p.name.startswith("."))]


def _subfolders(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if os.access(p, os.R_OK | os.X_OK) and p.is_dir()]
