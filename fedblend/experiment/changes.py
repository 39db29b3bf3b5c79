"""Changes of a file's fields. A part that takes another's place keeps the options that the user had set.

The command line's ``--set``, grids, variants and searches change fields here, and nowhere else.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from fedblend.core import registry
from fedblend.core.errors import listed
from fedblend.experiment.config import TABLES, Experiment
from fedblend.experiment.fields import Method
from fedblend.experiment.parts import takes
from fedblend.experiment.presets import as_part, overlay
from fedblend.experiment.toml_tables import set_field

Holds = str | type | None
"""What a field holds: a part of this kind, a table of this class, or (``None``) anything else."""


def change_field(table: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.c`` in an experiment's table, in place, as :func:`set_field`; a table updates the one that is there.

    Where the value names another part, those options of the old one stay that the new one has, if their values are
    valid there. A warning names the others. ``partition.name`` is as ``partition``.
    """
    holds: Holds = Experiment
    old: Any = table
    for word in path.split("."):
        outer, inside = (holds, old), _class_of(holds, old, path)
        holds = what_fields_hold(inside).get(word) if inside else None
        old = as_part(old).get(word) if isinstance(old, (str, Mapping)) else None
    if word == "name" and (isinstance(outer[0], str) or outer[0] is Method):
        (holds, old), path, value = outer, path.removesuffix(".name"), {"name": value}
    set_field(table, path, override(holds, old, value, path))


def override(holds: Holds, old: Any, new: Any, where: str = "") -> Any:
    """A new value over a field's old one."""
    if holds is None or not isinstance(old, (str, Mapping)) or not isinstance(new, (str, Mapping)):
        # A list of parts may be changed by a table of their names.
        return overlay(old, new) if isinstance(old, list) else new
    old, fields = as_part(old), as_part(new)
    name = fields.get("name", old.get("name"))
    inside = _class_of(holds, {"name": name}, where)
    if "name" in fields and isinstance(name, str) and inside and name != old.get("name"):
        old = _kept_of_method(old, name, where) if holds is Method else _kept_of_part(inside, old, fields, where)
    held = what_fields_hold(inside) if inside else {}
    given = {key: override(held.get(key), old.get(key), one, f"{where}.{key}") for key, one in fields.items()}
    return {**old, **given}


@functools.cache
def what_fields_hold(cls: type) -> dict[str, Holds]:
    """What those fields of a table or a part hold, as files spell them, that hold parts or tables."""
    fields = TypeAdapter(cls).json_schema().get("properties", {})
    parts: dict[str, Holds] = {
        registry.FILE_WORDS.get(name, name): one["part"]
        for name, field in fields.items()
        for one in (field, *field.get("anyOf", ()))
        if "part" in one
    }
    return parts | (TABLES if cls is Experiment else {})


def _class_of(holds: Holds, spec: Any, where: str) -> type | None:
    """The class of a table, or of the part that ``spec`` names; ``None`` where it names none."""
    if not isinstance(holds, str):
        return holds
    name = as_part(spec).get("name") if isinstance(spec, (str, Mapping)) else None
    return registry.find(holds, name, where.lstrip(".")) if isinstance(name, str) else None


def _kept_of_part(cls: Any, old: Mapping[str, Any], new: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The options of an old part that a new one of the class ``cls`` takes; a warning names those that it does not.

    Texts of a data set are names of its own files and columns: another data set does not take them.
    """
    options = {key: value for key, value in old.items() if key not in ("name", *new)}
    kept = {
        key: value
        for key, value in options.items()
        if (takes(cls, key, value) or key == "features") and not (cls.kind == "dataset" and isinstance(value, str))
    }
    _warn_of({key: value for key, value in options.items() if key not in kept}, where, new["name"])
    return kept


def _kept_of_method(old: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """The options of an old method's parts that the parts of the preset ``name`` take; a warning names all others."""
    preset = Method(name=name)
    usual = preset.model_dump()
    kept: dict[str, Any] = {}
    dropped: dict[str, Any] = {}
    for field, value in old.items():
        part = getattr(preset, field, None)
        options = {key: one for key, one in value.items() if key != "name"} if isinstance(value, Mapping) else {}
        kept[field] = {key: one for key, one in options.items() if takes(type(part), key, one)}
        if left := {key: one for key, one in options.items() if key not in kept[field]}:
            dropped[field] = left
        elif not options and field != "name" and value != usual[field]:
            dropped[field] = value
    _warn_of(dropped, where, name)
    return {field: options for field, options in kept.items() if options}


def _warn_of(dropped: Mapping[str, Any], where: str, name: str) -> None:
    if dropped:
        fields = listed([f"{key} = {value!r}" for key, value in dropped.items()])
        warnings.warn(f"{where.lstrip('.')}: '{name}' does not take {fields}, which is left out", stacklevel=2)
