"""Experiment files: tables with values at the edges of their fields, and changed lines and bytes."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from random import Random
from typing import Any

import mutations
import tomli_w

from surfaces.base import TINY, Case, command, tiny

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


@functools.cache
def _fields() -> list[tuple[str, str | None, str | None, str]]:
    """Every field of an experiment and of every part, as (path of its table, name of a part, field, type)."""
    from fedblend.core.registry import MODULES
    from fedblend.experiment.options import kind_entries, table_entries

    found: list[Any] = []
    for entry in [*table_entries(), *(entry for kind in MODULES for entry in kind_entries(kind))]:
        part = None if entry.kind == "table" else entry.name
        found += [(entry.where, part, option.name, option.type) for option in entry.options]
        if entry.kind != "table":
            found.append((entry.where, entry.name, None, ""))
    return found


def _some_experiment(rng: Random, folder: Path) -> dict[str, Any]:
    """The tiny experiment with one of the named methods, partitions, or other parts."""
    from fedblend.experiment.presets import presets

    table = tiny(folder)
    table["method"] = {"name": rng.choice(list(presets()))}
    if rng.random() < 0.2:
        table["methods"] = ["fedavg", {"name": "fedmix", "objective": {"lambda": 0.2}}]
        del table["method"]
    if rng.random() < 0.2:
        table |= {"grid": {"train.lr": [0.1, 0.2]}, "seeds": [0, 1]}
    return table


def experiment_tables(rng: Random, folder: Path, real: Path) -> Case:
    """A tiny experiment, of which a field, or an entry, has a value at the edge of what it takes."""
    table = _some_experiment(rng, folder)
    for _ in range(rng.choice((1, 1, 1, 2))):
        where, part, option, kind = rng.choice(_fields())
        if where == "data" and rng.random() < 0.8:
            continue
        inside = table
        if where.startswith("method"):
            table.pop("methods", None)
        for step in where.split(".") if where else []:
            if not isinstance(inside.get(step), dict):
                inside[step] = {}
            inside = inside[step]
        if part is not None:
            inside.clear()
            inside["name"] = part
        if option is not None:
            inside[option] = mutations.fitting(rng, kind)
        if where in ("method.terms", "callbacks"):
            outer = table["method"] if where == "method.terms" and isinstance(table.get("method"), dict) else table
            outer[where.split(".")[-1]] = [inside]
    table = mutations.plain(mutations.of_table(rng, table) if rng.random() < 0.2 else table, toml=True)
    try:
        text = tomli_w.dumps(table if isinstance(table, dict) else {"x": table})
    except (TypeError, ValueError, RecursionError):
        text = mutations.of_lines(rng, tomli_w.dumps(tiny(folder)))
    return _read(rng, folder, text.encode("utf-8", "surrogatepass"))


def experiment_text(rng: Random, folder: Path, real: Path) -> Case:
    """A real experiment file with changed lines or bytes."""
    table = _some_experiment(rng, folder)
    if rng.random() < 0.3:
        example = tomllib.loads(rng.choice(sorted(EXAMPLES.glob("*.toml"))).read_text())
        table = {**example, **{key: TINY[key] for key in ("data", "model", "engine", "ranks", "rounds")}}
        table["train"] = {**table.get("train", {}), "epochs": 1, "steps": 2}
    text = tomli_w.dumps(table)
    if rng.random() < 0.8:
        return _read(rng, folder, mutations.of_lines(rng, text).encode("utf-8", "surrogatepass"))
    return _read(rng, folder, mutations.of_bytes(rng, text.encode()))


def _read(rng: Random, folder: Path, text: bytes) -> Case:
    """A command that reads an experiment file, which is mostly to run it."""
    (folder / "experiment.toml").write_bytes(text)
    words = "run experiment.toml --jobs 1"
    if rng.random() < 0.1:
        words = rng.choice(("data show experiment.toml", "channel experiment.toml"))
    if rng.random() < 0.04:
        app = "federation app experiment.toml --out app --folder run"
        samples = "privacy samples experiment.toml --samples 4 --repeats 1"
        words = rng.choice((app, samples, "privacy xor experiment.toml"))
    return command(folder, *words.split(), report=rng.random() < 0.1)
