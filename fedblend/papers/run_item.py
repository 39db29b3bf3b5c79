"""Running an item: the runs that are missing, what is measured of them, and the result as data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError, Stopped
from fedblend.core.loop import Record
from fedblend.experiment.config import Experiment
from fedblend.experiment.study import Study
from fedblend.papers.availability import absent, is_fetched
from fedblend.papers.measures.base import CellRun, Tick
from fedblend.papers.paths import RUNS, OutputPaths
from fedblend.papers.plan import Cell, ItemPlan
from fedblend.papers.result import Values, command, keep
from fedblend.runs import checkpoint
from fedblend.runs.parallel import run_all

OnRuns = Callable[[dict[str, Experiment], Mapping[str, int]], AbstractContextManager[Callable[[str, Record], None]]]
"""Opens the display of runs; given their experiments, and how many rounds of each are made already."""


def run(
    plan: ItemPlan,
    out: Path,
    on_runs: OnRuns,
    tick: Tick = lambda what, done, total: None,
    jobs: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Run what is missing of an item, measure, and keep the result; returns it.

    Raises :class:`FedblendError` if no cell's data are at hand, :class:`Stopped` after Ctrl-C (what was made is kept,
    and the result of it written).
    """
    place = OutputPaths(out, plan)
    reasons = {name: absent(data) or _not_fetched(data) for name, data in _data_of(plan).items()}
    lacking = {name: reason for name, reason in reasons.items() if reason}
    if len(lacking) == len(reasons):
        raise FedblendError(f"{plan.id}: {'; '.join(lacking.values())}")
    cells = [cell for cell in plan.asked if cell.experiment.data.name not in lacking]
    faults: dict[str, str] = {}
    try:
        if any(plan.trains(cell) for cell in cells):
            faults = _run_missing(place, cells, on_runs, jobs, device)
        made = _measured(place, cells, tick, faults)
    except (KeyboardInterrupt, Stopped):
        keep(place, lacking, {}, _settled(place), stopped=True)
        raise Stopped(f"stopped; what is made is kept. Go on with: {command(plan, out)}") from None
    return keep(place, lacking, faults, made)


def _data_of(plan: ItemPlan) -> dict[str, Any]:
    """The data sets of what is asked for, by name."""
    return {cell.experiment.data.name: cell.experiment.data for cell in plan.asked}


def _not_fetched(data: Any) -> str:
    """Why a data set that is not at hand cannot be fetched either; it is fetched now, before any work."""
    try:
        if is_fetched(data):
            data.load()
    except FedblendError as error:
        return str(error)
    return ""


def _run_missing(
    place: OutputPaths, cells: list[Cell], on_runs: OnRuns, jobs: int | None, device: str | None
) -> dict[str, str]:
    """Run what no folder holds yet; returns why runs failed, by their folders' names."""
    plan, folder = place.plan, place.folder / RUNS
    experiments: dict[str, Experiment] = {}
    known: set[tuple[str, int]] = set()
    for cell in cells:
        there = place.finished(cell) if plan.trains(cell) else {}
        for seed in plan.seeds if plan.trains(cell) else ():
            if seed not in there and (cell.fingerprint, seed) not in known:
                # Cells that are one experiment are run once, under the name of the first.
                known.add((cell.fingerprint, seed))
                experiments[_begun(folder, cell, seed)] = cell.seeded(seed, device)
    if not experiments:
        return {}
    made = {slug: checkpoint.round_of(folder / slug) or 0 for slug in experiments}
    with on_runs(experiments, made) as listen:
        return run_all(Study(plan.paper, experiments), folder, True, jobs, listen)


def _begun(folder: Path, cell: Cell, seed: int) -> str:
    """The folder's name of a run that was begun, whatever its cell was called then, or of a new one."""
    found = sorted(folder.glob(f"*-{cell.fingerprint}-seed{seed}"))
    return found[0].name if found else cell.slug(seed)


def _measured(place: OutputPaths, cells: list[Cell], tick: Tick, faults: dict[str, str]) -> Values:
    """All quantities of all cells; what cannot be measured is noted in ``faults``."""
    plan = place.plan
    made: Values = {}
    for cell in cells:
        trains = plan.trains(cell)
        runs, ended = (place.begun(cell), place.finished(cell)) if trains else ({}, {})
        for seed in sorted({*plan.seeds, *runs}) if trains else plan.seeds:
            if trains and seed not in runs:
                continue
            seen = CellRun(cell.seeded(seed), runs.get(seed), place.work(cell, seed), tick)
            for name in plan.item.quantities:
                measure = plan.measures.get((name, cell.row, cell.column))
                if measure is None:
                    continue
                try:
                    if trains and seed not in ended and not measure.is_settled(seen):
                        continue
                    value = measure.measured(seen)
                except FedblendError as error:
                    if isinstance(error, Stopped):
                        raise
                    faults[f"{cell.row} {cell.column}, {name}"] = str(error)
                    continue
                if value is not None:
                    made.setdefault((name, cell.row, cell.column), {})[seed] = place.told(value, seen.folder)
    return made


def _settled(place: OutputPaths) -> Values:
    """What can be measured at once after Ctrl-C, of finished runs and of others so far as it is settled: nothing that
    takes work."""
    with contextlib.suppress(FedblendError, KeyboardInterrupt):
        plan = place.plan
        quick = {n: m for n, m in plan.measures.items() if m.trains and type(m).__module__.endswith("measures.runs")}
        only = ItemPlan(**{**vars(plan), "measures": quick})
        return _measured(OutputPaths(place.out, only), plan.cells, lambda what, done, total: None, {})
    return {}
