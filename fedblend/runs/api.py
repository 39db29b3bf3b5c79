"""fedblend from Python: run an experiment, get its metrics and its model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from pydantic import BaseModel
from torch import nn

from fedblend.core import registry
from fedblend.core.callbacks import Callback
from fedblend.core.errors import FedblendError
from fedblend.core.paths import from_file, import_from
from fedblend.experiment.config import Experiment
from fedblend.experiment.study import Study, expand, slugify
from fedblend.experiment.tables import read_toml, set_field, unset_field
from fedblend.runs.directory import RunDirectory
from fedblend.runs.parallel import join_failures, run_all
from fedblend.runs.runner import execute

RUNS = Path("runs")
"""Where runs are kept unless told otherwise."""


@dataclass(frozen=True)
class Result:
    """What a run gives: its folder, tidy metrics (one row an evaluated or trained round), and the final model."""

    path: Path
    experiment: Experiment
    metrics: pd.DataFrame
    model: nn.Module


def run(
    experiment: Experiment,
    out: Path | str | None = None,
    resume: bool = False,
    on_round: Callable[[dict[str, Any]], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> Result:
    """Run one experiment in this process.

    ``out`` is the run's folder (default: a new one under ``runs/``); with ``resume`` a run that it holds goes
    on. ``on_round`` is called with each round's record as plain data; ``callbacks`` watch the run beside those that the
    experiment names, and may end it. Raises :class:`FedblendError`.
    """
    path = Path(out) if out is not None else free_folder(RUNS / slugify(experiment.name))
    finished = execute(experiment, path, resume, on_round, callbacks=callbacks)
    model = finished.setup.model
    model.load_state_dict(finished.state.weights)
    return Result(path, finished.setup.experiment, metrics_table(finished.directory), model.eval())


def run_study(
    study: Study | Mapping[str, Any] | str | Path, out: Path | str | None = None, jobs: int | None = None
) -> pd.DataFrame:
    """Run all experiments of a study (or of its file, or of its table); one row a run and round.

    Raises :class:`FedblendError` after all runs if any failed.
    """
    made = study if isinstance(study, Study) else expand(study if isinstance(study, Mapping) else load(study))
    folder = Path(out) if out is not None else free_folder(RUNS / slugify(made.name))
    failed = run_all(made, folder, False, jobs, lambda slug, record: None)
    if failed:
        raise FedblendError(join_failures(failed, len(made.experiments)))
    frames = [metrics_table(RunDirectory(folder / slug)).assign(run=slug) for slug in made.experiments]
    return pd.concat(frames, ignore_index=True)


def load(path: str | Path) -> dict[str, Any]:
    """An experiment file as plain data; modules beside it can then be named by their dotted path.

    Paths of data in it stay relative to the file. The file may also be the configuration that a run kept.
    """
    table = read_toml(path)
    beside = Path(path).resolve().parent
    import_from((str(beside), *RunDirectory(beside).import_from()))
    marked: dict[str, Any] = from_file(table, path)
    return marked


def free_folder(path: Path) -> Path:
    """``path``, or ``path-2``, ``path-3``, ... where it is taken."""
    if not path.exists():
        return path
    return next(p for i in range(2, sys.maxsize) if not (p := path.with_name(f"{path.name}-{i}")).exists())


def last_folder(path: Path) -> Path:
    """The newest of ``path``, ``path-2``, ``path-3``, ... that exists, or ``path``."""
    found, number = path, 2
    while (later := path.with_name(f"{path.name}-{number}")).exists():
        found, number = later, number + 1
    return found


def metrics_table(directory: RunDirectory) -> pd.DataFrame:
    """A run's metrics as a table: nested fields become columns such as ``bytes_up.weights``."""
    frame = pd.json_normalize(directory.metrics())
    experiment = directory.experiment()
    frame.insert(0, "method", experiment.method.label or experiment.method.name)
    frame.insert(1, "seed", experiment.seed)
    return frame


def expand_file(path: str | Path, changes: Sequence[tuple[str, Any]], seeds: Sequence[int] | None) -> Study:
    """The study in a file, with fields set from the command line.

    ``None`` takes a field out that is optional, as if the file did not give it; for any other it is the text "none".
    """
    table = load(path)
    last = dict(changes)
    for field, value in changes:
        _remove_from_grid(table, field)
        if value is not None:
            _change_field(table, field, partial(set_field, value=value))
    for field in [field for field, value in last.items() if value is None]:
        table = _without_field(table, field, seeds)
    return expand(table, seeds)


def _without_field(table: dict[str, Any], field: str, seeds: Sequence[int] | None) -> dict[str, Any]:
    """A file's table without an optional field; with the text "none" in any other."""
    bare = copy.deepcopy(table)
    _change_field(bare, field, unset_field)
    for one in (table, bare):  # either may not hold together, in itself or without the field
        with contextlib.suppress(FedblendError):
            if all(_is_optional(made, field) for made in expand(one, seeds).experiments.values()):
                return bare
            break
    _change_field(table, field, partial(set_field, value="none"))
    return table


def _is_optional(made: Any, field: str) -> bool:
    """Whether ``a.b.c``, as a file spells it, names a field inside an experiment that need not be given a value."""
    python = {word: name for name, word in registry.FILE_WORDS.items()}
    *outer, last = (python.get(word, word) for word in field.split("."))
    for word in outer:
        made = getattr(made, word, None)
    if isinstance(made, BaseModel):
        return last in type(made).model_fields and type(made).model_fields[last].default is None
    return dataclasses.is_dataclass(made) and any(
        f.name == last and f.default is None for f in dataclasses.fields(made)
    )


def _remove_from_grid(table: dict[str, Any], field: str) -> None:
    """Take a field out of what the file varies: the command line's value is then that of all runs."""
    if field == "seed":
        table.pop("seeds", None)
    grid = table.get("grid")
    if isinstance(grid, dict):
        table["grid"] = {k: v for k, v in grid.items() if k != field and not k.startswith(f"{field}.")}


def _change_field(table: dict[str, Any], field: str, how: Callable[[dict[str, Any], str], None]) -> None:
    """Change a field of a file's table; one of the method in the only method of a list, if the file has a list.

    Raises :class:`FedblendError` for a field of the method if the file lists several.
    """
    if "methods" not in table or field.split(".")[0] != "method":
        how(table, field)
        return
    given = table["methods"]
    if not isinstance(given, list) or len(given) != 1:
        raise FedblendError(f"{field}: this file has several methods; set it in the file, under [[methods]]")
    only = {"method": given[0]}
    how(only, field)
    table["methods"] = [only["method"]]
