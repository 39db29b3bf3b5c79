"""The entries of the index: a table or part of an experiment with its options, in words."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
