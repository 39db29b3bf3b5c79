"""Running an item: the runs that are missing, what is measured of them, and the result as data."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.config import Experiment
from fedblend.errors import FedblendError, Stopped
from fedblend.federation import Record
from fedblend.reproduce import claims
from fedblend.reproduce.data import absent, is_fetched
from fedblend.reproduce.measures import Measure, Seen
from fedblend.reproduce.measures.base import Tick
from fedblend.reproduce.plan import Cell, Plan
from fedblend.runs import checkpoint
from fedblend.runs.directory import RunDirectory, has_runs, read_json
from fedblend.runs.files import write_json
from fedblend.runs.groups import read
from fedblend.runs.several import in_one_message, run_all
from fedblend.study import Study

RESULT = "result.json"
RUNS = "runs"
WORK = "work"

OnRuns = Callable[[dict[str, Experiment], Mapping[str, int]], AbstractContextManager[Callable[[str, Record], None]]]
"""Opens the display of runs; given their experiments, and how many rounds of each are made already."""


@dataclass(frozen=True)
class Place:
    """Where an item's work at a scale lies: ``OUT/PAPER/ITEM/SCALE``."""

    out: Path
    plan: Plan

    @property
    def folder(self) -> Path:
        """The folder."""
        return self.out / self.plan.paper / self.plan.name / self.plan.scale

    def finished(self, cell: Cell) -> dict[int, Path]:
        """Every finished run of a cell's experiment by its seed, also of other items and scales: they are the same."""
        return {seed: path for seed, path in self.begun(cell).items() if read(RunDirectory(path)).finished}

    def begun(self, cell: Cell) -> dict[int, Path]:
        """The same with runs that have not ended, where there is no other."""
        found: dict[int, Path] = {}
        ended: set[int] = set()
        here = f"{self.plan.paper}/{self.plan.name}/{self.plan.scale}/{RUNS}"
        for pattern in (here, f"*/*/*/{RUNS}"):
            for path in sorted(self.out.glob(f"{pattern}/*-{cell.fingerprint}-seed*")):
                seed = int(path.name.rpartition("-seed")[2])
                if seed in ended or not RunDirectory.is_run(path):
                    continue
                if read(RunDirectory(path)).finished:
                    ended.add(seed)
                    found[seed] = path
                found.setdefault(seed, path)
        return found

    def work(self, cell: Cell, seed: int) -> Path:
        """The folder for what measures keep of a cell; cells of one experiment share it, those of other items too."""
        return self.out / WORK / f"{cell.fingerprint}-seed{seed}"

    def told(self, value: Any, folder: Path) -> Any:
        """A measure's value as a result tells it: pictures, whose paths count from ``folder``, from the item's."""
        return Path(os.path.relpath(folder / value, self.folder)).as_posix() if isinstance(value, str) else value


def run(
    plan: Plan,
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
    place = Place(out, plan)
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
        _keep(place, lacking, {}, _settled(place), stopped=True)
        raise Stopped(f"stopped; what is made is kept. Go on with: {command(plan, out)}") from None
    return _keep(place, lacking, faults, made)


def _data_of(plan: Plan) -> dict[str, Any]:
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


def command(plan: Plan, out: Path) -> str:
    """The command that makes this (or goes on with it)."""
    words = ["fedblend", "reproduce", plan.id]
    words += ["--scale", plan.scale] if plan.scale != "paper" else []
    words += ["--seeds", ",".join(map(str, plan.seeds))] if plan.seeds != plan.item.seeds else []
    words += [word for name in plan.only for word in ("--only", name)]
    words += ["--out", str(out)] if str(out) != "reproductions" else []
    return shlex.join(words)


def _run_missing(
    place: Place, cells: list[Cell], on_runs: OnRuns, jobs: int | None, device: str | None
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


Values = dict[tuple[str, str, str], dict[int, Any]]
"""Numbers (or paths of pictures) by (quantity, row, column), each by seed."""


def _measured(place: Place, cells: list[Cell], tick: Tick, faults: dict[str, str]) -> Values:
    """All quantities of all cells; what cannot be measured is noted in ``faults``."""
    plan = place.plan
    made: Values = {}
    for cell in cells:
        trains = plan.trains(cell)
        runs, ended = (place.begun(cell), place.finished(cell)) if trains else ({}, {})
        for seed in sorted({*plan.seeds, *runs}) if trains else plan.seeds:
            if trains and seed not in runs:
                continue
            seen = Seen(cell.seeded(seed), runs.get(seed), place.work(cell, seed), tick)
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


def _settled(place: Place) -> Values:
    """What can be measured at once after Ctrl-C, of finished runs and of others so far as it is settled: nothing that
    takes work."""
    with contextlib.suppress(FedblendError, KeyboardInterrupt):
        plan = place.plan
        quick = {n: m for n, m in plan.measures.items() if m.trains and type(m).__module__.endswith("measures.runs")}
        only = Plan(**{**vars(plan), "measures": quick})
        return _measured(Place(place.out, only), plan.cells, lambda what, done, total: None, {})
    return {}


def _keep(
    place: Place, lacking: Mapping[str, str], faults: Mapping[str, str], new: Values, stopped: bool = False
) -> dict[str, Any]:
    """Write the result, with the numbers that an earlier one has of other cells and seeds, and return it."""
    plan, item = place.plan, place.plan.item
    earlier = result_of(place.out, plan.paper, plan.name, plan.scale)
    made = _joined(plan, earlier, new)
    cells = {(row, column) for (_, row, column), by_seed in made.items() if by_seed}
    seeds = sorted({seed for by_seed in made.values() for seed in by_seed})
    result: dict[str, Any] = {
        "item": plan.id,
        "title": item.title,
        "scale": plan.scale,
        "command": command(plan.with_others(cells, seeds), Path("reproductions")),
        "smaller": plan.smaller(),
        "other_data": sorted({" for ".join(cell.other_data) for cell in plan.cells if cell.other_data}),
        "absent": sorted(lacking),
        "faults": dict(faults),
        "stopped": stopped,
        "note": item.note,
        "seeds": seeds,
        "facts": _facts(place, made, earlier.get("facts", {})),
        "rows": {cell.row: item.rows[cell.row].label or cell.row for cell in plan.cells},
        "columns": {cell.column: item.all_columns[cell.column].label or cell.column for cell in plan.cells},
        "quantities": {name: _quantity(plan, name, made) for name in item.quantities},
    }
    result["claims"] = [_claim(plan, claim, made) for claim in item.claims]
    place.folder.mkdir(parents=True, exist_ok=True)
    write_json(place.folder / RESULT, result)
    return result


def _joined(plan: Plan, earlier: Mapping[str, Any], new: Values) -> Values:
    """New numbers over those of an earlier result that were made in the same way."""
    cells = {(cell.row, cell.column): cell for cell in plan.cells}
    made: Values = {}
    for name, quantity in earlier.get("quantities", {}).items():
        for kept in quantity["cells"]:
            where = (kept["row"], kept["column"])
            if (name, *where) in plan.measures and kept["made_by"] == plan.mark(name, cells[where]):
                made[name, *where] = {int(seed): exact(value) for seed, value in kept["ours"].items()}
    return {where: made.get(where, {}) | new.get(where, {}) for where in {**made, **new}}


def _facts(place: Place, made: Values, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, and data with checksums, as the runs that the numbers are of tell them; those of an earlier result's
    runs, which need not lie here, with them."""
    told = {(row, column, seed) for (_, row, column), by_seed in made.items() for seed in by_seed}
    runs = {
        path
        for cell in place.plan.cells
        if place.plan.trains(cell)
        for seed, path in place.begun(cell).items()
        if (cell.row, cell.column, seed) in told
    }
    facts: dict[str, Any] = dict(earlier)
    for path in sorted(runs):
        one = RunDirectory(path).facts()
        data = {key: value for key, value in one["data"].items() if key in ("train", "test", "files", "notes")}
        facts = {"versions": one["versions"], "data": facts.get("data", {}) | {one["data"]["name"]: data}}
    return facts


def _quantity(plan: Plan, name: str, made: Values) -> dict[str, Any]:
    """A quantity's cells: ours by seed, and the paper's."""
    quantity, columns = plan.item.quantities[name], list(plan.item.all_columns)
    cells = []
    for cell in plan.cells:
        if (name, cell.row, cell.column) not in plan.measures:
            continue
        place = columns.index(cell.column)
        numbers = [kind.get(cell.row, (math.nan,) * len(columns))[place] for kind in (quantity.paper, quantity.spread)]
        ours = made.get((name, cell.row, cell.column), {})
        cells.append(
            {
                "row": cell.row,
                "column": cell.column,
                "made_by": plan.mark(name, cell),
                "ours": {str(seed): plain(value) for seed, value in sorted(ours.items())},
                "paper": plain(numbers[0]),
                "paper_std": plain(numbers[1]),
            }
        )
    return {"label": quantity.label, "unit": quantity.unit, "digits": quantity.digits, "cells": cells}


def plain(value: Any) -> Any:
    """A number as JSON can hold it: "never" for infinity, nothing for NaN."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "never"
    return round(value, 6) if isinstance(value, float) else value


def exact(value: Any) -> Any:
    """What :func:`plain` made of a number, back again."""
    return math.inf if value == "never" else value


def _claim(plan: Plan, claim: Any, made: Values) -> dict[str, Any]:
    """A claim with our verdict, and the paper's own numbers' where it has any."""
    item = plan.item
    quantity = claim.of or next(iter(item.quantities))
    comparison = claims.read(claim.holds, list(item.rows), list(item.all_columns))
    seeds = {seed for (name, _, _), by_seed in made.items() if name == quantity for seed in by_seed}
    numbers = {place[1:]: v for place, v in made.items() if place[0] == quantity and _are_numbers(v)}
    by_seed = {seed: {cell: v[seed] for cell, v in numbers.items() if seed in v} for seed in seeds}
    means = {cell: math.fsum(v.values()) / len(v) for cell, v in numbers.items()}
    verdict = claims.judge(comparison, means, by_seed, claim.where)
    theirs = claims.judge(comparison, papers_numbers(item, quantity), {}, claim.where)
    return {
        "says": claim.says,
        "holds": claim.holds,
        "of": quantity,
        "verdict": verdict.word,
        "places": {place or "all": [found.holds, plain(found.margin)] for place, found in verdict.places.items()},
        "seeds": list(verdict.seeds),
        "paper": theirs.word,
    }


def _are_numbers(by_seed: Mapping[int, Any]) -> bool:
    return bool(by_seed) and not any(isinstance(value, str) for value in by_seed.values())


def papers_numbers(item: Any, quantity: str) -> claims.Cells:
    """The paper's numbers of a quantity, by (row, column)."""
    return {
        (row, column): number
        for row, numbers in item.quantities[quantity].paper.items()
        for column, number in zip(item.all_columns, numbers, strict=True)
        if not math.isnan(number)
    }


def result_of(out: Path, paper: str, name: str, scale: str) -> dict[str, Any]:
    """The result that is kept of an item at a scale; empty if there is none."""
    return read_json(out / paper / name / scale / RESULT)


def runs_of(plan: Plan, out: Path) -> list[RunDirectory]:
    """All runs of an item with any record, those of other items that it shares among them."""
    place = Place(out, plan)
    paths = {path for cell in plan.cells for path in place.finished(cell).values()}
    folder = place.folder / RUNS
    if has_runs(folder):
        paths |= {path for path in folder.iterdir() if RunDirectory.is_run(path)}
    return [run for run in map(RunDirectory, sorted(paths)) if run.metrics()]


__all__ = ["Measure", "Place", "command", "in_one_message", "plain", "result_of", "run", "runs_of"]
