"""The format of a paper's file: its tables and figures as items.

An item is a table of *rows* and *columns*. Every cell is an experiment: a *base* (the paper's settings for a data set,
with the keys of an experiment file), changed by the fields of the item, then of the column, then of the row.
*Quantities* define the measure of each cell and hold the paper's numbers; *claims* are the paper's conclusions. A
*scale* (laptop, smoke) holds the changes that make the item smaller.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pydantic
from pydantic import BaseModel, ConfigDict

from fedblend import papers
from fedblend.core import registry
from fedblend.core.errors import FedblendError, did_you_mean, or_valid
from fedblend.core.registry import Positive
from fedblend.experiment.toml_tables import read_toml

FOLDER = Path(papers.__file__).parent  # The folder of the papers' files

Scale = Literal["paper", "laptop", "smoke"]
SCALES: tuple[Scale, ...] = ("paper", "laptop", "smoke")
"""``paper``: the paper's settings; ``laptop``: half an hour on two cores; ``smoke``: a test under a minute."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Change(_Table):
    """A scale's changes of each experiment: fields that are set, and numbers that are multiplied."""

    set: dict[str, Any] = {}
    """Fields by dotted path, with their value."""
    times: dict[str, Positive] = {}
    """Factors of numbers, by dotted path. An integer is rounded, to at least 1; 0 stays 0."""


class Smaller(Change):
    """A scale's changes of an item."""

    rows: tuple[str, ...] | None = None
    """The rows that are kept (default: all)."""
    columns: tuple[str, ...] | None = None
    """The columns that are kept (default: all)."""
    seeds: tuple[int, ...] | None = None
    """Seeds (default: the item's)."""
    measure: dict[str, Any] = {}
    """Options of measures; a measure without an option ignores it."""


class Base(_Table):
    """A paper's settings for a data set, and the changes of the smaller scales."""

    experiment: dict[str, Any]
    """The table of an experiment file."""
    methods: dict[str, Any] = {}
    """Methods by the name that rows and columns use."""
    laptop: Change = Change()
    smoke: Change = Change()


class Line(_Table):
    """A row or a column: its label, and its changes of the experiment."""

    label: str = ""
    """The label in tables (default: the key)."""
    base: str | None = None
    """The base (default: the item's)."""
    method: Any = None
    """A method: one of the base's methods, a preset, or a table."""
    set: dict[str, Any] = {}
    """Fields by dotted path, with their value."""
    measure: dict[str, Any] = {}
    """Options of measures; a measure without an option ignores it."""


class Quantity(_Table):
    """A number or picture of every cell, and the paper's numbers."""

    label: str
    measure: Any
    """The measure (a part of `fedblend.papers.measures`), by name or as a table."""
    unit: str = ""
    digits: int = 1
    """Digits after the point in tables."""
    exact: bool = False
    """Whether it is counted or computed, so that equal differences over seeds are certain."""
    paper: dict[str, tuple[float, ...]] = {}
    """The paper's numbers by row, in the order of the columns; ``nan`` where it has none, ``inf`` for "never"."""
    spread: dict[str, tuple[float, ...]] = {}
    """The paper's standard deviations, in the same form."""
    rows: tuple[str, ...] | None = None
    """The rows that are measured (default: all)."""


class Claim(_Table):
    """An order or a gap that the paper asserts (:mod:`fedblend.papers.claims`)."""

    says: str
    """The claim in words, with the paper's section."""
    holds: str
    """The claim as a comparison of rows, columns or cells, such as ``fedmix > naivemix > fedavg``."""
    of: str | None = None
    """The quantity that is compared (default: the first)."""
    where: tuple[str, ...] | None = None
    """The columns (or rows) in which it is asserted (default: all)."""
    choice: str = ""
    """In an item on a choice that the paper leaves open, or that can flip a verdict: the choice that is judged."""
    source: str = ""
    """Whose choice it is, and how this is known."""
    differs: bool = False
    """Whether the paper's own numbers contradict the claim in at least one column (or row)."""
    up_to: bool = False
    """Whether it is asserted of the best column (or row) alone, as "up to" says: that of our largest mean margin, once
    there are numbers in all."""
    missing: str = ""
    """Why nothing here can decide it, where it has no result (default: no run)."""


class Item(_Table):
    """One table or figure."""

    title: str
    also: tuple[str, ...] = ()
    """Other tables and figures that show the same runs."""
    base: str | None = None
    """The base of all cells."""
    method: Any = None
    """The method of all cells, unless a row or column has one."""
    set: dict[str, Any] = {}
    """Fields by dotted path, with their value."""
    grid: dict[str, tuple[Any, ...]] = {}
    """Columns as a grid, as in an experiment file: one column for each value or combination of values."""
    columns: dict[str, Line] = {}
    rows: dict[str, Line] = {}
    quantities: dict[str, Quantity] = {}
    claims: tuple[Claim, ...] = ()
    seeds: tuple[int, ...] = (0,)
    """Seeds of the paper, or 0 where it states none."""
    smaller: tuple[str, ...] = ()
    """What is smaller than in the paper at every scale, as results say it: ``rounds: 100, not 500``."""
    laptop: Smaller = Smaller()
    smoke: Smaller = Smaller()
    note: str = ""
    """A note for readers of the table."""
    missing: str = ""
    """What fedblend lacks for this item; the item cannot be run."""

    @functools.cached_property
    def all_columns(self) -> dict[str, Line]:
        """The columns, those of the grid first; one column without a name if there are none."""
        from_grid: dict[str, Line] = {}
        for values in itertools.product(*self.grid.values()) if self.grid else ():
            key = "/".join(map(_column_key, values))
            from_grid[key] = Line(label=key, set=dict(zip(self.grid, values, strict=True)))
        return from_grid | self.columns or {"": Line()}


class Paper(_Table):
    """A paper's file."""

    title: str
    upper_bound: str = ""
    """A claim on accuracy that the methods approximate; a smaller scale that contradicts it cannot be compared
    (:func:`fedblend.papers.result.contradicted_data`)."""
    bases: dict[str, Base]
    items: dict[str, Item]


def read_paper(path: Path) -> Paper:
    """Read a paper's file. Raises :class:`FedblendError` that names the file and the field."""
    table = read_toml(path)
    bases, items = table.get("bases", {}), table.get("items", {})
    known = {kind: table.pop(kind, {}) for kind in ("rows", "quantities")}
    try:
        table["bases"] = {name: _base_table(name, bases) for name in bases}
        table["items"] = {name: _item_table(name, items, known) for name in items}
        paper = Paper(**table)
        for name, item in paper.items.items():
            _check_item(item, f"items.{name}")
    except pydantic.ValidationError as error:
        raise FedblendError(f"{path}: {registry.explain(error)}") from None
    except FedblendError as error:
        raise FedblendError(f"{path}: {error}") from None
    return paper


def _base_table(name: str, bases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    own, others = dict(bases[name]), {key: base for key, base in bases.items() if key != name}
    parent: dict[str, Any] = {"experiment": {}, "methods": {}}
    if "like" in own:
        parent = _base_table(_known(own.pop("like"), others, f"bases.{name}.like"), others)
    scales: dict[str, Any] = {key: own.pop(key) for key in ("laptop", "smoke") if key in own}
    methods = parent.pop("methods") | own.pop("methods", {})
    return parent | scales | {"experiment": parent["experiment"] | own, "methods": methods}


def _item_table(name: str, items: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """An item over the one that it is like, its rows and quantities over ``known`` ones; a claim for each choice."""
    own, others = dict(items[name]), {key: item for key, item in items.items() if key != name}
    where = f"items.{name}"
    parent = _item_table(_known(own.pop("like"), others, f"{where}.like"), others, known) if "like" in own else {}
    for kind in known.keys() & own.keys():
        shared, field = known[kind], f"{where}.{kind}"
        given = own[kind] if isinstance(own[kind], dict) else {_known(key, shared, field): {} for key in own[kind]}
        own[kind] = {}
        for key, fields in given.items():
            like = _known(fields["like"], shared, f"{field}.{key}.like") if "like" in fields else key
            own[kind][key] = shared.get(like, {}) | {name: one for name, one in fields.items() if name != "like"}
    if "claims" in own:
        own["claims"] = [
            {key: value for key, value in {**claim, **choice}.items() if key != "choices"}
            for claim in own["claims"]
            for choice in claim.get("choices", [{}])
        ]
    return parent | own


def _known(name: str, known: Mapping[str, Any], field: str) -> str:
    if name not in known:
        raise FedblendError(f"{field}: there is no '{name}'{or_valid(name, known)}")
    return name


def _check_item(item: Item, where: str) -> None:
    width = len(item.all_columns)
    for name, quantity in item.quantities.items():
        place = f"{where}.quantities.{name}"
        for row, numbers in (*quantity.paper.items(), *quantity.spread.items()):
            if row not in item.rows:
                raise FedblendError(f"{place}: no row '{row}'{or_valid(row, item.rows)}")
            if len(numbers) != width:
                raise FedblendError(f"{place}: row '{row}' has {len(numbers)} numbers, but there are {width} columns")
    for scale in (item.laptop, item.smoke):
        wrong = [*set(scale.rows or ()).difference(item.rows), *set(scale.columns or ()).difference(item.all_columns)]
        if wrong:
            raise FedblendError(f"{where}: a scale keeps '{wrong[0]}', which is no row or column of it")
    if not item.missing and not (item.rows and item.quantities):
        raise FedblendError(f"{where}: has no rows or no quantities; say what is missing, or give them")


def _column_key(value: Any) -> str:
    """A value of a grid as a column's key.

    >>> _column_key([0, 2]), _column_key(0.05), _column_key(True)
    ('0,2', '0.05', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_column_key, value)) if isinstance(value, (list, tuple)) else str(value)


@functools.cache
def all_papers() -> dict[str, Paper]:
    """Every paper by the name of its file."""
    return {path.stem: read_paper(path) for path in sorted(FOLDER.glob("*.toml"))}


def item_names() -> dict[str, tuple[str, str]]:
    """(paper, item) by every name of an item, such as ``fedmix/table-1``, the names in :attr:`Item.also` included."""
    return {
        f"{paper}/{name}": (paper, key)
        for paper, file in all_papers().items()
        for key, item in file.items.items()
        for name in (key, *item.also)
    }


def find_item(name: str) -> tuple[str, str]:
    """The paper and the item of a name. Raises :class:`FedblendError` that suggests the nearest name."""
    valid = item_names()
    if name not in valid:
        hint = did_you_mean(name, valid)
        if name in all_papers():
            hint = f"; '{name}' is a paper: name one of its items, as in: fedblend reproduce --list {name}"
        raise FedblendError(f"reproduce: no such item '{name}'{hint}; all items: fedblend reproduce --list")
    return valid[name]
