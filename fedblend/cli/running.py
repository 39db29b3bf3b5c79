"""What the commands that run and compare do."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from fedblend import report
from fedblend.cli.progress import RunProgress
from fedblend.core.errors import FedblendError, listed
from fedblend.engines.distributed.ranks import rank_here
from fedblend.engines.distributed.worker import serve_environment
from fedblend.experiment.config import Experiment, resolve
from fedblend.experiment.study import Study, slugify
from fedblend.experiment.tables import parse_value
from fedblend.report.sites import sites_table
from fedblend.runs import api, checkpoint
from fedblend.runs.directory import RunDirectory, find_runs, not_begun, read_study, runs_in, studies_in
from fedblend.runs.parallel import in_one_message, run_all

Change = tuple[str, Any]


def parse_change(text: str) -> Change:
    """``train.lr=0.05`` as (field, value); the value ``None`` for a bare ``none``, since TOML has no word for it."""
    field, equals, value = text.partition("=")
    if not equals or not field.strip():
        raise FedblendError(f"--set {text!r} is not valid: write FIELD=VALUE, such as --set train.lr=0.05")
    return field.strip(), None if value.strip() == "none" else parse_value(value.strip())


def parse_seeds(text: str | None) -> list[int] | None:
    """``0,1,2`` as a list."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and word.isascii() for word in words):
        raise FedblendError(f"--seeds {text!r} is not valid: write whole numbers from 0 with commas, such as 0,1,2")
    return [int(word) for word in words]


def served() -> bool:
    """Whether this is one of torchrun's further processes; it has then worked for rank 0 until that one ended.

    Rank 0 alone looks at files, keeps what comes out, and shows it.
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
    """Run a file's study in a new folder, or go on with its newest one."""
    study = api.expand_file(file, changes, seeds)
    usual = api.RUNS / slugify(study.name)
    folder = out or (api.last_folder(usual) if resume else api.free_folder(usual))
    if out is not None and out.exists() and not out.is_dir():
        raise FedblendError(f"--out {out}: is a file; name a folder")
    if out is not None and not resume and out.exists() and any(out.iterdir()):
        raise FedblendError(
            f"--out {out}: already holds files; add --resume to go on with its runs, or name another folder"
        )
    run_in(study, folder, resume, jobs)


def resume_runs(path: Path, jobs: int | None, ranks: int | None) -> None:
    """Go on with one run, or all runs of a study's folder; on another number of ranks if one is given."""
    if RunDirectory.is_run(path):
        run = RunDirectory(path)
        study = Study(path.parent.name, {path.name: _on_ranks(run.experiment(), ranks)})
        run_in(study, path.parent, True, jobs, [run])
        return
    begun = {run.name: RunDirectory(run).experiment() for run in runs_in(path)} if path.is_dir() else {}
    experiments = {slug: begun.get(slug) or resolve(table) for slug, table in read_study(path).items()} | begun
    if not experiments:
        find_runs([path])  # says what is wrong with the path
    if others := [str(other.relative_to(path)) for other in studies_in(path)]:
        if not experiments:
            raise FedblendError(f"{path}: holds studies, not runs; name one of them: {listed(others)}")
        text = f"{path}: its runs go on; studies in it are left alone: {listed(others)}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    study = Study(path.name, {slug: _on_ranks(experiment, ranks) for slug, experiment in experiments.items()})
    run_in(study, path, True, jobs)


def _on_ranks(experiment: Experiment, ranks: int | None) -> Experiment:
    return experiment if ranks is None else experiment.model_copy(update={"ranks": ranks})


def run_in(
    study: Study, folder: Path, resume: bool, jobs: int | None, report_on: list[RunDirectory] | None = None
) -> None:
    """Run a study in a folder, show progress, print the table, write the report; fail if any run failed."""
    console = Console()
    made = {slug: checkpoint.round_of(folder / slug) or 0 for slug in study.experiments}
    _say_what_is_there(study, folder, resume, made)
    with RunProgress(study.experiments, made) as progress:
        failed = run_all(study, folder, resume, jobs, progress)
    runs = report_on or [RunDirectory(folder / s) for s in study.experiments if RunDirectory.is_run(folder / s)]
    runs = [run for run in runs if run.metrics()]
    faults = [in_one_message(failed, len(study.experiments))] if failed else []
    try:
        if runs:
            console.print(report.compare(runs, reasons=False))  # the error that ends this has them
            page = (runs[0].path if report_on else folder) / "report.html"
            report.write(runs, page, page.with_suffix(".png"))
            console.print(f"Report: {page}", highlight=False, soft_wrap=True)
    except FedblendError as error:
        # After what failed before: a full disk stops the runs first, and then their report.
        if not any(str(error) in fault for fault in faults):
            faults.append(str(error))
    if faults:
        raise FedblendError("; ".join(faults))


def _say_what_is_there(study: Study, folder: Path, resume: bool, made: Mapping[str, int]) -> None:
    """Say so where a resume finds nothing to go on with, or more rounds than are asked for."""
    console = Console(stderr=True)
    if resume and not any(RunDirectory.is_run(folder / slug) for slug in study.experiments):
        console.print(f"{folder}: nothing to resume; its runs begin", highlight=False, soft_wrap=True)
    for slug, experiment in study.experiments.items():
        if made[slug] > experiment.rounds:
            text = f"{slug}: {made[slug]} rounds are made already, more than rounds = {experiment.rounds}; they stay"
            console.print(text, highlight=False, soft_wrap=True)


def write_report(paths: list[Path], out: Path) -> None:
    """Write the page and the picture for runs."""
    report.write(find_runs(paths), out, out.with_suffix(".png"))
    Console().print(f"Report: {out} and {out.with_suffix('.png')}", highlight=False, soft_wrap=True)


def show_table(paths: list[Path], sites: bool = False) -> None:
    """Print the table of runs, or their accuracy at each of the data's own clients."""
    runs = find_runs(paths)
    console = Console()
    console.print(sites_table(runs) if sites else report.compare(runs))
    for folder, slugs in not_begun(paths).items():
        text = f"Not begun: {listed(slugs)}; go on with: fedblend resume {shlex.quote(str(folder))}"
        console.print(text, highlight=False, soft_wrap=True)
