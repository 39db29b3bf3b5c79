"""An item's result as data: ours by cell and seed, the papers', verdicts; joined with what an earlier one told."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedblend.papers import claims
from fedblend.papers.paths import OutputPaths
from fedblend.papers.plan import ItemPlan
from fedblend.runs.directory import RunDirectory, read_json
from fedblend.runs.files import write_json

RESULT = "result.json"

Values = dict[tuple[str, str, str], dict[int, Any]]
"""Numbers (or paths of pictures) by (quantity, row, column), each by seed."""


def keep(
    place: OutputPaths, lacking: Mapping[str, str], faults: Mapping[str, str], new: Values, stopped: bool = False
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


def _joined(plan: ItemPlan, earlier: Mapping[str, Any], new: Values) -> Values:
    """New numbers over those of an earlier result that were made in the same way."""
    cells = {(cell.row, cell.column): cell for cell in plan.cells}
    made: Values = {}
    for name, quantity in earlier.get("quantities", {}).items():
        for kept in quantity["cells"]:
            where = (kept["row"], kept["column"])
            if (name, *where) in plan.measures and kept["made_by"] == plan.mark(name, cells[where]):
                made[name, *where] = {int(seed): exact(value) for seed, value in kept["ours"].items()}
    return {where: made.get(where, {}) | new.get(where, {}) for where in {**made, **new}}


def _facts(place: OutputPaths, made: Values, earlier: Mapping[str, Any]) -> dict[str, Any]:
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


def _quantity(plan: ItemPlan, name: str, made: Values) -> dict[str, Any]:
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


def _claim(plan: ItemPlan, claim: Any, made: Values) -> dict[str, Any]:
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


def command(plan: ItemPlan, out: Path) -> str:
    """The command that makes this (or goes on with it)."""
    words = ["fedblend", "reproduce", plan.id]
    words += ["--scale", plan.scale] if plan.scale != "paper" else []
    words += ["--seeds", ",".join(map(str, plan.seeds))] if plan.seeds != plan.item.seeds else []
    words += [word for name in plan.only for word in ("--only", name)]
    words += ["--out", str(out)] if str(out) != "reproductions" else []
    return shlex.join(words)
