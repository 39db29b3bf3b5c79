"""The Python interface: run an experiment or a study; get metrics and the model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel
from torch import nn

from fedblend.core import registry
from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError, brief
from fedblend.core.paths import from_file, given_path, import_from
from fedblend.experiment.changes import change_field
from fedblend.experiment.config import Experiment
from fedblend.experiment.parts import has_option
from fedblend.experiment.study import Study, add_experiment, expand, slugify
from fedblend.experiment.toml_tables import read_toml, set_field, unset_field
from fedblend.runs import checkpoint
from fedblend.runs.directory import LOCK, RunDirectory, find_runs, folders_of_parts, only_run, reading
from fedblend.runs.parallel import join_failures, run_all
from fedblend.runs.predictor import Predictor, require_one_model
from fedblend.runs.runner import execute, require_free

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

RUNS = Path("runs")  # Default folder of runs


@dataclass(frozen=True)
class Result:
    """The result of a run."""

    path: Path
    """The run's folder."""
    experiment: Experiment
    """The resolved experiment."""
    metrics: pd.DataFrame
    """One row for each trained or evaluated round."""
    _predictor: Predictor

    @property
    def model(self) -> nn.Module:
        """The final model, in evaluation mode.

        Raises :class:`FedblendError` for a run whose clients keep models or layers of their own.
        """
        return self.predictor.module.net

    @property
    def predictor(self) -> Predictor:
        """The same model for samples as they are stored; it can be exported (:meth:`Predictor.export`)."""
        require_one_model(self.experiment, self.path)
        return self._predictor

    def __repr__(self) -> str:
        """Folder, method, number of rounds, and the last accuracy, or the last loss where there is no accuracy."""
        method = self.experiment.method.label or self.experiment.method.name
        shown = f"{str(self.path)!r}, method={method!r}, rounds={self.metrics['round'].iloc[-1]}"
        for name, form in (("accuracy", ".4f"), ("loss", ".4g")):
            if name in self.metrics and len(known := self.metrics[name].dropna()):
                return f"Result({shown}, {name}={known.iloc[-1]:{form}})"
        return f"Result({shown})"

    def predict(self, x: Any) -> np.ndarray:
        """The name of each stored sample's class as text, or the predicted numbers (:meth:`Predictor.predict`)."""
        return self.predictor.predict(x)


def run(
    experiment: Experiment | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run one experiment (or the one of a file, or of its table) in this process.

    ``out`` is the run's folder (default: a new one under ``runs/``); a folder that holds a run or other files is
    refused. With ``resume``, a run in this folder (default: the newest one) continues; it keeps its rounds, also those
    beyond ``experiment.rounds``, and where there is no run, one starts from round 0. Both give a warning.
    ``on_round`` is called with each round's record as plain data, first that of the untrained model (round 0). The run
    ends after it returns ``True`` (Python's or NumPy's) for a later round; other results have no effect.
    ``callbacks`` are added to those of the experiment and may end the run. A run that ended early is done; resumed, it
    makes the rounds that are left. Raises :class:`FedblendError`.
    """
    _require_callbacks(callbacks)
    if on_round is not None and not callable(on_round):
        raise FedblendError(f"on_round: {brief(on_round)} is not valid; give a function of a round's record")
    experiment = experiment if isinstance(experiment, Experiment) else _one_experiment(experiment)
    path = _out_folder(out, experiment.name, resume)
    if not RunDirectory.is_run(path) and not (path / LOCK).exists():
        require_free(path, "out", "name another folder")
    listener = None if on_round is None else lambda record: on_round(record.as_dict())
    if resume:
        _warn_of_resume(path, {path: experiment})
    finished = execute(experiment, path, resume, listener, callbacks=callbacks)
    predictor = Predictor.of_setup(finished.setup, finished.state.weights, finished.state.round)
    metrics = metrics_table(finished.directory)
    return Result(path, finished.setup.experiment, metrics, predictor)


def _require_callbacks(given: object) -> None:
    if not isinstance(given, list | tuple):
        raise FedblendError(f"callbacks: {brief(given)} is not valid; give a list of Callback objects")
    for callback in given:
        if isinstance(callback, type):
            raise FedblendError(f"callbacks: {callback.__name__} is a class; write {callback.__name__}()")
        if not isinstance(callback, Callback):
            valid = "a list of these (the experiment's own field `callbacks` takes names)"
            raise FedblendError(f"callbacks: {brief(callback)} is no Callback object; valid: {valid}")


def _one_experiment(given: object) -> Experiment:
    if not isinstance(given, Mapping | str | Path):
        raise FedblendError(f"experiment: {brief(given)} is none; valid: an Experiment, a file, or a file's table")
    made = expand(given if isinstance(given, Mapping) else load(given)).experiments
    if len(made) > 1:
        raise FedblendError(f"experiment: it describes {len(made)} runs; fedblend.run_study makes them all")
    return next(iter(made.values()))


def _warn_of_resume(folder: Path, experiments: Mapping[Path, Experiment]) -> None:
    if not any(map(RunDirectory.is_run, experiments)):
        starts = "the run starts" if folder in experiments else "its runs start"
        warnings.warn(f"{folder}: nothing to resume; {starts} from round 0", stacklevel=3)
    for path, experiment in experiments.items():
        if (done := checkpoint.round_of(path) or 0) > experiment.rounds:
            text = f"{path}: has {done} rounds already, more than rounds = {experiment.rounds}; all are kept"
            warnings.warn(text, stacklevel=3)


def run_study(
    study: Study | Experiment | Sequence[Experiment] | Mapping[str, Any] | str | Path,
    out: Path | str | None = None,
    jobs: int | None = None,
    resume: bool = False,
) -> pd.DataFrame:
    """Run all experiments of a study (or of its file or table, or those given); return one row for each run and round.

    ``out`` is the folder of all runs (default: a new one under ``runs/``); a folder that holds files is refused. With
    ``resume``, the runs in this folder (default: the newest one) continue, as in :func:`run`. ``jobs`` runs are made at
    once, each in a process of its own (default: one for each processor). The calling script needs no
    ``if __name__ == "__main__"``; parts that the script itself defines run in its own process only. Raises
    :class:`FedblendError` after all runs if any failed.
    """
    study = _study_of(study)
    if jobs is not None and (not isinstance(jobs, Integral) or jobs < 1):
        raise FedblendError(f"jobs: {brief(jobs)} is not valid; give a whole number from 1")
    folder = _out_folder(out, study.name, resume)
    require_free(folder, "out", "give resume=True to go on with its runs, or name another folder", resume)
    if resume:
        _warn_of_resume(folder, {folder / slug: one for slug, one in study.experiments.items()})
    failed = run_all(study, folder, resume, jobs, lambda slug, record: None)
    if failed:
        raise FedblendError(join_failures(failed, len(study.experiments)))
    return _rounds_of(RunDirectory(folder / slug) for slug in study.experiments)


def _study_of(given: object) -> Study:
    if isinstance(given, Study):
        return given
    if isinstance(given, Mapping | str | Path):
        return expand(given if isinstance(given, Mapping) else load(given))
    experiments = [given] if isinstance(given, Experiment) else given
    if not isinstance(experiments, list | tuple) or not experiments:
        raise FedblendError(f"study: {brief(given)} is none; valid: a file, a file's table, or a list of Experiments")
    named: dict[str, Experiment] = {}
    for experiment in experiments:
        if not isinstance(experiment, Experiment):
            raise FedblendError(f"study: {brief(experiment)} is no Experiment; valid: a list of Experiments")
        add_experiment(named, experiment, "study")
    return Study(experiments[0].name, named)


def read_run(path: Path | str, trust: bool = False, best: bool = False) -> Result:
    """Read a run that was made before: its record, and the model of its last checkpoint; its data are not read.

    ``best`` reads the model that the callback ``keep-best`` kept. A run that names code of its own is read only with
    ``trust``. Raises :class:`FedblendError`.
    """
    directory = only_run(given_path(path, "path"))
    predictor = Predictor.of_run(directory, trust, best)
    with reading([directory], trust):
        experiment, metrics = directory.experiment(), metrics_table(directory)
    return Result(directory.path, experiment, metrics, predictor)


def read_study(path: Path | str) -> pd.DataFrame:
    """Read all runs in a folder: one row for each run and round, as :func:`run_study` returns them."""
    return _rounds_of(find_runs([given_path(path, "path")]))


def _rounds_of(runs: Iterable[RunDirectory]) -> pd.DataFrame:
    import pandas as pd

    return pd.concat([metrics_table(run).assign(run=run.path.name) for run in runs], ignore_index=True)


def load(path: str | Path) -> dict[str, Any]:
    """Read an experiment file as plain data; modules in its folder become importable by their dotted path.

    Data paths stay relative to the file. The file may also be the configuration in a run directory.
    """
    path = given_path(path, "path")
    table = read_toml(path)
    folder = path.resolve().parent
    import_from((str(folder), *folders_of_parts(folder)))
    with_origin: dict[str, Any] = from_file(table, path)
    return with_origin


def _out_folder(out: Path | str | None, name: str, resume: bool) -> Path:
    """The folder for what is named ``name``: the given one; else a new one, or the newest to resume."""
    if not isinstance(resume, bool):
        raise FedblendError(f"resume: {brief(resume)} is not valid; give True or False")
    if out is not None:
        return given_path(out, "out")
    return (last_folder if resume else free_folder)(RUNS / slugify(name))


def numbered(path: Path) -> Iterator[Path]:
    """``path``, ``path-2``, ``path-3``, ..."""
    yield path
    yield from (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))


def free_folder(path: Path) -> Path:
    """The first of the :func:`numbered` folders that does not exist."""
    return next(folder for folder in numbered(path) if not folder.exists())


def last_folder(path: Path) -> Path:
    """The last of the :func:`numbered` folders up to which all exist, or ``path``."""
    return [path, *itertools.takewhile(Path.exists, itertools.islice(numbered(path), 1, None))][-1]


def metrics_table(directory: RunDirectory) -> pd.DataFrame:
    """Return a run's metrics as a table: nested fields become columns such as ``bytes_up.weights``."""
    import pandas as pd

    frame = pd.json_normalize(directory.metrics())
    experiment = directory.experiment()
    frame.insert(0, "method", experiment.method.label or experiment.method.name)
    frame.insert(1, "seed", experiment.seed)
    return frame


def expand_file(path: str | Path, changes: Sequence[tuple[str, Any]], seeds: Sequence[int] | None) -> Study:
    """Expand the study in a file, with fields set from the command line (:func:`load_changed`)."""
    return expand(load_changed(path, changes, seeds), seeds)


def load_changed(
    path: str | Path, changes: Sequence[tuple[str, Any]], seeds: Sequence[int] | None = None
) -> dict[str, Any]:
    """Read a file's table, with fields set from the command line.

    ``None`` removes an optional field from the file; any other field gets the text "none".
    """
    table = load(path)
    last = dict(changes)
    for field, value in changes:
        _remove_from_grid(table, field)
        if value is not None:
            _change_everywhere(table, field, partial(change_field, value=value))
    for field in [field for field, value in last.items() if value is None]:
        table = _without_field(table, field, seeds)
    return table


def _without_field(table: dict[str, Any], field: str, seeds: Sequence[int] | None) -> dict[str, Any]:
    """Remove an optional field from a file's table, or one that a part has not; set any other to the text "none"."""
    bare = copy.deepcopy(table)
    _change_everywhere(bare, field, unset_field)
    if field.split(".")[0] == "tune":
        return bare
    for candidate in (table, bare):  # either may be invalid, with the field or without
        with contextlib.suppress(FedblendError):
            made = expand(candidate, seeds).experiments.values()
            is_left_over = candidate is bare != table and not any(has_option(one, field) for one in made)
            if is_left_over or all(_is_optional(one, field) for one in made):
                return bare
            break
    _change_everywhere(table, field, partial(set_field, value="none"))
    return table


def _is_optional(value: Any, field: str) -> bool:
    """Return whether ``a.b.c``, as spelled in a file, is a field of an experiment whose default is ``None``."""
    python = {word: name for name, word in registry.FILE_WORDS.items()}
    *outer, last = (python.get(word, word) for word in field.split("."))
    for word in outer:
        value = getattr(value, word, None)
    if isinstance(value, BaseModel):
        return last in type(value).model_fields and type(value).model_fields[last].default is None
    return dataclasses.is_dataclass(value) and any(
        f.name == last and f.default is None for f in dataclasses.fields(value)
    )


def _remove_from_grid(table: dict[str, Any], field: str) -> None:
    """Remove a field from the file's grid, and its seeds or seed: the command line's value applies to all runs."""
    if field in ("seed", "seeds"):
        table.pop("seeds" if field == "seed" else "seed", None)
    grid = table.get("grid")
    if isinstance(grid, dict):
        if whole := [key for key in grid if field.startswith(f"{key}.")]:
            raise FedblendError(f"{field}: the grid of this file replaces '{whole[0]}' in each run; set it in the file")
        table["grid"] = {k: v for k, v in grid.items() if k != field and not k.startswith(f"{field}.")}


def _change_everywhere(table: dict[str, Any], field: str, change: Callable[[dict[str, Any], str], None]) -> None:
    """Change a field of a file's table, and of those variants that have a value of their own for the field's table."""
    first = field.split(".")[0]
    if first != "method" or "methods" not in table:
        change(table, field)
    elif isinstance(given := table["methods"], list) and len(given) == 1:
        only = {"method": given[0]}
        change(only, field)
        table["methods"] = [only["method"]]
    else:
        how = "set it in the file's 'methods', such as {name = \"fedmix\", objective = {lambda = 0.1}}"
        told = f"the file lists several methods, and it is not clear which one is meant; {how}"
        raise FedblendError(f"{field}: {told}, or replace them all: --set methods=...")
    variants = table.get("variants")
    for variant in variants if isinstance(variants, list) else ():
        if not isinstance(variant, dict) or first not in variant:
            continue
        if first == "method":
            raise FedblendError(f"{field}: variants of this file have methods of their own; set it in the file")
        change(variant, field)
