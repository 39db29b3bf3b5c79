"""An item at a scale: the experiment of every cell, and in what it is smaller than the paper's."""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedblend.core import registry
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.study import slugify
from fedblend.experiment.tables import set_field
from fedblend.papers.items import Base, Change, Item, Line, Scale, Smaller, all_papers, find
from fedblend.runs.groups import flatten

NOT_RUN = ("engine", "stack", "ranks", "memory_format", "device", "checkpoint_every", "name", "seed")
"""Fields that make no other run of one: those that may change when a run goes on, and what it is called."""

UNTRAINED = ("data", "partition", "fraction", "holdout", "method.sharing")
"""What matters of an experiment where nothing is trained."""

SLUG = 40
"""Letters of a run's folder before its fingerprint."""


@dataclass(frozen=True)
class Cell:
    """One cell: its row and column, the experiment of its first seed, and the paper's own where that is another."""

    row: str
    column: str
    experiment: Experiment
    original: Experiment

    def seeded(self, seed: int, device: str | None = None) -> Experiment:
        """The cell's experiment with a seed, on a device."""
        changes: dict[str, Any] = {"seed": seed} | ({"device": device} if device else {})
        return self.experiment.model_copy(update=changes)

    @property
    def fingerprint(self) -> str:
        """What cells of one experiment have in common, whatever they are called: eight hexadecimal digits."""
        return fingerprint(self.experiment)

    def slug(self, seed: int) -> str:
        """The name of its run's folder."""
        return f"{slugify(f'{self.row} {self.column}')[:SLUG]}-{self.fingerprint}-seed{seed}"

    @property
    def other_data(self) -> tuple[str, str] | None:
        """The data set's name and that of the paper's, where it is not that."""
        names = (self.experiment.data.name, self.original.data.name)
        return None if names[0] == names[1] else names


@dataclass(frozen=True)
class ItemPlan:
    """An item at a scale."""

    paper: str
    name: str
    item: Item
    scale: Scale
    seeds: tuple[int, ...]
    cells: list[Cell]
    """All cells that the table shows."""
    asked: list[Cell]
    """Those that are to be run."""
    measures: dict[tuple[str, str, str], Any]
    """What measures a quantity of a cell at this scale, by (quantity, row, column)."""
    originals: dict[tuple[str, str, str], Any]
    """The same at the paper's scale."""
    only: tuple[str, ...] = ()
    """The rows and columns that were asked for by name."""

    def mark(self, quantity: str, cell: Cell) -> str:
        """What a kept number must have been made by to be one of this cell: its experiment and its measure."""
        measure = registry.dump(self.measures[quantity, cell.row, cell.column])
        text = json.dumps([cell.fingerprint, measure], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def trains(self, cell: Cell) -> bool:
        """Whether any quantity of a cell needs its run."""
        return any(made.trains for place, made in self.measures.items() if place[1:] == (cell.row, cell.column))

    @property
    def id(self) -> str:
        """``fedmix/table-1``."""
        return f"{self.paper}/{self.name}"

    def with_others(self, made: Collection[tuple[str, str]], seeds: Collection[int]) -> ItemPlan:
        """The plan that asks for what other plans have ``made`` too, cells (row, column) with some seeds.

        It names rows and columns only where it asks for others than the scale's own.
        """
        usual = plan(self.id, self.scale).asked
        asked = {(cell.row, cell.column) for cell in self.asked} | set(made)
        only: list[str] = []
        for axis in (0, 1):
            lines = list(dict.fromkeys((cell.row, cell.column)[axis] for cell in self.cells))
            there = [key for key in lines if any(place[axis] == key for place in asked)]
            if set(there) != {(cell.row, cell.column)[axis] for cell in usual}:
                only += there
        return replace(self, only=tuple(only), seeds=tuple(sorted({*self.seeds, *seeds})))

    def smaller(self) -> list[str]:
        """In what it is smaller than the paper's, a line a field: ``rounds: 40, not 500``."""
        changed: dict[str, list[tuple[str, str]]] = {}
        for cell in self.cells:
            for field, pair in _changes(cell.original, cell.experiment).items():
                if pair not in changed.get(field, []) and (self.trains(cell) or field.startswith(UNTRAINED)):
                    changed.setdefault(field, []).append(pair)
        for place, measure in self.measures.items():
            before = registry.dump(self.originals[place])
            for field, value in registry.dump(measure).items():
                if value != before.get(field) and (f"{value}", f"{before.get(field)}") not in changed.get(field, []):
                    changed.setdefault(field, []).append((f"{value}", f"{before.get(field)}"))
        lines = [f"{field}: {_joined(pairs, 0)}, not {_joined(pairs, 1)}" for field, pairs in changed.items()]
        kept = {(cell.row, cell.column) for cell in self.cells}
        for what, there, axis in (("rows", self.item.rows, 0), ("columns", self.item.all_columns, 1)):
            here = [key for key in there if any(cell[axis] == key for cell in kept)]
            if len(here) < len(there):
                lines.append(f"{what}: {', '.join(here)} of {len(there)}")
        return lines


def _joined(pairs: Sequence[tuple[str, str]], side: int) -> str:
    return " / ".join(dict.fromkeys(pair[side] for pair in pairs))


def _changes(original: Experiment, smaller: Experiment) -> dict[str, tuple[str, str]]:
    """Fields in which two experiments differ, as text; of a part that is another one, only its name."""
    old, new = as_table(original), as_table(smaller)
    found: dict[str, tuple[str, str]] = {}
    swapped = []
    flat_old, flat_new = flatten(old), flatten(new)
    for field in dict.fromkeys([*flat_new, *flat_old]):
        if field.endswith(".name") and flat_old.get(field) != flat_new.get(field):
            swapped.append(field.removesuffix("name"))
            own = [f"{k.removeprefix(swapped[-1])} {v}" for k, v in flat_new.items() if k.startswith(swapped[-1])]
            options = ", ".join(word for word in own if not word.startswith("name "))
            told = f"{flat_new.get(field)} ({options})" if options else str(flat_new.get(field))
            found[field.removesuffix(".name")] = (told, str(flat_old.get(field)))
    for field in dict.fromkeys([*flat_new, *flat_old]):
        if field.split(".")[0] in NOT_RUN or any(field.startswith(part) for part in swapped):
            continue
        if flat_old.get(field) != flat_new.get(field):
            pair = (flat_new.get(field, "all"), flat_old.get(field, "all"))
            found[field] = (str(pair[0]), str(pair[1]))
    return found


def fingerprint(experiment: Experiment) -> str:
    """Eight hexadecimal digits of all that decides a run but its seed."""
    table = {key: value for key, value in as_table(experiment).items() if key not in NOT_RUN}
    table["method"] = {key: value for key, value in table["method"].items() if key not in ("label", "name")}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:8]


def plan(name: str, scale: Scale = "paper", seeds: Sequence[int] | None = None, only: Sequence[str] = ()) -> ItemPlan:
    """An item at a scale; ``only`` names rows and columns that are kept, by their keys or labels.

    Raises :class:`FedblendError` for an unknown item, row or column, for one that fedblend cannot run, and for settings
    that do not fit.
    """
    paper, key = find(name)
    bases, item = all_papers()[paper].bases, all_papers()[paper].items[key]
    if item.missing:
        raise FedblendError(f"reproduce: {paper}/{key} cannot be run yet: {item.missing}")
    smaller = item.laptop if scale == "laptop" else item.smoke if scale == "smoke" else Smaller()
    only = [_key_of(word, item) for word in only]
    rows, asked_rows = _kept(item.rows, smaller.rows, only)
    columns, asked_columns = _kept(item.all_columns, smaller.columns, only)
    cells = []
    for row, column in itertools.product(rows, columns):
        try:
            cells.append(_cell(paper, bases, item, (row, column), scale, smaller))
        except FedblendError as error:
            raise FedblendError(f"{paper}/{key}, {row} {column}: {error}") from None
    originals, measures = {}, {}
    for place, spec, own in _measured(item, cells):
        originals[place] = _with(registry.build("measure", spec, f"{key}.{place[0]}"), own)
        measures[place] = _with(originals[place], smaller.measure)
    chosen = tuple(seeds) if seeds is not None else smaller.seeds or item.seeds
    asked = [cell for cell in cells if cell.row in asked_rows and cell.column in asked_columns]
    return ItemPlan(paper, key, item, scale, chosen, cells, asked, measures, originals, tuple(only))


def _key_of(word: str, item: Item) -> str:
    """The row or column that is meant by a key or, in capitals or not, by the label that tables show."""
    lines = {**item.rows, **item.all_columns}
    if word in lines and word:
        return word
    labels = {line.label.lower(): key for key, line in lines.items() if line.label}
    if word.lower() in labels:
        return labels[word.lower()]
    known = [key for key in lines if key]
    raise FedblendError(f"--only {word}: no such row or column{did_you_mean(word, known)}; valid: {'; '.join(known)}")


def _kept(
    lines: Mapping[str, Line], smaller: Sequence[str] | None, only: Sequence[str]
) -> tuple[list[str], Collection[str]]:
    """The rows (or columns) that a table shows, a scale's and those asked for, and which of them are to be run."""
    usual = lines if smaller is None else smaller
    asked = [key for key in lines if key in only]
    return [key for key in lines if key in usual or key in asked], asked or usual


def _measured(item: Item, cells: Sequence[Cell]) -> Iterator[tuple[tuple[str, str, str], Any, dict[str, Any]]]:
    """Each quantity of each cell: its place, its measure as the file has it, and the options of column and row."""
    for name, quantity in item.quantities.items():
        for cell in cells:
            if quantity.rows is None or cell.row in quantity.rows:
                own = item.all_columns[cell.column].measure | item.rows[cell.row].measure
                yield (name, cell.row, cell.column), quantity.measure, own


def _with(made: Any, options: Mapping[str, Any]) -> Any:
    """A measure with those of the options that it has."""
    own = {key: value for key, value in options.items() if registry.has_option(made, key)}
    return registry.build("measure", {**registry.dump(made), **own}) if own else made


def _cell(
    paper: str, bases: Mapping[str, Base], item: Item, place: tuple[str, str], scale: Scale, smaller: Smaller
) -> Cell:
    row, column = item.rows[place[0]], item.all_columns[place[1]]
    name = row.base or column.base or item.base or ""
    if name not in bases:
        raise FedblendError(f"base: no base '{name}'{did_you_mean(name, bases)}; valid: {', '.join(bases)}")
    base = bases[name]
    table = copy.deepcopy(base.experiment) | {"name": paper}
    method = next((m for m in (row.method, column.method, item.method) if m is not None), None)
    if method is not None:
        known = base.methods.get(method, method) if isinstance(method, str) else method
        table["method"] = copy.deepcopy({"name": known} if isinstance(known, str) else dict(known))
    for change in (item.set, column.set, row.set):
        for path, value in change.items():
            set_field(table, path, copy.deepcopy(value))
    label = ", ".join(word for word in (row.label or place[0], column.label or place[1]) if word)
    set_field(table, "method.label", label)
    original = resolve(table)
    experiment = original
    if scale != "paper":
        experiment = _changed(experiment, base.laptop if scale == "laptop" else base.smoke)
        experiment = _changed(experiment, smaller)
    return Cell(*place, experiment, original)


def _changed(experiment: Experiment, change: Change) -> Experiment:
    """An experiment with what a scale changes."""
    table = as_table(experiment)
    flat = flatten(table)
    for path, factor in change.times.items():
        value = flat.get(path)
        if isinstance(value, int) and not isinstance(value, bool):
            # Nothing stays nothing: 0 rounds are an untrained model at every scale.
            set_field(table, path, max(1, math.floor(value * factor + 0.5)) if value else 0)
        elif isinstance(value, float):
            set_field(table, path, value * factor)
    for path, value in change.set.items():
        set_field(table, path, copy.deepcopy(value))
    return resolve(table)
