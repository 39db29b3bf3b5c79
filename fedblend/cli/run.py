"""``fedblend run`` and ``fedblend resume``: run a study, show its progress, print its table and write its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fedblend import report
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console
from fedblend.cli.progress import RunProgress
from fedblend.core.errors import FedblendError, listed
from fedblend.engines.distributed.ranks import rank_here
from fedblend.engines.distributed.worker import serve_environment
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.study import Study, slugify
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory, find_runs, read_study, runs_in, studies_in
from fedblend.runs.parallel import join_failures, run_all


def serve_other_rank() -> bool:
    """Whether this process is a rank above 0 of torchrun. If so, serve rank 0 until it ends, then return.

    Rank 0 alone reads files, writes results and prints.
    """
    if rank_here() == 0:
        return False
    serve_environment()
    return True


def run_file(
    file: Path,
    changes: Sequence[Change],
    seeds: Sequence[int] | None,
    resume: bool,
    out: Path | None,
    jobs: int | None,
) -> None:
    """Run a file's study in a new folder, or resume its newest one.

    Raises :class:`FedblendError` if ``out`` is a file, or holds files and ``resume`` is false.
    """
    study = api.expand_file(file, changes, seeds)
    if "tune" in api.load(file):
        text = (
            f"{file}: [tune] has no effect here, and its fields have the file's values; to search: fedblend tune {file}"
        )
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    default = api.RUNS / slugify(study.name)
    folder = out or (api.last_folder(default) if resume else api.free_folder(default))
    if out is not None and out.exists() and not out.is_dir():
        raise FedblendError(f"--out {out}: is a file; name a folder")
    if out is not None and not resume and out.exists() and any(out.iterdir()):
        raise FedblendError(
            f"--out {out}: already holds files; add --resume to go on with its runs, or name another folder"
        )
    run_in(study, folder, resume, jobs)


def resume_runs(path: Path, jobs: int | None, ranks: int | None) -> None:
    """Resume one run, or all runs of a study's folder; on another number of ranks if ``ranks`` is given."""
    if RunDirectory.is_run(path):
        run = RunDirectory(path)
        study = Study(path.parent.name, {path.name: _on_ranks(run.experiment(), ranks)})
        run_in(study, path.parent, True, jobs, [run])
        return
    begun = {run.name: RunDirectory(run).experiment() for run in runs_in(path)} if path.is_dir() else {}
    experiments = {slug: begun.get(slug) or resolve(table) for slug, table in read_study(path).items()} | begun
    if not experiments:
        find_runs([path])  # raises the error that names the fault of the path
    if others := [str(other.relative_to(path)) for other in studies_in(path)]:
        if not experiments:
            raise FedblendError(f"{path}: holds studies, not runs; name one of them: {listed(others)}")
        text = f"{path}: its runs are resumed; studies in it are not: {listed(others)}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    study = Study(path.name, {slug: _on_ranks(experiment, ranks) for slug, experiment in experiments.items()})
    run_in(study, path, True, jobs)


def _on_ranks(experiment: Experiment, ranks: int | None) -> Experiment:
    return experiment if ranks is None else experiment.model_copy(update={"ranks": ranks})


def run_in(
    study: Study,
    folder: Path,
    resume: bool,
    jobs: int | None,
    report_on: list[RunDirectory] | None = None,
    tabled: bool = True,
) -> None:
    """Run a study in a folder, show progress, print the table if ``tabled``, write the report.

    ``report_on`` are the runs of the table and the report; unless given, all of the study. Raises
    :class:`FedblendError` if a run failed, or the report cannot be written.
    """
    console = Console()
    rounds_before = {slug: checkpoint.round_of(folder / slug) or 0 for slug in study.experiments}
    _print_resume_notes(study, folder, resume, rounds_before)
    with RunProgress(study.experiments, rounds_before) as progress:
        failed = run_all(study, folder, resume, jobs, progress)
    runs = report_on or [RunDirectory(folder / s) for s in study.experiments if RunDirectory.is_run(folder / s)]
    runs = [run for run in runs if run.metrics()]
    faults = [join_failures(failed, len(study.experiments))] if failed else []
    try:
        if runs:
            if tabled:
                console.print(report.compare(runs, reasons=False))  # the error below has the reasons
            page = (runs[0].path if report_on else folder) / "report.html"
            report.write(runs, page, page.with_suffix(".png"), trust=True)
            console.print(f"Report: {page}", highlight=False, soft_wrap=True)
    except FedblendError as error:
        # A full disk fails the runs first, and then their report for the same reason: state it once.
        if not any(str(error) in fault for fault in faults):
            faults.append(str(error))
    if faults:
        raise FedblendError("; ".join(faults))


def _print_resume_notes(study: Study, folder: Path, resume: bool, rounds_before: Mapping[str, int]) -> None:
    """Print a note where a resume finds no run, and for each run with more rounds than the experiment has."""
    console = Console(stderr=True)
    if resume and not any(RunDirectory.is_run(folder / slug) for slug in study.experiments):
        console.print(f"{folder}: nothing to resume; its runs start from round 0", highlight=False, soft_wrap=True)
    for slug, experiment in study.experiments.items():
        if (done := rounds_before[slug]) > experiment.rounds:
            text = f"{slug}: has {done} rounds already, more than rounds = {experiment.rounds}; all are kept"
            console.print(text, highlight=False, soft_wrap=True)
