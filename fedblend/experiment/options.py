"""The options of every table of an experiment and of every part, read from the code that declares them."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, TypeAdapter

from fedblend.core import registry
from fedblend.core.engine import client_parts, first_server_state
from fedblend.core.errors import FedblendError
from fedblend.core.setup import model_spec
from fedblend.core.trees import bytes_of
from fedblend.data.loaders.files import DataFiles
from fedblend.experiment.checks import sends_raw_samples
from fedblend.experiment.config import TABLES, Experiment
from fedblend.experiment.fields import Method, Train
from fedblend.experiment.index import NOT_GIVEN, Entry, Index, MethodEntry, Option, Source
from fedblend.experiment.make_setup import make_setup
from fedblend.experiment.parts import has_option
from fedblend.experiment.presets import presets


def index_of_code() -> Index:
    """The index of the tables and parts that fedblend declares; users' parts are left out."""
    return Index(
        {entry.name: entry for entry in table_entries()},
        {kind: {entry.name: entry for entry in kind_entries(kind)} for kind in registry.MODULES},
        {name: method_entry(name) for name in presets()},
        _by_hand(),
    )


def _by_hand() -> dict[str, Source]:
    registry.known("dataset")  # imports all loaders
    loaders = [module for name, module in sys.modules.items() if name.startswith("fedblend.data.loaders.")]
    files = [one for module in loaders for one in vars(module).values() if type(one) is DataFiles]
    return {one.name: Source(one.address, one.folders[0], one.option) for one in files}


def table_entries() -> list[Entry]:
    """An entry for the experiment and each of its tables."""
    tables: dict[str, type[BaseModel]] = {"experiment": Experiment, **TABLES}
    return [
        Entry("table", name, name if name in TABLES else "", _docstring(cls), class_options(cls))
        for name, cls in tables.items()
    ]


def kind_entries(kind: str) -> list[Entry]:
    """An entry for each part of a kind that fedblend declares."""
    return [part_entry(cls) for cls in registry.known(kind).values() if registry.is_own(cls)]


def part_entry(cls: Any) -> Entry:
    """The entry of a part."""
    plan = getattr(cls, "plan", None)
    if isinstance(plan, property):  # of its options, which may have no default
        with suppress(FedblendError):
            plan = cls().plan
    return Entry(
        cls.kind,
        cls.name,
        field_paths()[cls.kind],
        _docstring(cls),
        class_options(cls),
        sends_raw_samples=sends_raw_samples(cls),
        leaves_client=getattr(plan, "leaves", False),
    )


def method_entry(name: str) -> MethodEntry:
    """What leaves a client with a named method, and what it costs, by the declarations of its parts."""
    method = Method(name=name)
    upload, sharing, step, parts = method.upload, method.sharing, method.server_step, client_parts(method).values()
    shared = "raw samples" if sends_raw_samples(sharing) else sharing.bytes_kind
    own = upload.trains and not upload.is_model
    model = "model but own layers" if method.personal.keeps == "layers" else "model"
    leaves = [model] if upload.trains and upload.is_model else []
    leaves += [upload.bytes_kind] if own else []
    leaves += ["statistics" if part.exchanges == "map-statistics" else "extras" for part in parts if part.sends]
    leaves += [shared + ("" if sharing.plan.repeats else " once")] if sharing.plan.leaves else []
    leaves += ["answers"] if step.works_on == "answers" else []
    leaves += ["raw samples"] if step.works_on == "raw" else []
    extras = _extras_in_models(name) if any(part.sends for part in parts) else 0.0
    up = (upload.trains and upload.is_model) + extras
    down = (upload.trains and not method.stateful_clients) or (sharing.plan.sees_model and sharing.plan.repeats)
    below = "below " * (method.personal.keeps == "layers")
    costs = [f"traffic {below}{round((up + down + extras) / 2, 2):g}x"]
    costs += [f"{upload.bytes_kind} up" + " and down" * any(term.outputs_kind for term in method.terms)] if own else []
    costs += [f"{shared} to clients"] if sharing.plan.to == "clients" and method.objective.needs else []
    costs += ["training at the server"] if any(has_option(step, word) for word in ("epochs", "steps")) else []
    costs += ["a second model at clients"] if method.personal.active else []
    costs += [f"{steps} steps a batch"] if (steps := len(method.objective.phases())) > 1 else []
    return MethodEntry(tuple(dict.fromkeys(leaves)), tuple(costs))


def _extras_in_models(name: str) -> float:
    """The bytes that parts send beside the model, in models: of the network ``cnn`` on the data set ``digits``."""
    setup = make_setup(Experiment(data="digits", partition="iid", model="cnn", method=name))
    weights = dict(setup.model.state_dict())
    extras = first_server_state(setup.experiment.method, model_spec(setup, setup.model), weights, broadcast=True)
    return bytes_of(extras) / bytes_of(weights)


@functools.cache
def class_options(cls: Any) -> tuple[Option, ...]:
    """The options of a pydantic model or of a part, in order."""
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
    """The docstrings of a class's fields (the text below each) by name, with those of inherited fields.

    Python discards them, so they are read from the source; a class without source has none. Pydantic's
    ``use_attribute_docstrings`` omits inherited fields of dataclasses, and parses every part's source at import.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        try:
            declared = _classes_of(base.__module__)[base.__qualname__]
        except (OSError, TypeError, KeyError):
            continue
        for field, below in pairwise(declared.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found


@functools.cache  # inspect.getsource would parse the file again for each class in it.
def _classes_of(module: str) -> dict[str, ast.ClassDef]:
    body = ast.parse(inspect.getsource(sys.modules[module])).body
    return {node.name: node for node in body if isinstance(node, ast.ClassDef)}


@functools.cache
def field_paths() -> dict[str, str]:
    """The path in a file of the field that names a part: kind -> path."""
    found: dict[str, str] = {}
    for cls, before in ((Experiment, ""), (Train, "train."), (Method, "method.")):
        for name, field in cls.model_json_schema()["properties"].items():
            alternatives = (field.get("items", field), *field.get("anyOf", ()))
            for kind in (one["part"] for one in alternatives if "part" in one):
                found.setdefault(kind, before + name)
    return found


def _docstring(cls: type) -> str:
    return inspect.cleandoc(cls.__doc__ or "")


NOUNS = {"integer": "whole number", "number": "number", "string": "text", "array": "list", "object": "table"}

LARGEST = [sign * bound for bound in (registry.LARGEST_INT, registry.LARGEST_FLOAT) for sign in (1, -1)]
"""Bounds of every whole number and of every number, which texts leave out."""

BOUNDS = {"minimum": " from", "exclusiveMinimum": " above", "maximum": ", at most", "exclusiveMaximum": ", below"}


def type_in_words(schema: Mapping[str, Any], many: bool = False) -> str:
    """The values that a field accepts. ``null`` is left out: the default shows that a field is optional.

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
    schema = {name: bound for name, bound in schema.items() if bound not in LARGEST}
    if "part" in schema:
        return schema["part"] + ("s" if many else "")
    if "anyOf" in schema:
        return ", or ".join(type_in_words(one, many) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(map(json.dumps, schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "boolean":
        return "true or false"
    # Only a table within a table has no type, but a reference.
    words = NOUNS[schema.get("type", "object")] + ("s" if many else "")
    if schema.get("items"):
        return f"{words} of {type_in_words(schema['items'], many=True)}"
    if "minimum" in schema and "maximum" in schema:
        return f"{words} from {schema['minimum']:g} to {schema['maximum']:g}"
    return words + "".join(f"{word} {schema[bound]:g}" for bound, word in BOUNDS.items() if bound in schema)


def default_in_words(schema: Mapping[str, Any], required: bool) -> str:
    """The value of a field that a file omits.

    >>> default_in_words({"default": "auto"}, False), default_in_words({"default": None}, False)
    ('"auto"', 'not given')
    >>> default_in_words({}, True), default_in_words({"$ref": "Train", "default": {"lr": 1}}, False)
    ('required', 'its defaults')
    """
    if required:
        return "required"
    if "$ref" in schema:
        return "its defaults"
    # A schema has no default where a factory makes it: an empty table.
    value = schema.get("default", {})
    return NOT_GIVEN if value is None else json.dumps(value)
