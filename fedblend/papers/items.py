"""A paper's file: its tables and figures as items, each an experiment, what varies, what is measured, what is claimed.

An item is a table of *rows* and *columns*. Every cell is an experiment: a base (the paper's settings for a data set,
with the keys of an experiment file), over which the item, the column and the row lay theirs. *Quantities* say what is
measured of a cell and what the paper found; *claims* what it concludes from that. A *scale* (laptop, smoke) is what a
smaller form of the item changes.
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
from fedblend.core.errors import FedblendError, did_you_mean
from fedblend.core.registry import Positive
from fedblend.experiment.tables import read_toml

FOLDER = Path(papers.__file__).parent
"""Where the papers' files lie."""

Scale = Literal["paper", "laptop", "smoke"]
SCALES: tuple[Scale, ...] = ("paper", "laptop", "smoke")
"""``paper``: its own settings; ``laptop``: two cores, half an hour; ``smoke``: under a minute, to see that it runs."""


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Change(_Table):
    """What a scale changes in each experiment: fields that are set, numbers that are multiplied (and rounded)."""

    set: dict[str, Any] = {}
    """Fields by dotted path, with their value."""
    times: dict[str, Positive] = {}
    """Fields by dotted path, and what their number is multiplied by; a whole number stays one, at least 1."""


class Smaller(Change):
    """What a scale changes in an item beside its experiments."""

    rows: tuple[str, ...] | None = None
    """The rows that are kept; all, if not given."""
    columns: tuple[str, ...] | None = None
    """The columns that are kept; all, if not given."""
    seeds: tuple[int, ...] | None = None
    """Seeds; unless given, the item's."""
    measure: dict[str, Any] = {}
    """Options of measures, wherever a measure has them."""


class Base(_Table):
    """The settings of a data set in a paper: an experiment's table, its methods by name, and what scales change."""

    experiment: dict[str, Any]
    methods: dict[str, Any] = {}
    laptop: Change = Change()
    smoke: Change = Change()


class Line(_Table):
    """A row or a column: what it is called, and what it lays over the experiment."""

    label: str = ""
    """What tables call it; its key, if not given."""
    base: str | None = None
    """Another base than the item's."""
    method: Any = None
    """A method: one of the base's by its name, a preset, or a table."""
    set: dict[str, Any] = {}
    """Fields by dotted path, with their value."""
    measure: dict[str, Any] = {}
    """Options of measures, wherever a measure has them."""


class Quantity(_Table):
    """Something that is measured of every cell, and what the paper has for it."""

    label: str
    measure: Any
    """The part that measures it (`fedblend.papers.measures`), by name or as a table."""
    unit: str = ""
    digits: int = 1
    paper: dict[str, tuple[float, ...]] = {}
    """The paper's numbers by row, in the order of the columns; ``nan`` where it has none, ``inf`` for "never"."""
    spread: dict[str, tuple[float, ...]] = {}
    """The paper's standard deviations, likewise."""
    rows: tuple[str, ...] | None = None
    """The rows of which it is measured; all, if not given."""


class Claim(_Table):
    """An order or a gap that the paper asserts, as in ``fedmix > naivemix > fedavg`` (:mod:`.claims`)."""

    says: str
    """In words, with the section."""
    holds: str
    """As a comparison of rows, columns or cells."""
    of: str | None = None
    """The quantity that is compared; the first, if not given."""
    where: tuple[str, ...] | None = None
    """The columns (or rows) in which it is asserted; all, if not given."""
    differs: bool = False
    """Whether the paper's own numbers do not bear it out, everywhere at least."""


class Item(_Table):
    """One table or figure."""

    title: str
    also: tuple[str, ...] = ()
    """Other tables and figures that show the same runs."""
    base: str | None = None
    method: Any = None
    set: dict[str, Any] = {}
    grid: dict[str, tuple[Any, ...]] = {}
    """Columns as a grid, as in an experiment file: one a value, or one a combination of values."""
    columns: dict[str, Line] = {}
    rows: dict[str, Line] = {}
    quantities: dict[str, Quantity] = {}
    claims: tuple[Claim, ...] = ()
    seeds: tuple[int, ...] = (0,)
    """Seeds of the paper, or 0 where it tells none."""
    laptop: Smaller = Smaller()
    smoke: Smaller = Smaller()
    note: str = ""
    """What a reader of the table must know."""
    missing: str = ""
    """What fedblend lacks for this item, which then cannot be run."""

    @functools.cached_property
    def all_columns(self) -> dict[str, Line]:
        """The columns, those of the grid first; a single nameless one where there are none."""
        made: dict[str, Line] = {}
        for values in itertools.product(*self.grid.values()) if self.grid else ():
            key = "/".join(map(_key, values))
            made[key] = Line(label=key, set=dict(zip(self.grid, values, strict=True)))
        return made | self.columns or {"": Line()}


class Paper(_Table):
    """A paper's file."""

    title: str
    bases: dict[str, Base]
    items: dict[str, Item]


def read_paper(path: Path) -> Paper:
    """A paper from its file. Raises :class:`FedblendError` that names the file and the field."""
    table = read_toml(path)
    given = table.get("bases", {})
    table["bases"] = {name: _base(name, given) for name in given}
    try:
        paper = Paper(**table)
        for name, item in paper.items.items():
            _check(item, f"items.{name}")
    except pydantic.ValidationError as error:
        raise FedblendError(f"{path}: {registry.explain(error)}") from None
    except FedblendError as error:
        raise FedblendError(f"{path}: {error}") from None
    return paper


def _base(name: str, given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """A base's experiment and what stands beside it; ``like`` names a base that it is laid over."""
    own = dict(given[name])
    below = _base(own.pop("like"), given) if "like" in own else {"experiment": {}, "methods": {}}
    beside: dict[str, Any] = {key: own.pop(key) for key in ("laptop", "smoke") if key in own}
    methods = below.pop("methods") | own.pop("methods", {})
    return below | beside | {"experiment": below["experiment"] | own, "methods": methods}


def _check(item: Item, where: str) -> None:
    """Raise where keys of an item do not fit together."""
    width = len(item.all_columns)
    for name, quantity in item.quantities.items():
        for kind in (quantity.paper, quantity.spread):
            for row, numbers in kind.items():
                if row not in item.rows:
                    raise FedblendError(f"{where}.quantities.{name}: no row '{row}'{did_you_mean(row, item.rows)}")
                if len(numbers) != width:
                    raise FedblendError(
                        f"{where}.quantities.{name}: row '{row}' has {len(numbers)} numbers, but there are {width} "
                        "columns"
                    )
    for scale in (item.laptop, item.smoke):
        for kept, there in ((scale.rows, item.rows), (scale.columns, item.all_columns)):
            for key in kept or ():
                if key not in there:
                    raise FedblendError(f"{where}: a scale keeps '{key}', which is no row or column of it")
    if not item.missing and not (item.rows and item.quantities):
        raise FedblendError(f"{where}: has no rows or no quantities; say what is missing, or give them")


def _key(value: Any) -> str:
    """A value of a grid as a column's key.

    >>> _key([0, 2]), _key(0.05), _key(True)
    ('0,2', '0.05', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(_key, value)) if isinstance(value, (list, tuple)) else str(value)


@functools.cache
def all_papers() -> dict[str, Paper]:
    """Every paper by its name, that of its file."""
    return {path.stem: read_paper(path) for path in sorted(FOLDER.glob("*.toml"))}


def names() -> dict[str, tuple[str, str]]:
    """Every item's name, such as ``fedmix/table-1``, with those that it also goes by: name -> (paper, item)."""
    return {
        f"{paper}/{name}": (paper, key)
        for paper, made in all_papers().items()
        for key, item in made.items.items()
        for name in (key, *item.also)
    }


def find(name: str) -> tuple[str, str]:
    """The paper and the item of a name. Raises :class:`FedblendError` that suggests the nearest."""
    known = names()
    if name not in known:
        hint = did_you_mean(name, known)
        if name in all_papers():
            hint = f"; '{name}' is a paper: name one of its items, as in: fedblend reproduce --list {name}"
        raise FedblendError(f"reproduce: no such item '{name}'{hint}; all items: fedblend reproduce --list")
    return known[name]
