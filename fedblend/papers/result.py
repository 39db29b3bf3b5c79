"""An item's folders, and its result as data: our values by cell and seed, the paper's, and verdicts."""

from __future__ import annotations

import functools
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedblend.core.files import write_json
from fedblend.papers import claims
from fedblend.papers.items import Claim, Item, all_papers
from fedblend.papers.plan import Cell, ItemPlan, plan_item
from fedblend.papers.verdicts import FAILS, HOLDS, NOT_COMPARABLE, judge_numbers
from fedblend.runs.directory import RunDirectory, has_runs, read_json
from fedblend.runs.groups import read
from fedblend.runs.summary import costs

RESULT, RUNS, WORK = "result.json", "runs", "work"  # The file of a result, and folders of runs and of measures

COMMITTED = Path(__file__).parents[2] / "evidence" / "results"
"""The results that fedblend's checkout holds; an installed fedblend has none."""

Values = dict[tuple[str, str, str], dict[int, Any]]
"""Numbers (or paths of pictures) by (quantity, row, column), then by seed."""


@dataclass(frozen=True)
class OutputPaths:
    """The paths of an item at a scale, below the folder ``out`` that all items share."""

    out: Path
    plan: ItemPlan

    @property
    def folder(self) -> Path:
        """The item's folder: ``OUT/PAPER/ITEM/SCALE``."""
        return self.out / self.plan.paper / self.plan.name / self.plan.scale

    def finished_runs(self, cell: Cell) -> dict[int, Path]:
        """Finished runs of a cell's experiment by seed, those of other items and scales included."""
        return {seed: path for seed, path in self.all_runs(cell).items() if read(RunDirectory(path)).finished}

    def all_runs(self, cell: Cell) -> dict[int, Path]:
        """Runs of a cell's experiment by seed: the finished one, or else one that has not ended."""
        found: dict[int, Path] = {}
        finished: set[int] = set()
        own = f"{self.plan.paper}/{self.plan.name}/{self.plan.scale}/{RUNS}"
        for pattern in (own, f"*/*/*/{RUNS}"):
            for path in sorted(self.out.glob(f"{pattern}/*-{cell.fingerprint}-seed*")):
                seed = int(path.name.rpartition("-seed")[2])
                if seed in finished or not RunDirectory.is_run(path):
                    continue
                if read(RunDirectory(path)).finished:
                    finished.add(seed)
                    found[seed] = path
                found.setdefault(seed, path)
        return found

    def work_folder(self, cell: Cell, seed: int) -> Path:
        """The folder in which measures keep their work on a cell; all cells with the same experiment share it."""
        return self.out / WORK / f"{cell.fingerprint}-seed{seed}"

    def relative_value(self, value: Any, folder: Path) -> Any:
        """A measured value for the result: a picture's path, relative to ``folder``, becomes relative to the item's."""
        return Path(os.path.relpath(folder / value, self.folder)).as_posix() if isinstance(value, str) else value


def runs_of(plan: ItemPlan, out: Path) -> list[RunDirectory]:
    """All runs of an item with any record, including those that it shares with other items."""
    output = OutputPaths(out, plan)
    paths = {path for cell in plan.cells for path in output.finished_runs(cell).values()}
    folder = output.folder / RUNS
    if has_runs(folder):
        paths |= {path for path in folder.iterdir() if RunDirectory.is_run(path)}
    return [run for run in map(RunDirectory, sorted(paths)) if run.metrics()]


def write_result(
    output: OutputPaths,
    missing: Mapping[str, str],
    faults: Mapping[str, str],
    new: Values,
    minutes: float,
    stopped: bool = False,
) -> dict[str, Any]:
    """Write the result and return it. An earlier result's values of other cells and seeds stay in it.

    ``missing`` holds the data sets that are not at hand, ``faults`` the errors of cells. ``minutes`` is the wall-clock
    time of this command; the result has the sum over all commands.
    """
    item = output.plan.item
    earlier = read_result(output.out, output.plan.paper, output.plan.name, output.plan.scale)
    cells_before = (cell for quantity in earlier.get("quantities", {}).values() for cell in quantity["cells"])
    plan = output.plan.showing({(cell["row"], cell["column"]) for cell in cells_before if cell["ours"]})
    output = OutputPaths(output.out, plan)
    kept = kept_values(plan, earlier)
    values = {key: kept.get(key, {}) | new.get(key, {}) for key in {**kept, **new}}
    cells = {(row, column) for (_, row, column), by_seed in values.items() if by_seed}
    seeds = sorted({seed for by_seed in values.values() for seed in by_seed})
    result: dict[str, Any] = {
        "item": plan.id,
        "title": item.title,
        "scale": plan.scale,
        "command": command(plan.extended(cells, seeds), Path("reproductions")),
        "minutes": round(earlier.get("minutes", 0.0) + minutes, 2),
        "smaller": plan.smaller(),
        "other_data": sorted({" for ".join(cell.other_data) for cell in plan.cells if cell.other_data}),
        "absent": sorted(missing),
        "faults": dict(faults),
        "stopped": stopped,
        "note": item.note,
        "seeds": seeds,
        "facts": _facts(output, values, earlier.get("facts", {})),
        "rows": {cell.row: item.rows[cell.row].label or cell.row for cell in plan.cells},
        "columns": {cell.column: item.all_columns[cell.column].label or cell.column for cell in plan.cells},
        "quantities": {name: _quantity(plan, name, values) for name in item.quantities},
        "curves": _curves(output, values, earlier.get("curves", ())),
    }
    result["claims"] = judged_claims(plan, values)
    output.folder.mkdir(parents=True, exist_ok=True)
    write_json(output.folder / RESULT, result)
    return result


def kept_values(plan: ItemPlan, earlier: Mapping[str, Any]) -> Values:
    """The values of an earlier result that were made by the plan's experiments and measures."""
    cells = {(cell.row, cell.column): cell for cell in plan.cells}
    kept: Values = {}
    for name, quantity in earlier.get("quantities", {}).items():
        for entry in quantity["cells"]:
            key = (entry["row"], entry["column"])
            if (name, *key) in plan.measures and entry["made_by"] == plan.provenance(name, cells[key]):
                ours = {int(seed): value for seed, value in entry["ours"].items() if value is not None}
                kept[name, *key] = {
                    seed: math.inf if value in ("never", "∞") else value for seed, value in ours.items()
                }
    return kept


def _facts(output: OutputPaths, values: Values, earlier: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, and data with checksums, from the runs behind the values.

    An earlier result's facts stay, since its runs may lie on another machine; not those of data that no cell has now.
    """
    measured = {(row, column, seed) for (_, row, column), by_seed in values.items() for seed in by_seed}
    trained = [cell for cell in output.plan.cells if output.plan.trains(cell)]
    paths = {(cell.row, cell.column, seed): path for cell in trained for seed, path in output.all_runs(cell).items()}
    facts: dict[str, Any] = dict(earlier)
    for path in sorted({paths[key] for key in measured & paths.keys()}):
        one = RunDirectory(path).facts()
        data = {key: value for key, value in one["data"].items() if key in ("train", "test", "files", "notes")}
        facts = {"versions": one["versions"], "data": facts.get("data", {}) | {one["data"]["name"]: data}}
    named = {cell.experiment.data.name for cell in output.plan.cells}
    kept = {name: data for name, data in facts.get("data", {}).items() if name in named}
    return facts | ({"data": kept} if kept else {})


def _curves(output: OutputPaths, values: Values, earlier: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Test accuracy by evaluated round, and seconds of computing, of the runs behind the values.

    An earlier result's curves stay where the same experiment has values, since its runs may lie on another machine.
    """
    measured = {(row, column, seed) for (_, row, column), by_seed in values.items() for seed in by_seed}
    cells = {(cell.row, cell.column): cell for cell in output.plan.cells if output.plan.trains(cell)}
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for curve in earlier:
        cell = cells.get((curve["row"], curve["column"]))
        if cell and curve["experiment"] == cell.fingerprint:
            found[cell.row, cell.column, curve["seed"]] = dict(curve)
    for cell in cells.values():
        for seed, path in output.all_runs(cell).items():
            outcome = read(RunDirectory(path))
            points = [(r.round, round(r.accuracy, 5)) for r in outcome.evaluated if r.accuracy is not None]
            if points:
                found[cell.row, cell.column, seed] = {
                    "row": cell.row,
                    "column": cell.column,
                    "experiment": cell.fingerprint,
                    "seed": seed,
                    "rounds": [one for one, _ in points],
                    "accuracy": [one for _, one in points],
                    "seconds": round(sum(costs(record)["seconds"] for record in outcome.records), 1),
                }
    order = list(cells)
    kept = sorted(measured & found.keys(), key=lambda key: (order.index(key[:2]), key[2]))
    return [found[key] for key in kept]


def _quantity(plan: ItemPlan, name: str, values: Values) -> dict[str, Any]:
    """A quantity's cells: our values by seed, and the paper's number. Those beyond the scale's own have a value."""
    quantity, columns = plan.item.quantities[name], list(plan.item.all_columns)
    cells, usual = [], plan.usual
    for cell in plan.cells:
        key = (name, cell.row, cell.column)
        if key not in plan.measures or not (key[1:] in usual or values.get(key)):
            continue
        index = columns.index(cell.column)
        numbers = [kind.get(cell.row, (math.nan,) * len(columns))[index] for kind in (quantity.paper, quantity.spread)]
        ours, infinite = sorted(values.get(key, {}).items()), plan.measures[key].infinite
        cells.append(
            {
                "row": cell.row,
                "column": cell.column,
                "made_by": plan.provenance(name, cell),
                "ours": {str(seed): as_json(value, infinite) for seed, value in ours},
                "paper": as_json(numbers[0]),
                "paper_std": as_json(numbers[1]),
            }
        )
    told = {name: getattr(quantity, name) for name in ("label", "unit", "digits")}
    return {**told, **({"exact": True} if quantity.exact else {}), "cells": cells}


def as_json(value: Any, infinite: str = "never") -> Any:
    """A number for JSON: a word for infinity, ``None`` for NaN, else rounded to six digits."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else infinite
    return round(value, 6) if isinstance(value, float) else value


def judged_claims(plan: ItemPlan, values: Values) -> list[dict[str, Any]]:
    """The item's claims with their verdicts on some values."""
    return [_claim(plan, claim, values) for claim in plan.item.claims]


def _claim(plan: ItemPlan, claim: Claim, values: Values) -> dict[str, Any]:
    item = plan.item
    quantity = claim.of or next(iter(item.quantities))
    comparison = claims.parse_claim(claim.holds, list(item.rows), list(item.all_columns))
    seeds = {seed for (name, _, _), by_seed in values.items() if name == quantity for seed in by_seed}
    texts = {key for key, v in values.items() if not v or any(isinstance(value, str) for value in v.values())}
    numbers = {key[1:]: v for key, v in values.items() if key[0] == quantity and key not in texts}
    by_seed = {seed: {cell: v[seed] for cell, v in numbers.items() if seed in v} for seed in seeds}
    means = {cell: math.fsum(v.values()) / len(v) for cell, v in numbers.items()}
    expected = {key[1:] for key in plan.measures if key[0] == quantity and key[1:] in plan.usual}
    paper = paper_numbers(item, quantity)
    verdict = claims.judge_claim(comparison, means, by_seed, claim.where, expected, paper)
    unlike = contradicted_data(plan.paper) if plan.scale == "laptop" else ()
    cells = [
        cell for cell in plan.cells if cell.experiment.data.name in unlike and comparison.names(cell.row, cell.column)
    ]
    apart = [line for line in verdict.lines if any(line in ("", cell.row, cell.column) for cell in cells)]
    lines = {line: check.margin for line, check in verdict.lines.items() if line not in apart}
    kept = list(lines)
    if claim.up_to:
        # A result that lacks a column may lack the best one.
        every = set(claim.where or (item.all_columns if comparison.axis == "column" else item.rows))
        decided = [line for line, margin in lines.items() if not math.isnan(margin)]
        kept = [] if every - lines.keys() else [max(decided, key=lines.__getitem__)] if decided else kept
    if not kept:
        verdict = claims.Verdict({}, (0, 0))
    elif kept != list(verdict.lines):
        verdict = claims.judge_claim(comparison, means, by_seed, kept, expected, paper)
    of_paper = claims.judge_claim(comparison, paper, {}, claim.where, paper=paper)
    return {
        "says": claim.says,
        **({"choice": claim.choice, "source": claim.source} if claim.choice else {}),
        "holds": claim.holds,
        **({"up_to": True} if claim.up_to else {}),
        "of": quantity,
        "verdict": NOT_COMPARABLE if apart and not kept else verdict.word,
        **({"not_comparable": apart} if apart else {}),
        "places": {line or "all": [check.holds, as_json(check.margin)] for line, check in verdict.lines.items()},
        "seeds": list(verdict.seeds),
        "paper": of_paper.word,
    }


@functools.cache
def contradicted_data(paper: str) -> frozenset[str]:
    """The data sets on which the paper's upper bound holds at one scale and does not hold at the other.

    The paper's file states the bound as a claim, such as ``global > fedavg``: mixed raw data are better than none. A
    smaller run in which it is the other way round cannot judge what approximates the bound. The intervals of both
    scales must leave out zero; they are those of the committed results of items that have both.
    """
    bound, found = all_papers()[paper].upper_bound, set()
    for name in all_papers()[paper].items if bound else ():
        full, small = read_committed_result(paper, name, "paper"), read_committed_result(paper, name, "laptop")
        for column in full.get("columns", {}).keys() & small.get("columns", {}).keys():
            words = {judge_numbers(one, bound, "accuracy", [column]).word for one in (full, small)}
            if words == {HOLDS, FAILS}:
                cells = plan_item(f"{paper}/{name}", "laptop").cells
                found |= {cell.experiment.data.name for cell in cells if cell.column == column}
    return frozenset(found)


def paper_numbers(item: Item, quantity: str) -> claims.Cells:
    """The paper's numbers of a quantity, by (row, column)."""
    return {
        (row, column): number
        for row, numbers in item.quantities[quantity].paper.items()
        for column, number in zip(item.all_columns, numbers, strict=True)
        if not math.isnan(number)
    }


def read_result(out: Path, paper: str, name: str, scale: str) -> dict[str, Any]:
    """The written result of an item at a scale; empty if there is none."""
    return read_json(out / paper / name / scale / RESULT)


def read_committed_result(paper: str, name: str, scale: str) -> dict[str, Any]:
    """The result of an item at a scale that fedblend's checkout holds; empty if there is none."""
    return read_json(COMMITTED / paper / f"{name}-{scale}.json")


def command(plan: ItemPlan, out: Path) -> str:
    """The command that makes the planned result, or resumes it."""
    words = ["fedblend", "reproduce", plan.id]
    words += ["--scale", plan.scale] if plan.scale != "paper" else []
    words += ["--seeds", ",".join(map(str, plan.seeds))] if plan.seeds != plan.item.seeds else []
    words += [word for name in plan.only for word in ("--only", name)]
    words += ["--out", str(out)] if str(out) != "reproductions" else []
    return shlex.join(words)
