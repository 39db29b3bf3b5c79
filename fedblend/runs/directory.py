"""A run directory: everything about one run, readable without fedblend.

config.toml                the full resolved experiment
facts.json                 versions, data checksums, model size, scale, partition, command
split.json                 classes by clients (of the first clients, where there are very many)
metrics.jsonl              one line a round, line 0 the untrained model
checkpoint.safetensors     the state after the last checkpointed round
status.json                running, done, stopped or failed, and why

A study's folder has one such folder for each run, and ``study.json``: all its experiments, started or not.
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
        """Return whether a folder is a run directory."""
        return (path / CONFIG).is_file()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process. The system releases the lock if the process is killed.

        Raises :class:`FedblendError` if another process has the lock.
        """
        with _locked_folder(self.path, LOCK, "this run directory"):
            yield

    def create(self, experiment: Experiment, facts: dict[str, Any], split: dict[str, Any]) -> None:
        """Write the files that do not change during a run. The configuration is last, as it makes the folder a run."""
        if self.is_run(self.path):
            raise FedblendError(
                f"{self.path}: another process has just started a run here; give another folder with --out"
            )
        (self.path / METRICS).unlink(missing_ok=True)
        write_json(self.path / FACTS, facts)
        write_atomically(self.path / SPLIT, json.dumps(split))
        write_atomically(self.path / CONFIG, write_toml(as_table(experiment)))

    def experiment(self) -> Experiment:
        """Return the experiment of this run. Raises :class:`FedblendError` for an invalid configuration."""
        if not self.is_run(self.path):
            raise FedblendError(f"{self.path}: is not a run directory (it has no {CONFIG})")
        table = read_toml(self.path / CONFIG)
        import_from(self.import_from())
        try:
            return resolve(table)
        except FedblendError as error:
            raise FedblendError(f"{self.path / CONFIG}: {error}") from None

    def import_from(self) -> list[str]:
        """Return the folders of user-defined parts, recorded when the run began; empty if this is no run."""
        return list(self.facts().get("import_from", [])) if self.is_run(self.path) else []

    def set_experiment(self, experiment: Experiment) -> None:
        """Replace the configuration (for a resumed run with more rounds)."""
        write_atomically(self.path / CONFIG, write_toml(as_table(experiment)))

    def update_facts(self, facts: dict[str, Any]) -> None:
        """Update some facts; the file is written only if they differ."""
        before = self.facts()
        if any(before.get(name) != value for name, value in facts.items()):
            write_json(self.path / FACTS, before | facts)

    def facts(self) -> dict[str, Any]:
        """Return versions, checksums and sizes."""
        return self._json(FACTS)

    def split(self) -> dict[str, Any]:
        """Return the classes-by-clients table and its measures."""
        return self._json(SPLIT)

    def status(self) -> dict[str, Any]:
        """Return ``state`` (running, done, stopped, failed, killed), ``round`` and, if there is one, ``reason``.

        A killed process cannot write its state. So a run is "killed" if its file has "running", or does not exist, and
        no process has the lock.
        """
        status = {"state": "running", "round": 0, **self._json(STATUS)}
        return {**status, "state": "killed"} if status["state"] == "running" and not self.is_locked() else status

    def is_locked(self) -> bool:
        """Return whether a process is inside :meth:`locked`."""
        try:
            with open(self.path / LOCK) as handle:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            # There is no lock file, or the file system has no locks.
            return False
        return False

    def set_status(self, state: str, round: int, reason: str = "") -> None:
        """Write the state of the run."""
        write_json(self.path / STATUS, {"state": state, "round": round, **({"reason": reason} if reason else {})})

    def metrics(self) -> list[dict[str, Any]]:
        """Return one record for each round."""
        return read_lines(self.path / METRICS)

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Append one record and sync it to the disk."""
        append_line(self.path / METRICS, record)

    def truncate_metrics(self, last_round: int) -> list[dict[str, Any]]:
        """Remove records after ``last_round`` and a truncated last line; return the rest."""
        kept = [record for record in self.metrics() if record["round"] <= last_round]
        write_atomically(self.path / METRICS, "".join(json.dumps(record) + "\n" for record in kept))
        return kept

    def _json(self, name: str) -> dict[str, Any]:
        return read_json(self.path / name)


@contextmanager
def locked_study(folder: Path) -> Iterator[None]:
    """Lock a study's folder. Raises :class:`FedblendError` if another process has the lock."""
    with _locked_folder(folder, STUDY_LOCK, "this study"):
        yield


@contextmanager
def _locked_folder(folder: Path, name: str, what: str) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = open(folder / name, "w")  # noqa: SIM115 (open for the whole run)
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
    """Lock a file for this process. Raises :class:`BlockingIOError` if another process has the lock."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        # is_locked in another process takes the lock briefly, too.
        time.sleep(0.1)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON table; empty if there is no such file. Raises :class:`FedblendError` if it is damaged."""
    try:
        table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FedblendError(f"{path}: is damaged: {error}") from None
    if not isinstance(table, dict):
        raise FedblendError(f"{path}: is damaged: it is not a table")
    return table


def write_study(folder: Path, name: str, experiments: dict[str, dict[str, Any]]) -> None:
    """Write a study's experiments by the names of their folders; entries of started runs stay unchanged."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FedblendError(f"{folder}: cannot be used as a folder for runs: {error.strerror}") from None
    before = read_study(folder)
    started = {slug: table for slug, table in before.items() if RunDirectory.is_run(folder / slug)}
    write_json(folder / STUDY, {"name": name, "experiments": {**before, **experiments, **started}})


def remove_study(folder: Path, created: list[Path]) -> None:
    """Remove a study without started runs, and those of the folders ``created`` for it that are empty."""
    for name in (STUDY, STUDY_LOCK):
        (folder / name).unlink(missing_ok=True)
    for path in created:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def read_study(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the resolved experiments of a study by the names of their folders; empty if this is no study."""
    return read_json(folder / STUDY).get("experiments", {})


def unstarted_runs(paths: Sequence[Path]) -> dict[Path, list[str]]:
    """Return the names of the runs that are not started, by study, for all studies in the given folders."""
    folders = [folder for path in paths if not RunDirectory.is_run(path) for folder in (path, *studies_in(path))]
    unstarted = {f: [slug for slug in read_study(f) if not RunDirectory.is_run(f / slug)] for f in folders}
    return {folder: slugs for folder, slugs in unstarted.items() if slugs}


def has_runs(folder: Path) -> bool:
    """Return whether a folder has run directories."""
    return folder.is_dir() and any(RunDirectory.is_run(p) for p in folder.iterdir() if p.is_dir())


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """Return the runs at paths: a run directory itself, or all runs below a folder, in the order of each study.

    Raises :class:`FedblendError` for a path without runs.
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
    """Return the only run at a path. Raises :class:`FedblendError` if there are none, or several."""
    runs = find_runs([path])
    if len(runs) > 1:
        names = [run.path.relative_to(path) for run in runs]
        raise FedblendError(f"{path}: holds {len(runs)} runs; name one of them: {listed(names)}")
    return runs[0]


def _runs_below(folder: Path) -> list[Path]:
    """Return the run directories in a folder, in its study's order, then those below its other folders."""
    return [*runs_in(folder), *(run for other in _non_run_folders(folder) for run in _runs_below(other))]


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories directly in a folder, in the order of its study."""
    order = list(read_study(folder))
    inside = [p for p in _subfolders(folder) if RunDirectory.is_run(p)]
    return sorted(inside, key=lambda p: order.index(p.name) if p.name in order else len(order))


def studies_in(folder: Path) -> list[Path]:
    """Return the folders in a folder that are no runs but contain some at any depth."""
    return [other for other in _non_run_folders(folder) if _runs_below(other)]


def _non_run_folders(folder: Path) -> list[Path]:
    """Return the folders in a folder that are no runs. Links are left out, as they may form a cycle."""
    return [p for p in _subfolders(folder) if not (RunDirectory.is_run(p) or p.is_symlink() or p.name.startswith("."))]


def _subfolders(folder: Path) -> list[Path]:
    return [p for p in sorted(folder.iterdir()) if os.access(p, os.R_OK | os.X_OK) and p.is_dir()]
