"""``fedblend run`` and ``fedblend resume``: run a study, show its progress, print its table and write its report."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedblend import report
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console, note
from fedblend.cli.interrupts import stop_announced
from fedblend.cli.progress import RunProgress
from fedblend.core.errors import FedblendError, listed
from fedblend.engines.distributed.ranks import Ranks, rank_here, started_by_torchrun
from fedblend.engines.distributed.worker import serve_environment
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.study import Study, slugify
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory, find_runs, read_study, runs_in, studies_in
from fedblend.runs.groups import EXECUTION
from fedblend.runs.parallel import join_failures, processors, run_all, run_one
from fedblend.runs.runner import MAY_CHANGE, require_free


def on_rank_0(command: Callable[..., None]) -> Callable[..., None]:
    """A command that rank 0 of torchrun runs, while the other ranks serve it: it alone reads, writes and prints."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        if not started_by_torchrun():
            command(**options)
        elif rank_here() == 0:
            # Connected first, so that the others end, whatever ends this rank.
            ranks = Ranks.from_environment()
            command(**options)
            ranks.broadcast({"command": "leave"})
        else:
            serve_environment()

    return run


@on_rank_0
@stop_announced()
def run_file(
    file: Path,
    changes: Sequence[Change] = (),
    seeds: Sequence[int] | None = None,
    resume: bool = False,
    engine: str | None = None,
    ranks: int | None = None,
    out: Path | None = None,
    jobs: int | None = None,
) -> None:
    """Run a file's study in a new folder, or resume its newest one."""
    executed = {"engine": engine, "ranks": ranks}
    changes = [*changes, *((field, value) for field, value in executed.items() if value is not None)]
    study = api.expand_file(file, changes, seeds)
    if "tune" in api.load(file):
        note(
            f"{file}: [tune] has no effect here, and its fields have the file's values; to search: fedblend tune {file}"
        )
    default = api.RUNS / slugify(study.name)
    folder = out or (api.last_folder(default) if resume else api.free_folder(default))
    require_free(folder, "--out", "add --resume to go on with its runs, or name another folder", resume)
    run_in(study, folder, resume, jobs)


@on_rank_0
@stop_announced()
def resume_runs(run: Path, ranks: int | None = None, jobs: int | None = None) -> None:
    """Resume one run, or all runs of a study's folder; on another number of ranks if ``ranks`` is given."""
    path = run
    if RunDirectory.is_run(path):
        _resume_run(path, ranks)
        return
    tables = read_study(path)
    # Reading a run makes its modules known, which the study's other runs may need.
    made = {run: RunDirectory(run).experiment() for run in (runs_in(path) if path.is_dir() else ())}
    # A run that failed before it began has the experiment of that time.
    begun = {run.name: made[run] for run in made if RunDirectory.has_begun(run) or run.name not in tables}
    planned = {slug: resolve(table) for slug, table in tables.items()}
    experiments = {**planned, **begun}
    if not experiments:
        find_runs([path])  # raises the error that names the fault of the path
    if others := [str(other.relative_to(path)) for other in studies_in(path)]:
        if not experiments:
            raise FedblendError(f"{path}: holds studies, not runs; name one of them: {listed(others)}")
        note(f"{path}: its runs are resumed; studies in it are not: {listed(others)}")
    for slug in planned.keys() & begun.keys():
        # A study that was extended and stopped has not reached all of its runs, whose folders have the earlier fields.
        changes = {field: getattr(planned[slug], field) for field in MAY_CHANGE if field not in EXECUTION}
        experiments[slug] = begun[slug].model_copy(update=changes)
    study = Study(path.name, {slug: _on_ranks(experiment, ranks) for slug, experiment in experiments.items()})
    run_in(study, path, True, jobs)


def _resume_run(path: Path, ranks: int | None) -> None:
    """Resume one run, which may lie beside others that are no study, or whose study another process runs."""
    run = RunDirectory(path)
    name, experiment = path.resolve().name, _on_ranks(run.experiment(), ranks)
    rounds_before = {name: checkpoint.round_of(path) or 0}
    _print_long_runs({name: experiment}, rounds_before)
    with RunProgress({name: experiment}, rounds_before) as progress:
        failure = run_one(experiment, path, True, partial(progress, name), processors(), partial(progress.step, name))
    _report([run], path / "report.html", [f"{name}: {failure}"] if failure else [], tabled=True)


def _on_ranks(experiment: Experiment, ranks: int | None) -> Experiment:
    return experiment if ranks is None else experiment.model_copy(update={"ranks": ranks})


def run_in(study: Study, folder: Path, resume: bool, jobs: int | None, tabled: bool = True) -> None:
    """Run a study in a folder, show progress, print the table if ``tabled``, write the report."""
    rounds_before = {slug: checkpoint.round_of(folder / slug) or 0 for slug in study.experiments}
    # Without its table a study is a step of another command, which says itself whether it goes on.
    if resume and tabled and not any(RunDirectory.is_run(folder / slug) for slug in study.experiments):
        note(f"{folder}: nothing to resume; its runs start from round 0")
    _print_long_runs(study.experiments, rounds_before)
    with RunProgress(study.experiments, rounds_before) as progress:
        failed = run_all(study, folder, resume, jobs, progress, progress.step)
    runs = [RunDirectory(folder / slug) for slug in study.experiments if RunDirectory.is_run(folder / slug)]
    _report(runs, folder / "report.html", [join_failures(failed, len(study.experiments))] if failed else [], tabled)


def _report(runs: Sequence[RunDirectory], page: Path, faults: list[str], tabled: bool) -> None:
    """Print a table of the runs if ``tabled``, and write their page. Raises :class:`FedblendError` of all faults."""
    console, runs = Console(), [run for run in runs if run.metrics() or run.status()["state"] == "failed"]
    try:
        if any(run.metrics() for run in runs):
            if tabled:
                console.print(report.compare(runs, reasons=False))  # the error below has the reasons
            report.write(runs, page, page.with_suffix(".png"), trust=True)
            console.tell(f"Report: {page}")
    except FedblendError as error:
        # A full disk fails the runs first, and then their report for the same reason: state it once.
        if not any(str(error) in fault for fault in faults):
            faults.append(str(error))
    if faults:
        raise FedblendError("; ".join(faults))


def _print_long_runs(experiments: Mapping[str, Experiment], rounds_before: Mapping[str, int]) -> None:
    for slug, experiment in experiments.items():
        if (done := rounds_before[slug]) > experiment.rounds:
            note(f"{slug}: has {done} rounds already, more than rounds = {experiment.rounds}; all are kept")
