"""A field's type, range and default in words, from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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
