"""An item at a scale: the experiment and measures of every cell, and how they differ from the paper's."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from fedblend.core import registry
from fedblend.core.errors import FedblendError, or_valid
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.parts import dump, has_option
from fedblend.experiment.study import slugify
from fedblend.experiment.toml_tables import set_field
from fedblend.papers.items import Base, Change, Item, Line, Scale, Smaller, all_papers, find_item
from fedblend.runs.groups import flatten

NOT_RUN = ("engine", "stack", "ranks", "memory_format", "device", "checkpoint_every", "name", "seed")
"""Fields that do not distinguish runs: those that may change when a run resumes, its name, and the seed."""

UNTRAINED = ("data", "partition", "fraction", "holdout", "validation", "method.sharing")
"""Fields that matter where nothing is trained."""

SLUG = 40  # Maximal length of a run's folder name before its fingerprint


@dataclass(frozen=True)
class Cell:
    """One cell of an item's table."""

    row: str
    column: str
    experiment: Experiment
    """The experiment at the plan's scale, without a seed of its own."""
    original: Experiment
    """The experiment at the paper's scale."""

    def seeded(self, seed: int, device: str | None = None) -> Experiment:
        """The cell's experiment with a seed, and on a device if one is given."""
        changes: dict[str, Any] = {"seed": seed} | ({"device": device} if device else {})
        return self.experiment.model_copy(update=changes)

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that cells with the same experiment share."""
        return fingerprint(self.experiment)

    def slug(self, seed: int) -> str:
        return f"{slugify(f'{self.row} {self.column}')[:SLUG]}-{self.fingerprint}-seed{seed}"

    @property
    def other_data(self) -> tuple[str, str] | None:
        """The names of the data set and of the paper's, if they differ."""
        names = (self.experiment.data.name, self.original.data.name)
        return None if names[0] == names[1] else names


@dataclass(frozen=True)
class ItemPlan:
    """An item at a scale, with the cells that are to be run."""

    paper: str
    name: str
    item: Item
    scale: Scale
    seeds: tuple[int, ...]
    cells: list[Cell]
    """All cells of the table."""
    cells_to_run: list[Cell]
    """The cells that are to be run."""
    measures: dict[tuple[str, str, str], Any]
    """Measures at this scale, by (quantity, row, column)."""
    originals: dict[tuple[str, str, str], Any]
    """Measures at the paper's scale."""
    only: tuple[str, ...] = ()
    """The rows and columns that were named, or none for all."""

    def provenance(self, quantity: str, cell: Cell) -> str:
        """Eight hexadecimal digits of the experiment and the measure that make a quantity of a cell."""
        measure = _given(self.measures[quantity, cell.row, cell.column])
        text = json.dumps([cell.fingerprint, measure], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    def trains(self, cell: Cell) -> bool:
        """Whether any quantity of a cell needs a run."""
        return any(measure.trains for key, measure in self.measures.items() if key[1:] == (cell.row, cell.column))

    @property
    def id(self) -> str:
        """The item's full name, such as ``fedmix/table-1``."""
        return f"{self.paper}/{self.name}"

    @property
    def usual(self) -> set[tuple[str, str]]:
        """The cells (row, column) of the scale's own table, without rows and columns that were only named."""
        smaller = _smaller(self.item, self.scale)
        return set(itertools.product(smaller.rows or self.item.rows, smaller.columns or self.item.all_columns))

    def showing(self, cells: Collection[tuple[str, str]]) -> ItemPlan:
        """The plan with further cells (row, column) of the item in its table, which are not run."""
        shown = {(cell.row, cell.column) for cell in self.cells}
        new = [cell for cell in cells if cell not in shown and cell[0] in self.item.rows]
        named = dict.fromkeys(line for row, column in new if column in self.item.all_columns for line in (row, column))
        if not named:
            return self
        wide = plan_item(self.id, self.scale, self.seeds, [*self.only, *filter(None, named)])
        measures, originals = wide.measures | self.measures, wide.originals | self.originals
        return replace(self, cells=wide.cells, measures=measures, originals=originals)

    def extended(self, measured: Collection[tuple[str, str]], seeds: Collection[int]) -> ItemPlan:
        """The plan with further seeds and measured cells; it names lines only if they differ from the scale's own."""
        chosen = {(cell.row, cell.column) for cell in self.cells_to_run} | set(measured)
        only: list[str] = []
        for axis in (0, 1):
            lines = list(dict.fromkeys((cell.row, cell.column)[axis] for cell in self.cells))
            named = [key for key in lines if any(cell[axis] == key for cell in chosen)]
            if set(named) != {cell[axis] for cell in self.usual}:
                only += named
        return replace(self, only=tuple(only), seeds=tuple(sorted({*self.seeds, *seeds})))

    def smaller(self) -> list[str]:
        """The differences from the paper's scale, a line for each field: ``rounds: 40, not 500``."""
        changed: dict[str, list[tuple[str, str]]] = {}
        for cell in self.cells:
            for field, pair in _changes(cell.original, cell.experiment).items():
                if self.trains(cell) or field.startswith(UNTRAINED):
                    changed.setdefault(field, []).append(pair)
        for key, measure in self.measures.items():
            before = dump(self.originals[key])
            for field, value in dump(measure).items():
                if value != before.get(field):
                    changed.setdefault(field, []).append((f"{value}", f"{before.get(field)}"))
        lines = list(self.item.smaller)
        for field, pairs in changed.items():
            new, old = (" / ".join(dict.fromkeys(side)) for side in zip(*pairs, strict=True))
            lines.append(f"{field}: {new}, not {old}")
        cells = {(cell.row, cell.column) for cell in self.cells}
        for what, every, axis in (("rows", self.item.rows, 0), ("columns", self.item.all_columns, 1)):
            shown = [key for key in every if any(cell[axis] == key for cell in cells)]
            if len(shown) < len(every):
                lines.append(f"{what}: {', '.join(shown)} of {len(every)}")
        return lines


def _changes(original: Experiment, smaller: Experiment) -> dict[str, tuple[str, str]]:
    """Fields in which two experiments differ, as (new, old) text; a part that was replaced is one field."""
    old, new = flatten(as_table(original)), flatten(as_table(smaller))
    differ = [field for field in dict.fromkeys([*new, *old]) if old.get(field) != new.get(field)]
    changes: dict[str, tuple[str, str]] = {}
    replaced = tuple(field.removesuffix("name") for field in differ if field.endswith(".name"))
    for prefix in replaced:
        own = [f"{k.removeprefix(prefix)} {v}" for k, v in new.items() if k.startswith(prefix)]
        options = ", ".join(word for word in own if not word.startswith("name "))
        name = str(new.get(f"{prefix}name"))
        changes[prefix[:-1]] = (f"{name} ({options})" if options else name, str(old.get(f"{prefix}name")))
    for field in differ:
        if field.split(".")[0] not in NOT_RUN and not field.startswith(replaced):
            changes[field] = (str(new.get(field, "all")), str(old.get(field, "all")))
    return changes


def fingerprint(experiment: Experiment) -> str:
    """Eight hexadecimal digits of every field that determines a run, except its seed.

    Fields with their default are left out. So a new field changes no fingerprint, and a default must not be changed.
    """
    table = {key: value for key, value in _given(experiment).items() if key not in NOT_RUN}
    table["method"] = {key: value for key, value in table.get("method", {}).items() if key not in ("label", "name")}
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()[:8]


def _given(value: Any) -> Any:
    """Plain data of a table or part without fields that have their default, so a new field changes no fingerprint."""
    if isinstance(value, BaseModel):
        return _not_default(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"name": dump(value)["name"], **_not_default(value)}
    if isinstance(value, (list, tuple)):
        return [_given(one) for one in value]
    return {str(key): _given(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _not_default(value: Any) -> dict[str, Any]:
    kind: Any = type(value)
    plain = ((name, _given(getattr(value, name)), defaults) for name, defaults in _defaults(kind).items())
    return {name: one for name, one, defaults in plain if one not in defaults}


@functools.cache
def _defaults(kind: Any) -> dict[str, tuple[Any, ...]]:
    """The plain data that stand for each field's default: those of a part, or the part by its name alone."""
    if issubclass(kind, BaseModel):
        defaults = {name: field.get_default() for name, field in kind.model_fields.items()}
    else:
        defaults = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    return {name: (_given(default), {"name": default}) for name, default in defaults.items()}


def plan_item(
    name: str, scale: Scale = "paper", seeds: Sequence[int] | None = None, only: Sequence[str] = ()
) -> ItemPlan:
    """Plan an item at a scale; ``only`` names the rows and columns to run, by their keys or labels."""
    import fedblend.papers.measures
    import fedblend.papers.memory  # noqa: F401 (both declare measures)

    paper, key = find_item(name)
    bases, item = all_papers()[paper].bases, all_papers()[paper].items[key]
    if item.missing:
        raise FedblendError(f"reproduce: {paper}/{key} cannot be run yet: {item.missing}")
    smaller = _smaller(item, scale)
    only = [_key_of(word, item) for word in only]
    rows, rows_to_run = _lines_to_show_and_run(item.rows, smaller.rows, only)
    columns, columns_to_run = _lines_to_show_and_run(item.all_columns, smaller.columns, only)
    cells = []
    for row, column in itertools.product(rows, columns):
        try:
            cells.append(_cell(paper, bases, item, (row, column), scale, smaller))
        except FedblendError as error:
            raise FedblendError(f"{paper}/{key}, {row} {column}: {error}") from None
    originals, measures = {}, {}
    for (quantity, one), cell in itertools.product(item.quantities.items(), cells):
        if one.rows is None or cell.row in one.rows:
            where = (quantity, cell.row, cell.column)
            own = item.all_columns[cell.column].measure | item.rows[cell.row].measure
            originals[where] = _with_options(registry.build("measure", one.measure, f"{key}.{quantity}"), own)
            measures[where] = _with_options(originals[where], smaller.measure)
    chosen = tuple(seeds) if seeds is not None else smaller.seeds or item.seeds
    to_run = [cell for cell in cells if cell.row in rows_to_run and cell.column in columns_to_run]
    return ItemPlan(paper, key, item, scale, chosen, cells, to_run, measures, originals, tuple(only))


def _smaller(item: Item, scale: Scale) -> Smaller:
    return item.laptop if scale == "laptop" else item.smoke if scale == "smoke" else Smaller()


def _key_of(word: str, item: Item) -> str:
    """The row or column with a key, or with a label in tables (upper or lower case)."""
    lines = {key: line for key, line in {**item.rows, **item.all_columns}.items() if key}
    labels = {line.label.lower(): key for key, line in lines.items() if line.label}
    key = word if word in lines else labels.get(word.lower())
    if key is None:
        raise FedblendError(f"--only {word}: no such row or column{or_valid(word, lines)}")
    return key


def _lines_to_show_and_run(
    lines: Mapping[str, Line], smaller: Sequence[str] | None, only: Sequence[str]
) -> tuple[list[str], Collection[str]]:
    """The rows (or columns) of the table, which are the scale's and the named ones, and those to be run."""
    usual = lines if smaller is None else smaller
    named = [key for key in lines if key in only]
    return [key for key in lines if key in usual or key in named], named or usual


def _with_options(measure: Any, options: Mapping[str, Any]) -> Any:
    own = {key: value for key, value in options.items() if has_option(measure, key)}
    return registry.build("measure", {**dump(measure), **own}) if own else measure


def _cell(
    paper: str, bases: Mapping[str, Base], item: Item, keys: tuple[str, str], scale: Scale, smaller: Smaller
) -> Cell:
    row, column = item.rows[keys[0]], item.all_columns[keys[1]]
    name = row.base or column.base or item.base or ""
    if name not in bases:
        raise FedblendError(f"base: no base '{name}'{or_valid(name, bases)}")
    base = bases[name]
    table = copy.deepcopy(base.experiment) | {"name": paper}
    method = next((m for m in (row.method, column.method, item.method) if m is not None), None)
    if method is not None:
        known = base.methods.get(method, method) if isinstance(method, str) else method
        table["method"] = copy.deepcopy({"name": known} if isinstance(known, str) else dict(known))
    for change in (item.set, column.set, row.set):
        for path, value in change.items():
            set_field(table, path, copy.deepcopy(value))
    label = ", ".join(word for word in (row.label or keys[0], column.label or keys[1]) if word)
    set_field(table, "method.label", label)
    original = resolve(table)
    experiment = original
    if scale != "paper":
        experiment = _apply(base.laptop if scale == "laptop" else base.smoke, experiment)
        experiment = _apply(smaller, experiment)
    return Cell(*keys, experiment, original)


def _apply(change: Change, experiment: Experiment) -> Experiment:
    table = as_table(experiment)
    flat = flatten(table)
    for path, factor in change.times.items():
        value = flat.get(path)
        if isinstance(value, int) and not isinstance(value, bool):
            # 0 stays 0: with 0 rounds the model is untrained at every scale.
            set_field(table, path, max(1, math.floor(value * factor + 0.5)) if value else 0)
        elif isinstance(value, float):
            set_field(table, path, value * factor)
    for path, value in change.set.items():
        set_field(table, path, copy.deepcopy(value))
    return resolve(table)
