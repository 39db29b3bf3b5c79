"""What can be set: each table of an experiment and each part, with its options as the code declares them."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, TypeAdapter

from fedblend.core import registry
from fedblend.experiment.config import TABLES, Experiment
from fedblend.experiment.fields import Method


@dataclass(frozen=True)
class Option:
    """One field, as a file spells it; ``type`` and ``default`` are in words."""

    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True)
class Entry:
    """A table or a part: its docstring, and its options; ``where`` is its path in a file, "" at the top."""

    kind: str
    name: str
    where: str
    text: str
    options: tuple[Option, ...]

    @property
    def summary(self) -> str:
        """The first line of the docstring, with names between single backticks."""
        return re.sub(r"(?::\w+:`|``)(.+?)`{1,2}", r"`\1`", self.text.split("\n")[0])


TABLE_CLASSES: dict[str, type[BaseModel]] = {"experiment": Experiment, **TABLES}
"""The experiment itself, and its tables, by name."""


def tables() -> list[Entry]:
    """All of these."""
    return [of_table(name) for name in TABLE_CLASSES]


def of_table(name: str) -> Entry:
    """One of these."""
    cls = TABLE_CLASSES[name]
    return Entry("table", name, name if cls is not Experiment else "", _text(cls), options(cls))


def of_kind(kind: str) -> list[Entry]:
    """All parts of a kind."""
    return [of_part(cls) for cls in registry.known(kind).values()]


def of_part(cls: Any, values: Mapping[str, Any] | None = None) -> Entry:
    """One part; with ``values`` (see :func:`fedblend.core.registry.dump`) these take the place of its defaults."""
    made = options(cls)
    if values is not None:
        made = tuple(Option(o.name, o.type, _value(values.get(o.name)), o.text) for o in made)
    return Entry(cls.kind, cls.name, places()[cls.kind], _text(cls), made)


@functools.cache
def options(cls: Any) -> tuple[Option, ...]:
    """The options of a model of pydantic or of a part, in order."""
    schema, texts = TypeAdapter(cls).json_schema(), descriptions(cls)
    required = schema.get("required", [])
    return tuple(
        Option(
            registry.FILE_WORDS.get(name, name),
            type_in_words(field),
            default_in_words(field, name in required),
            texts.get(name, ""),
        )
        for name, field in schema.get("properties", {}).items()
    )


def descriptions(cls: type) -> dict[str, str]:
    """The docstrings of a class's fields (the text below each), those that it inherits among them.

    Python does not keep them, so they are read from the source; a class without a source has none.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            source = textwrap.dedent(inspect.getsource(base))
        except (OSError, TypeError):
            continue
        declared = ast.parse(source).body[0]
        for field, below in pairwise(getattr(declared, "body", [])):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and _is_text(below):
                found[field.target.id] = " ".join(below.value.value.split())
    return found


@functools.cache
def places() -> dict[str, str]:
    """Where in a file a part of each kind is named: kind -> path."""
    found: dict[str, str] = {}
    for cls, before in ((Experiment, ""), (Method, "method.")):
        for name, field in cls.model_json_schema()["properties"].items():
            kind = field.get("items", field).get("part")
            if kind:
                found[kind] = before + name
    return found


def _is_text(node: ast.AST) -> Any:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _text(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


def _value(value: Any) -> str:
    return NOT_GIVEN if value is None else default_in_words({"default": value}, False)


NOT_GIVEN = "not given"

NOUNS = {"integer": "whole number", "number": "number", "string": "text", "array": "list", "object": "table"}

BOUNDS = {"minimum": " from", "exclusiveMinimum": " above", "maximum": ", at most", "exclusiveMaximum": ", below"}


def type_in_words(schema: Mapping[str, Any], many: bool = False) -> str:
    """What a field may be; that it may also be left out is said by its default.

    >>> type_in_words({"type": "integer", "minimum": 1})
    'whole number from 1'
    >>> type_in_words({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
    'number above 0, at most 1'
    >>> type_in_words({"type": "number", "minimum": 0, "maximum": 1})
    'number from 0 to 1'
    >>> type_in_words({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "all"}, {"type": "null"}]})
    'whole number from 1, or "all"'
    >>> type_in_words({"type": "array", "items": {"type": "array", "items": {"type": "integer"}}})
    'list of lists of whole numbers'
    """
    if "part" in schema:
        return schema["part"] + ("s" if many else "")
    if "anyOf" in schema:
        return ", or ".join(type_in_words(one, many) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "boolean":
        return "true or false"
    # Only a table within a table is told by reference.
    words = NOUNS[schema.get("type", "object")] + ("s" if many else "")
    if schema.get("items"):
        return f"{words} of {type_in_words(schema['items'], many=True)}"
    if "minimum" in schema and "maximum" in schema:
        return f"{words} from {schema['minimum']:g} to {schema['maximum']:g}"
    return words + "".join(f"{word} {schema[bound]:g}" for bound, word in BOUNDS.items() if bound in schema)


def default_in_words(schema: Mapping[str, Any], required: bool) -> str:
    """What a field is where a file does not give it.

    >>> default_in_words({"default": "auto"}, False), default_in_words({"default": None}, False)
    ('"auto"', 'not given')
    >>> default_in_words({}, True), default_in_words({"$ref": "Train", "default": {"lr": 1}}, False)
    ('required', 'its defaults')
    """
    if required:
        return "required"
    if "$ref" in schema:
        return "its defaults"
    # Without a default in the schema it is made anew each time: an empty table.
    value = schema.get("default", {})
    return NOT_GIVEN if value is None else json.dumps(value)
