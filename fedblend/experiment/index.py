"""The index of all tables and parts of an experiment: their options and documentation, readable without PyTorch.

Importing a part imports PyTorch, which takes seconds. ``fedblend list`` and ``fedblend new`` therefore read the index
from a file, which the first of them after a change of the code makes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

FILE = Path(__file__).with_name("index.json")
"""The file of the index. In a folder that cannot be written to, each command makes the index for itself."""


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
class Source:
    """Where the files of a data set come from, their folder under $FEDBLEND_DATA, and the option for another one."""

    address: str
    folder: str
    option: str


@dataclass(frozen=True)
class Index:
    """All tables by name, all parts by kind and name, in the order of their declaration, and all methods by name."""

    tables: dict[str, Entry]
    parts: dict[str, dict[str, Entry]]
    methods: dict[str, MethodEntry]
    by_hand: dict[str, Source]
    """The data sets that fedblend does not download."""


@functools.cache
def index() -> Index:
    """The index of the tables and parts of fedblend. Parts of users are not in it."""
    code = _digest_of_code()
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        content = {}
    if content.get("code") == code:
        return TypeAdapter(Index).validate_python(content)
    from fedblend.experiment.options import index_of_code

    made = index_of_code()
    whole = FILE.with_name(f"{FILE.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        whole.write_text(json.dumps({"code": code, **asdict(made)}), encoding="utf-8")
        whole.replace(FILE)
    return made


def _digest_of_code() -> str:
    digest = hashlib.sha256()
    for path in sorted([FILE.with_name("presets.toml"), *FILE.parents[1].rglob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()
