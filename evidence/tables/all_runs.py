"""The page of all runs: every committed number with its curve, settings and command, in one HTML file to filter."""

from __future__ import annotations

import json
import re
import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.papers.plan import plan_item
from fedblend.runs.groups import flatten
from tables.common import RESULTS, ROOT, Row, by_method, last_accuracy
from tables.items import PAPER_NAMES, item_results, scale_of

TEMPLATE = Path(__file__).with_name("all_runs.html")

POINTS = 60
"""The most points of a curve on the page, about; longer curves are thinned, and keep their first and last point."""

NO_PAPER = "studies of our own"
STUDIED = {
    "alignment": "fedmix",
    "augmix-attack": "fed-augmix",
    "augmix-mnist": "fed-augmix",
    "fashion-mnist": "fedmix",
    "femnist": "fedmix",
    "femnist-checked": "fedmix",
    "femnist-momentum": "fedmix",
    "femnist-settings": "fedmix",
    "femnist-second": "fedmix",
    "invgrad": "fed-augmix",
    "robustness": "aggenhance",
    "shakespeare": "fedmix",
    "warm-start": "xormixfl",
}
"""The papers of studies whose names do not begin with the paper's."""

ROW_NAMES = ("lam",)
"""Numbers with a point that name a row; others are measured."""

RUN_QUANTITIES = (
    ("Test accuracy after the last round", "%", 2),
    ("Test accuracy, mean of the last ten evaluations", "%", 2),
    ("Loss after the last round", "", 4),
    ("Uplink, all rounds", "MB", 1),
    ("Downlink, all rounds", "MB", 1),
    ("Computing", "s", 1),
)
"""What is shown of a study's run: name, unit and decimals."""


def page() -> str:
    """The page's HTML with its data, in which no character can end the script that holds them."""
    sources = [*map(_item_source, item_results()), *map(_study_source, sorted((RESULTS / "studies").glob("*.json")))]
    first: dict[tuple[str, str], int] = {}
    for place, source in enumerate(sources):
        # Many have one file, versions or quantities: these stand in the first of them, and its place in the others.
        for key in ("versions", "quantities"):
            if (at := first.setdefault((key, repr(source[key])), place)) != place:
                source[key] = at
        places = {title: first.setdefault((title, text), place) for title, text in source["settings"].items()}
        source["settings"] = {t: text if places[t] == place else places[t] for t, text in source["settings"].items()}
        source["common"] = _taken_out(source["records"])
    lines = ",\n".join(json.dumps(one, separators=(",", ":"), sort_keys=True, allow_nan=False) for one in sources)
    data = f"[\n{lines}\n]".replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return TEMPLATE.read_text(encoding="utf-8").replace("@DATA@", data)


def _taken_out(records: Sequence[Row]) -> Row:
    """The data set, column and method that all records of a source share; taken out of these."""
    common = {}
    for key in ("data", "replaced", "column", "method"):
        if records and all(key in one and one[key] == records[0][key] for one in records):
            common[key] = records[0][key]
            for one in records:
                del one[key]
    return common


# Items --------------------------------------------------------------------------------------------------------


def _item_source(result: Row) -> Row:
    """An item's result at a scale: what all of its cells share, and a record for each cell with a number."""
    paper, _, name = result["item"].partition("/")
    plan = plan_item(result["item"], "paper", only=[key for key in (*result["rows"], *result["columns"]) if key])
    papers = {(cell.row, cell.column): _not_usual(cell.original) for cell in plan.cells}
    first = next(iter(papers.values()))
    shared = {key: value for key, value in first.items() if all(one.get(key) == value for one in papers.values())}
    quantities = list(result["quantities"].values())
    lines: dict[str, int] = {}
    evaluated: list[list[int]] = []
    curves: dict[tuple[str, str], list[list[Any]]] = defaultdict(list)
    for curve in result.get("curves", ()):
        curves[curve["row"], curve["column"]].append(_curve(curve, evaluated))
    cells: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for index, quantity in enumerate(quantities):
        for cell in quantity["cells"]:
            if cell["ours"]:
                number = _number(index, cell["ours"], cell["paper"], cell["paper_std"])
                cells[cell["row"], cell["column"]].append(number)
    records = [
        {
            "method": result["rows"][row],
            "column": result["columns"][column],
            **_data_of_cell(papers[row, column]["data.name"], result),
            # Cells share most of their lines; a record has their places in the list.
            "settings": [
                lines.setdefault(line, len(lines))
                for line in _plain({k: v for k, v in papers[row, column].items() if k not in shared}).splitlines()
            ],
            "numbers": numbers,
        }
        | _shown(curves[row, column])
        for (row, column), numbers in cells.items()
    ]
    return {
        "id": result["item"],
        "paper": PAPER_NAMES[paper],
        "title": result["title"],
        "scale": scale_of(result),
        "file": f"evidence/results/{paper}/{name}-{result['scale']}.json",
        "command": result["command"],
        "versions": _versions(result, result["facts"]),
        "notes": _notes(result),
        "settings": {"The paper's settings, for all cells": _plain(shared)},
        "quantities": [[one["label"], one["unit"], one["digits"]] for one in quantities],
        "lines": list(lines),
        "rounds": evaluated,
        "records": records,
    }


def _not_usual(experiment: Experiment) -> dict[str, Any]:
    """The fields of an experiment, by dotted path, that differ from those of the shortest one, and its data set."""
    usual = flatten(as_table(resolve({"data": "digits", "partition": "iid"})))
    fields = flatten(as_table(experiment))
    left_out = ("name", "seed", "engine", "method.label", "method.name")
    return {k: v for k, v in fields.items() if k == "data.name" or (v != usual.get(k) and k not in left_out)}


def _data_of_cell(own: str, result: Row) -> Row:
    """The data set of a cell: the paper's where the result has it, what replaced it, or all of the result."""
    replaced = dict(reversed(text.split(" for ")) for text in result["other_data"])
    names = sorted(result["facts"].get("data", {}))
    if own in replaced:
        return {"data": [replaced[own]], "replaced": own}
    return {"data": [own] if own in names or not names else names}


def _notes(result: Row) -> list[str]:
    """What a result says of its settings: corrections, other data, what is smaller, and the item's note."""
    notes = [f"Made with settings that were corrected since: {result['outdated']}."] if "outdated" in result else []
    notes += [f"On other data: {', '.join(result['other_data'])}."] if result["other_data"] else []
    notes += [f"Smaller than the paper's: {'; '.join(result['smaller'])}."] if result["smaller"] else []
    return notes + ([result["note"]] if result["note"] else [])


# Studies ------------------------------------------------------------------------------------------------------


def _study_source(path: Path) -> Row:
    """A study's result: a record for each method with its runs, or for each row where nothing but rows is measured."""
    name, result = path.stem, json.loads(path.read_text(encoding="utf-8"))
    words = re.findall(r"[\w./-]+\.toml", result["command"])
    files = [file for file in map(ROOT.joinpath, words) if file.is_file()]
    settings = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8").strip() for file in files}
    experiment = {key: result[key] for key in ("experiment", "attack", "protections") if key in result}
    data = _study_data(result, [tomllib.loads(text) for text in settings.values()])
    paper = STUDIED.get(name) or next((paper for paper in PAPER_NAMES if name.startswith(paper)), "")
    quantities, rows = _row_records(result)
    evaluated: list[list[int]] = []
    runs = _run_records(result, evaluated)
    return {
        "id": f"study {name}",
        "paper": PAPER_NAMES.get(paper, NO_PAPER),
        "title": f"Study {name}",
        "scale": "study",
        "file": f"evidence/results/studies/{path.name}",
        "command": result["command"],
        "versions": _versions(result, result),
        "notes": [],
        "settings": settings | ({"Settings": _plain(flatten(experiment))} if experiment else {}),
        "quantities": [*map(list, RUN_QUANTITIES), *quantities],
        "rounds": evaluated,
        "records": [record | {"data": record.get("data") or data} for record in [*runs, *rows]],
    }


def _study_data(result: Row, files: Sequence[Row]) -> list[str]:
    """The data sets of a study: of its facts, or of its file or settings."""
    places = [result.get("data"), result.get("experiment", {}).get("data"), *(file.get("data") for file in files)]
    names = [place if isinstance(place, str) else place["name"] for place in places if place]
    # Studies of attacks on MNIST name no data set in their settings.
    return names[:1] or (["mnist"] if "augmix" in result["command"] else [])


def _run_records(result: Row, evaluated: list[list[int]]) -> list[Row]:
    """A record for each method of a study: its numbers by seed, and a curve for each seed."""
    failed = by_method(result.get("failed", ()))
    runs = by_method(result.get("runs", ()))
    records = []
    for method in dict.fromkeys((*runs, *failed)):
        numbers: list[dict[str, float]] = [{} for _ in RUN_QUANTITIES]
        curves = []
        for run in runs.get(method, ()):
            for by_seed, value in zip(numbers, _run_numbers(run), strict=True):
                if value is not None:
                    by_seed[str(run["seed"])] = value
            curves.append(_curve(run, evaluated))
        record: Row = {"method": method, "column": ""}
        record["numbers"] = [_number(k, by_seed) for k, by_seed in enumerate(numbers) if by_seed]
        record |= _shown(curves)
        if method in failed:
            record["failed"] = [[one["seed"], one["failed"], one["reason"]] for one in failed[method]]
        records.append(record)
    return records


def _run_numbers(run: Row) -> list[float | None]:
    """The numbers of :data:`RUN_QUANTITIES`; ``None`` for one that a run has not."""
    costs = run["costs"]
    return [
        round(100 * run["accuracy"][-1], 3) if run["accuracy"] else None,
        round(last_accuracy(run), 3) if len(run["accuracy"]) > 10 else None,
        run["loss"][-1] if run["loss"] else None,
        round(costs["bytes_up"] / 1e6, 2),
        round(costs["bytes_down"] / 1e6, 2),
        costs["seconds"],
    ]


def _curve(run: Row, evaluated: list[list[int]]) -> list[Any]:
    """A run's curve: its seed, the place of its rounds in ``evaluated``, and accuracies in per cent.

    Most curves have the same rounds; new ones are added to ``evaluated``.
    """
    rounds, values = _thinned(run["rounds"], [round(100 * one, 2) for one in run["accuracy"]])
    evaluated += [rounds] if rounds not in evaluated else []
    return [str(run["seed"]), evaluated.index(rounds), values]


def _shown(curves: list[list[Any]]) -> Row:
    """A record's curves, unless they have two points at most: these show no more than the numbers."""
    return {"curves": curves} if any(len(curve[2]) > 2 for curve in curves) else {}


def _thinned(rounds: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """A curve with at most about :data:`POINTS` points, the first and last among them."""
    step = -(-len(rounds) // POINTS)
    kept = [k for k in range(len(rounds)) if (len(rounds) - 1 - k) % step == 0]
    kept = kept if kept[0] == 0 else [0, *kept]
    return [rounds[k] for k in kept], [values[k] for k in kept]


def _row_records(result: Row) -> tuple[list[list[Any]], list[Row]]:
    """The names of what is measured in rows beside or without runs, and a record for each row."""
    names: list[str] = []
    records = []
    for row in _rows(result):
        said, numbers = [], []
        for key, value in row.items():
            if isinstance(value, float) and key not in ROW_NAMES and not key.endswith("_error"):
                measured = (value, row.get(f"{key}_error"))
            elif isinstance(value, list) and len(value) == 2 and key not in ("clients", "curve"):
                measured = (value[0], value[1])
            else:
                said += [f"{key} {value}"] if isinstance(value, (str, int)) and key not in ("method", "data") else []
                continue
            names += [key] if key not in names else []
            numbers.append(_number(len(RUN_QUANTITIES) + names.index(key), {"": measured[0]}, None, None, measured[1]))
        record: Row = {"method": row.get("method", ""), "column": ", ".join(said), "numbers": numbers}
        records.append(record | ({"data": [row["data"]]} if "data" in row else {}))
    return [[name.replace("_", " "), "", 4] for name in names], records


def _rows(result: Row) -> list[Row]:
    """The rows of a study that measures rows; nested ones have the keys above them as fields."""
    rows = list(result.get("rows", ()))
    rows += [{"data": one["data"], **row} for one in result.get("sets", ()) for row in one["rows"]]
    for number, places in result.get("rounds", {}).items():
        for place, losses in places.items():
            rows += [{"method": loss, "round": number, "where": place, **row} for loss, row in losses.items()]
    return rows


def _number(quantity: int, ours: Mapping[str, Any], *more: float | None) -> list[Any]:
    """A number of a record: its quantity's place, ours by seed, and (if any) the paper's, its deviation and ours.

    Ours are a list if the seeds are 0, 1 and so on: a page of thousands of numbers is a tenth shorter then.
    """
    while more and more[-1] is None:
        more = more[:-1]
    short = {
        seed: int(value) if isinstance(value, float) and value.is_integer() else value for seed, value in ours.items()
    }
    counted = list(short) == [str(k) for k in range(len(short))]
    return [quantity, list(short.values()) if counted else short, *more]


def _versions(result: Row, facts: Mapping[str, Any]) -> str:
    """The versions that made a result, and the commit of the last of its numbers."""
    named = {**facts.get("versions", {}), **({"commit": result["commit"]} if "commit" in result else {})}
    return ", ".join(f"{name} {version}" for name, version in named.items())


def _plain(fields: Mapping[str, Any]) -> str:
    """Fields by dotted path, one a line."""
    return "\n".join(f"{key} = {json.dumps(value, default=str)}" for key, value in fields.items())
