"""``fedblend tune``: search for the best values of a file's fields, and show what mattered."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.table import Table

from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, note, table
from fedblend.cli.interrupts import stop_announced
from fedblend.core.errors import Stopped
from fedblend.core.files import csv_text, write_atomically
from fedblend.experiment.study import slugify
from fedblend.report.scatter_figures import draw_search
from fedblend.runs import api
from fedblend.runs.directory import RunDirectory
from fedblend.runs.runner import require_free
from fedblend.runs.tuning import BEST, MethodSearch, Trial, tune

TRIALS = "trials.csv"


def tune_file(file: Path, changes: Sequence[Change] = (), resume: bool = False, out: Path | None = None) -> None:
    """Search in a new folder, or go on with the newest search of the file; print a table, write the best file."""
    table, folder = begin_search("tune", file, changes, resume, out)
    console = Console()
    with told_how_to_go_on("tune", file, folder):
        searches = tune(table, folder, trial_printer(Console(stderr=True)))
    console.print(_best_table(searches))
    for search in searches:
        assert search.best is not None
        console.tell(f"{search.label}: {_values(search.best.values)}")
    for line in lines_of_ends(searches):
        console.tell(line)
    head = ["method", "metric", "score", "best_round", "rounds", "ended_early", "failure", "run", "values"]
    rows = [_row(search, trial) for search in searches for trial in search.trials]
    write_atomically(folder / TRIALS, csv_text([head, *rows]))
    write_atomically(folder / "tune.png", draw_search(searches))
    console.tell(f"Trials: {folder / TRIALS}, figure: {folder / 'tune.png'}\nBest values: fedblend run {folder / BEST}")


def begin_search(
    command: str, file: Path, changes: Sequence[Change], resume: bool, out: Path | None
) -> tuple[dict[str, Any], Path]:
    """A file's table with changes, and the folder of a command's trials: a new one, or the newest of its name."""
    table = api.load_changed(file, changes)
    default = api.RUNS / f"{command}-{slugify(str(table.get('name', file.stem)))}"
    folder = out or (api.last_folder(default) if resume else api.free_folder(default))
    require_free(folder, "--out", "add --resume to go on, or name another folder", resume)
    if resume and not folder.exists():
        note(f"{folder}: nothing to resume; {command} starts anew")
    return table, folder


@contextmanager
def told_how_to_go_on(command: str, file: Path, folder: Path) -> Iterator[None]:
    """Say at once what Ctrl-C does, and then name the command that goes on with all of a search, not its last run."""
    try:
        with stop_announced():
            yield
    except Stopped:
        line = shlex.join(["fedblend", command, str(file), "--resume", "--out", str(folder)])
        raise Stopped(f"stopped; finished trials and checkpoints are kept. Go on with: {line}") from None


def trial_printer(notes: Console) -> Callable[[str, Trial, int], None]:
    """A function that prints a finished trial in one line, counted among its method's trials."""
    done: dict[str, int] = {}

    def on_trial(label: str, trial: Trial, most: int) -> None:
        done[label] = done.get(label, 0) + 1
        outcome = f"failed: {trial.failure}" if trial.failure else "" if trial.score is None else f"{trial.score:.4f}"
        early = f", ended early after {trial.rounds} round{'s' * (trial.rounds != 1)}" if trial.pruned else ""
        line = f"{label} {done[label]}/{most}: {_values(trial.values)}: {outcome}{early}"
        notes.tell(line)

    return on_trial


def lines_of_ends(searches: Sequence[MethodSearch]) -> list[str]:
    """Lines that say which best values are the largest or smallest in the file: one beyond them may be better."""
    ends: dict[tuple[str, str], list[str]] = {}
    for search in searches:
        for path, end in search.at_an_end.items():
            ends.setdefault((path, end), []).append(search.label)
    return [
        f"The {end} {path} tried was the best one of {', '.join(labels)}; a {end.replace('est', 'er')} one may be "
        f'better: add some to "{path}" under [tune.fields]'
        for (path, end), labels in ends.items()
    ]


def _best_table(searches: Sequence[MethodSearch]) -> Table:
    metrics = list(dict.fromkeys(search.metric for search in searches))
    numbers = ["trials", "ended early", "failed", "rounds", "validation", "test"]
    made = table(["method"], numbers, title=f"Best {' and '.join(metrics)}", title_justify="left")
    for search in searches:
        best = search.best
        assert best is not None
        assert best.score is not None
        (record,) = (record for record in RunDirectory(best.folder).records() if record.round == best.round)
        test = record.score_of(search.metric)
        made.add_row(
            search.label,
            str(len(search.trials)),
            str(sum(trial.pruned for trial in search.trials)),
            str(sum(bool(trial.failure) for trial in search.trials)),
            str(sum(trial.rounds for trial in search.trials)),
            f"{best.score:.4f}",
            "" if test is None else f"{test:.4f}",
        )
    return made


def _values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{path}={value}" for path, value in values.items())


def _row(search: MethodSearch, trial: Trial) -> list[Any]:
    score = "" if trial.score is None else repr(trial.score)
    early, run = str(trial.pruned).lower(), f"{trial.folder.parent.name}/{trial.folder.name}"
    values = json.dumps(trial.values)
    return [search.label, search.metric, score, trial.round, trial.rounds, early, trial.failure, run, values]
