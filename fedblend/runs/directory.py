"""A run directory: everything about one run, readable without fedblend.

config.toml                the full resolved experiment
facts.json                 versions, data checksums, model size, scale, partition, command
split.json                 classes by clients (of the first clients, where there are very many)
metrics.jsonl              one line a round, line 0 the untrained model
checkpoint.safetensors     the state after the last checkpointed round
status.json                running, done, stopped or failed, and why

A study's folder has one such folder for each run, and ``study.json``: all its experiments, started or not.

All code reads these files through this module. It checks that every field that fedblend reads has the type that
fedblend writes, so that a damaged or foreign file ends in one message.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from fedblend.core import registry
from fedblend.core.errors import FedblendError, listed
from fedblend.core.files import (
    append_line,
    lock,
    locked_folder,
    read_lines,
    remove_temporaries,
    without_waiting,
    write_atomically,
    write_json,
)
from fedblend.core.paths import import_from, read_text
from fedblend.core.record import RoundRecord
from fedblend.experiment.toml_tables import read_toml, write_toml
from fedblend.runs import forms

if TYPE_CHECKING:
    from fedblend.core.dataset import Dataset
    from fedblend.core.setup import Setup
    from fedblend.experiment.config import Experiment

CONFIG = "config.toml"
FACTS = "facts.json"
SPLIT = "split.json"

OWN_DATA = "each site's own data"
"""How clients' samples are divided, in the facts of a run of real sites with data of their own."""

METRICS = "metrics.jsonl"
STATUS = "status.json"
LOCK = "run.lock"
STUDY_LOCK = "study.lock"
STUDY = "study.json"

WRITTEN_IN_RUN = (CONFIG, FACTS, SPLIT, METRICS, STATUS, "checkpoint.safetensors", "best.safetensors")
"""Files that only the process with a run's lock writes."""


# The folder of a run ------------------------------------------------------------------------------------------


class RunDirectory:
    """One run's folder. Reading needs no lock; writing happens inside :meth:`locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def is_run(path: Path) -> bool:
        """Return whether a folder is a run directory; other programs have files of the configuration's name, too."""
        return os.path.isfile(path / CONFIG) and any(os.path.isfile(path / name) for name in (FACTS, SPLIT, METRICS))

    @classmethod
    def has_begun(cls, path: Path) -> bool:
        """Return whether a folder is a run directory, and the run did not fail before it began."""
        return cls.is_run(path) and any(os.path.isfile(path / name) for name in (SPLIT, METRICS))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process. The system releases the lock if the process is killed."""
        with locked_folder(self.path, LOCK, "this run directory"):
            remove_temporaries(self.path, WRITTEN_IN_RUN)
            yield

    def create(self, experiment: Experiment, facts: dict[str, Any], split: dict[str, Any]) -> None:
        """Write the files that do not change during a run. The configuration is last, as it makes the folder a run."""
        if self.has_begun(self.path):
            raise FedblendError(f"{self.path}: another process has just started a run here; give another folder")
        for name in (CONFIG, METRICS):  # of a run that failed before it began
            (self.path / name).unlink(missing_ok=True)
        write_json(self.path / FACTS, facts)
        write_atomically(self.path / SPLIT, json.dumps(split))
        self.set_experiment(experiment)

    def create_failed(self, experiment: Experiment, facts: dict[str, Any], reason: str) -> None:
        """Write the files of a run that failed before it began: in its trial, or while its data or model were made."""
        with self.locked():
            if not self.has_begun(self.path):
                write_json(self.path / FACTS, facts)
                self.set_status("failed", 0, reason)
                self.set_experiment(experiment)

    def experiment(self) -> Experiment:
        """Return the experiment of this run. Code that the run names is imported, except inside :func:`reading`."""
        from fedblend.experiment.config import resolve

        self.require_run()
        table = read_toml(self.path / CONFIG)
        if registry.trusts_all():
            import_from(self.import_from())
        try:
            return resolve(table)
        except registry.UntrustedCode:
            raise
        except FedblendError as error:
            raise FedblendError(f"{self.path / CONFIG}: {error}") from None

    def require_run(self) -> None:
        """Raise :class:`FedblendError` if the folder is no run directory."""
        if not self.is_run(self.path):
            raise FedblendError(f"{self.path}: is not a run directory (it lacks {CONFIG}, or all other files of a run)")

    def config(self) -> dict[str, Any]:
        """Return the configuration as plain data, readable without PyTorch and without parts of the user's own."""
        table = read_toml(self.path / CONFIG)
        forms.require_sound(table, forms.Config, self.path / CONFIG)
        return table

    def import_from(self) -> list[str]:
        """Return the folders of user-defined parts, recorded when the run began; empty if this is no run."""
        return list(self.facts().get("import_from", [])) if self.is_run(self.path) else []

    def set_experiment(self, experiment: Experiment) -> None:
        """Write the configuration; it is replaced for a resumed run with more rounds."""
        from fedblend.experiment.config import as_table

        write_atomically(self.path / CONFIG, write_toml(as_table(experiment)))

    def update_facts(self, facts: dict[str, Any]) -> None:
        """Update some facts; the file is written only if they differ."""
        before = self.facts()
        if any(before.get(name) != value for name, value in facts.items()):
            write_json(self.path / FACTS, before | facts)

    def facts(self) -> dict[str, Any]:
        return read_json(self.path / FACTS, forms.Facts)

    @property
    def is_of_sites(self) -> bool:
        """Whether the clients were real sites with data of their own, which are not here."""
        return self.facts().get("partition", {}).get("rule") == OWN_DATA

    def require_samples_here(self) -> None:
        """Raise :class:`FedblendError` if the clients' samples are at real sites."""
        if self.is_of_sites:
            told = "clients were sites with data of their own, whose samples are not here, so nothing can be measured"
            valid = "a simulation, or a federation on the data of its experiment"
            raise FedblendError(f"{self.path}: {told}; valid: {valid}")

    def require_same_data(self, data: Dataset) -> None:
        """Raise :class:`FedblendError` if files of the data have changed since the run began and noted their sums."""
        then, now = self.facts().get("data", {}).get("files", {}), data.facts.get("files", {})
        if then and sorted(then.values()) != sorted(now.values()):
            new = next((name for name, digest in now.items() if digest not in then.values()), "a file")
            told = f"the data have changed since this run began: {new} is not what its SHA-256 in {FACTS} says"
            raise FedblendError(f"{self.path}: {told}; valid: the data as they were, or a new run in another folder")

    def load_setup(self) -> Setup:
        """Load the data and build the model again, as they were when the run began."""
        from fedblend.experiment.make_setup import make_setup

        setup = make_setup(self.experiment())
        self.require_same_data(setup.data)
        return setup

    def split(self) -> dict[str, Any]:
        """Return the classes-by-clients table and its measures."""
        return read_json(self.path / SPLIT, forms.Split)

    def status(self) -> dict[str, Any]:
        """Return ``state`` (running, done, stopped, failed, killed), ``round`` and, if there is one, ``reason``.

        A killed process cannot write its state. So a run is "killed" if its file has "running", or does not exist, and
        no process has the lock.
        """
        status = {"state": "running", "round": 0, **read_json(self.path / STATUS, forms.Status)}
        return {**status, "state": "killed"} if status["state"] == "running" and not self.is_locked() else status

    def is_locked(self) -> bool:
        """Return whether a process is inside :meth:`locked`; true where there are no file locks to tell."""
        try:
            with open(self.path / LOCK, encoding="utf-8", opener=without_waiting) as handle:
                lock(handle, shared=True)
        except OSError as error:
            return not isinstance(error, FileNotFoundError)
        return False

    def set_status(self, state: str, round: int, reason: str = "") -> None:
        write_json(self.path / STATUS, {"state": state, "round": round, **({"reason": reason} if reason else {})})

    def metrics(self) -> list[dict[str, Any]]:
        """Return the lines of the metrics log as plain data, one for each round."""
        return read_lines(self.path / METRICS, "restore it from a copy, or remove the run's folder and run it again")

    def records(self) -> list[RoundRecord]:
        """Return one record for each round."""
        records = []
        for number, line in enumerate(self.metrics(), 1):
            try:
                records.append(RoundRecord.from_dict(line))
            except FedblendError as error:
                raise FedblendError(f"{self.path / METRICS}: line {number}: {error}; {forms.DAMAGED}") from None
        return records

    def add_record(self, record: RoundRecord) -> None:
        """Append one record and sync it to the disk."""
        append_line(self.path / METRICS, record.as_dict())

    def truncate_metrics(self, last_round: int) -> list[RoundRecord]:
        """Remove records after ``last_round`` and a truncated last line; return the rest."""
        both = zip(self.metrics(), self.records(), strict=True)
        kept = [(line, record) for line, record in both if record.round <= last_round]
        write_atomically(self.path / METRICS, "".join(json.dumps(line) + "\n" for line, _ in kept))
        return [record for _, record in kept]


@contextmanager
def reading(runs: Iterable[RunDirectory], trust: bool = False) -> Iterator[None]:
    """Import no code that runs name inside the context, unless ``trust``: a run may be somebody else's."""
    if trust:
        for run in runs:
            import_from(run.import_from())
        yield
        return
    with registry.trust_only((), "to import it, add --trust (in Python: trust=True)"):
        yield


def code_of(runs: Iterable[RunDirectory]) -> list[str]:
    """Return the code that is not fedblend's own and that runs name, as ``package.module:Name``."""
    tables = [read_toml(run.path / CONFIG) for run in runs]
    return list(dict.fromkeys(path for table in tables for path in foreign_code(table)))


def foreign_code(table: Any) -> list[str]:
    """The paths of code that is not fedblend's own, in an experiment as plain data.

    >>> foreign_code({"model": {"name": "module", "path": "nets:Net"}, "method": {"objective": {"name": "own:Loss"}}})
    ['nets:Net', 'own:Loss']
    """
    found: list[str] = []
    if isinstance(table, Mapping):
        name = table.get({"module": "path", "features": "model"}.get(str(table.get("name")), "name"))
        found += [one for one in (name, table.get("tokenizer")) if isinstance(one, str) and ":" in one]
    inner = table.values() if isinstance(table, Mapping) else table if isinstance(table, (list, tuple)) else ()
    return list(dict.fromkeys([*found, *(path for one in inner for path in foreign_code(one))]))


def folders_of_parts(folder: Path) -> list[str]:
    """The folders of user-defined parts: of a run, or of all runs below the folder of a search or a study."""
    if RunDirectory.is_run(folder):
        return RunDirectory(folder).import_from()
    runs = _runs_below(folder) if (folder / STUDY_LOCK).exists() else []
    return list(dict.fromkeys(path for run in runs for path in RunDirectory(run).import_from()))


@contextmanager
def locked_study(folder: Path) -> Iterator[None]:
    """Lock a study's folder."""
    with locked_folder(folder, STUDY_LOCK, "this study"):
        remove_temporaries(folder, (STUDY,))
        yield


def read_json(path: Path, form: type[BaseModel] = forms.Table) -> dict[str, Any]:
    """Read a JSON table of a form; empty if there is no such file."""
    if not os.path.lexists(path):
        return {}
    text = read_text(path, "restore the file, or remove it")
    try:
        table = json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise FedblendError(f"{path}: is damaged: {reason}") from None
    if not isinstance(table, dict):
        raise FedblendError(f"{path}: is damaged: it is not a table")
    forms.require_sound(table, form, path)
    return table


def is_federated(facts: Mapping[str, Any]) -> bool:
    """Return whether the clients of a run with these facts were the sites of a real federation."""
    return bool(facts.get("engine", {}).get("engine") == "flower")


def how_to_resume(path: Path, facts: Mapping[str, Any]) -> str:
    """Return the command that continues the run in a folder; a federation is continued by what began it."""
    if is_federated(facts):
        return "the command that began it (flwr run or fedblend federation up)"
    return f"fedblend resume {shlex.quote(str(path))}"


def write_study(folder: Path, name: str, experiments: dict[str, dict[str, Any]]) -> None:
    """Write a locked study's experiments by their folders' names; its name and other experiments stay unchanged."""
    study = {"name": name, "experiments": {}, **read_json(folder / STUDY, forms.Study)}
    write_json(folder / STUDY, {"name": study["name"], "experiments": study["experiments"] | experiments})


def remove_study(folder: Path, created: list[Path]) -> None:
    """Remove a study without started runs, and those of the folders ``created`` for it that are empty."""
    for name in (STUDY, STUDY_LOCK):
        (folder / name).unlink(missing_ok=True)
    for path in created:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def read_study(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the resolved experiments of a study by the names of their folders; empty if this is no study."""
    return read_json(folder / STUDY, forms.Study).get("experiments", {})


def unstarted_runs(paths: Sequence[Path]) -> dict[Path, list[str]]:
    """Return the names of the runs that are not started, by study, for all studies in the given folders."""
    folders = [folder for path in paths if not RunDirectory.is_run(path) for folder in (path, *studies_in(path))]
    unstarted = {f: [slug for slug in read_study(f) if not RunDirectory.is_run(f / slug)] for f in folders}
    return {folder: slugs for folder, slugs in unstarted.items() if slugs}


def has_runs(folder: Path) -> bool:
    """Return whether a folder has run directories."""
    return folder.is_dir() and any(RunDirectory.is_run(p) for p in folder.iterdir() if p.is_dir())


def find_runs(paths: list[Path]) -> list[RunDirectory]:
    """Return the runs at paths: a run directory itself, or all runs below a folder, in the order of each study."""
    found: list[RunDirectory] = []
    for path in paths:
        if not os.path.isdir(path):
            raise FedblendError(f"{path}: no such run; give a run directory, or a study's folder")
        below = [path] if RunDirectory.is_run(path) else _runs_below(path)
        if not below:
            raise FedblendError(f"{path}: holds no run (no {CONFIG} in it or in any folder below)")
        found += map(RunDirectory, below)
    return found


def only_run(path: Path) -> RunDirectory:
    """Return the only run at a path."""
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
