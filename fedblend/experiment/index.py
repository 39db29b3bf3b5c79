"""The index of all tables and parts of an experiment: their options and documentation, readable without PyTorch.

Importing a part imports PyTorch, which takes seconds. ``fedblend list`` and ``fedblend new`` read the file
``index.json`` instead. ``python -m fedblend.experiment.reference`` makes the file from the code, and a test compares
both.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Any

FILE = "index.json"
"""The file in this package that holds the index."""

NOT_GIVEN = "not given"
"""The default, in words, of an option that a file may leave out."""


@dataclass(frozen=True)
class Option:
    """One field with its name in files; ``type`` and ``default`` are in words."""

    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True)
class Entry:
    """A table or a part: its docstring and its options. ``where`` is its path in a file, "" at the top."""

    kind: str
    name: str
    where: str
    text: str
    options: tuple[Option, ...]
    sends_raw_samples: bool = False
    """Whether a part sends raw samples to the server or to other clients."""
    leaves_client: bool = False
    """Whether a sharing sends its data at all."""

    @property
    def summary(self) -> str:
        """The first line of the docstring, with names between single backticks."""
        return re.sub(r"(?::\w+:`|``)(.+?)`{1,2}", r"`\1`", self.text.split("\n")[0])


@dataclass(frozen=True)
class MethodEntry:
    """What the parts of a named method declare."""

    leaves: tuple[str, ...]
    """What leaves a client, and how often if not in each of its rounds."""
    costs: tuple[str, ...]
    """A round's bytes in models up and down, in FedAvg's; what else travels; extra computation."""


@dataclass(frozen=True)
class Index:
    """All tables by name, all parts by kind and name, in the order of their declaration, and all methods by name."""

    tables: dict[str, Entry]
    parts: dict[str, dict[str, Entry]]
    methods: dict[str, MethodEntry]

    def as_text(self) -> str:
        """The content of the file."""
        return json.dumps(asdict(self), indent=1) + "\n"


@functools.cache
def index() -> Index:
    """The index of the tables and parts of fedblend, read from its file. Parts of users are not in it."""
    content = json.loads(files(__package__).joinpath(FILE).read_text(encoding="utf-8"))
    return Index(
        {name: _entry(**table) for name, table in content["tables"].items()},
        {kind: {name: _entry(**part) for name, part in parts.items()} for kind, parts in content["parts"].items()},
        {name: MethodEntry(tuple(one["leaves"]), tuple(one["costs"])) for name, one in content["methods"].items()},
    )


def _entry(options: list[dict[str, str]], **fields: Any) -> Entry:
    return Entry(options=tuple(Option(**option) for option in options), **fields)
