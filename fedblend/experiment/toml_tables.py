"""Tables of plain data: reading and writing TOML, and access to fields by their path."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from fedblend.core.errors import FedblendError
from fedblend.core.paths import read_text


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as plain data. Raises :class:`FedblendError` if it is missing or malformed."""
    text = read_text(path, "give the path of a TOML file")
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        # ValueError: also a whole number of more than 4,300 digits. RecursionError: a value in hundreds of lists.
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise FedblendError(f"{path}: is not valid TOML: {reason}") from None


def write_toml(table: Mapping[str, Any]) -> str:
    """Plain data as TOML text."""
    return tomli_w.dumps(dict(table))


def as_part(spec: Any) -> Any:
    """A part that is given by its name as a table; anything else unchanged."""
    return {"name": spec} if isinstance(spec, str) else spec


def set_field(table: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.c`` in nested tables, in place; a part that is given by its name becomes a table.

    In a list of parts, a part is found by its name: ``method.terms.proximal.mu``.
    """
    word, _, rest = path.partition(".")
    if not rest:
        table[word] = value
        return
    inner = table.get(word)
    name, _, option = rest.partition(".")
    if isinstance(inner, list) and option:
        parts = [dict(as_part(part)) for part in inner]
        named = [part for part in parts if part.get("name") == name]
        if not named:
            raise FedblendError(f"{path}: there is no part '{name}' in the list {word}")
        for part in named:
            set_field(part, option, value)
        table[word] = parts
        return
    inner = as_part(inner)
    table[word] = dict(inner) if isinstance(inner, Mapping) else {}
    set_field(table[word], rest, value)


def unset_field(table: dict[str, Any], path: str) -> None:
    """Remove ``a.b.c`` from nested tables, in place, if it exists."""
    *outer, last = path.split(".")
    for step in outer:
        inner = table.get(step)
        if not isinstance(inner, Mapping):
            return
        table[step] = table = dict(inner)
    table.pop(last, None)


def parse_value(text: str) -> Any:
    """A value from the command line: parsed as TOML if it is TOML, else a plain string.

    >>> parse_value("0.1"), parse_value("true"), parse_value("fedmix"), parse_value("[1, 2]")
    (0.1, True, 'fedmix', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
