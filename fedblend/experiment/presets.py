"""Named methods: each is a preset of parts, and no other code depends on its name."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedblend.core.errors import FedblendError, brief, or_valid
from fedblend.experiment.toml_tables import as_part

Presets = dict[str, tuple[str, dict[str, Any]]]
"""Methods by name: a line of text, and the parts that differ from FedAvg's."""


def _read() -> dict[str, Presets]:
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return {
        family: {
            name: (one.pop("text"), {key: _as_tables(key, given) for key, given in one.items()})
            for name, one in methods.items()
        }
        for family, methods in table.items()
    }


def _as_tables(field: str, given: Any) -> Any:
    """The parts of a field as tables; an upload stays a name."""
    return list(map(as_part, given)) if isinstance(given, list) else given if field == "upload" else as_part(given)


FAMILIES: dict[str, Presets] = _read()

SINGLE: Presets = {name: preset for family in FAMILIES.values() for name, preset in family.items()}

START = ("fedavg", "fedprox", "fedlc", "fedmix", "server-means")
"""Five methods to start with: the baseline, two that send nothing beside the model, and two blends."""

PROXIMAL = {"name": "proximal"}

WITH_PROXIMAL = ("Averaging", "Mixed data", "Training at the server", "Outputs in place of models", "One shot")
"""Families whose methods also exist with FedProx's term, where clients train; any other method may have the term too,
without a preset.
"""

AUGMENTED = ("naivemix", "fedmix")
"""Methods that also have a preset with Fed-AugMix; other objectives can be `augmix`'s base too, without a preset."""


def presets() -> Presets:
    """All named methods: name -> (description, parts)."""
    return {name: preset for family in families().values() for name, preset in family.items()}


def families() -> dict[str, Presets]:
    """All named methods by family; those with FedProx's term, but for `fedprox` itself, are the last family."""
    with_views = {
        f"{name}+fed-augmix": (
            f"Fed-AugMix on {name}",
            {**SINGLE[name][1], "objective": {"name": "augmix", "base": SINGLE[name][1]["objective"]}},
        )
        for name in AUGMENTED
    }
    result = FAMILIES | {"Mixed data": FAMILIES["Mixed data"] | with_views}
    with_prox = {
        f"fedprox+{name}": (f"FedProx with {name}", {**spec, "terms": [*spec.get("terms", []), PROXIMAL]})
        for family in WITH_PROXIMAL
        for name, (_, spec) in result[family].items()
        if spec.get("upload") != "nothing" and name != "fedavg"
    }
    fedprox = {"fedprox": ("FedAvg with a proximal term (Li et al. 2020)", {"terms": [PROXIMAL]})}
    return result | {"Averaging": FAMILIES["Averaging"] | fedprox, "With FedProx's term": with_prox}


def expand(spec: Mapping[str, Any], where: str = "method") -> dict[str, Any]:
    """The parts of a method: its preset, updated with the fields of ``spec``.

    ``spec`` is such as ``{name = "fedmix", objective = {lambda = 0.2}}``; without a name it consists of parts only. A
    part table without a name changes options of the preset's part. A part table with another name replaces it. A list
    of terms replaces the preset's; a table of terms by name, ``{moon = {mu = 1}}``, changes options of the preset's.
    """
    given = dict(spec)
    name = given.pop("name", None)
    if name is None:
        return given
    all_presets = presets()
    if not isinstance(name, str) or name not in all_presets:
        meant = _how_to_combine(str(name), all_presets) or _how_to_name_a_part(name)
        meant = meant or or_valid(str(name), all_presets, everything="fedblend list methods")
        raise FedblendError(f"{where}.name: unknown method {brief(name)}{meant}")
    parts = dict(all_presets[name][1])
    for field, value in given.items():
        parts[field] = overlay(parts.get(field), value, f"{where}.{field}")
    return parts


def _how_to_combine(name: str, all_presets: Presets) -> str:
    """How to combine two methods whose names are joined by ``+``; empty if a preset combines them, or one is unknown.

    >>> print(_how_to_combine("fedmix+scaffold", presets()))
     (to combine them, write method = {name = "fedmix", ...} with the parts of scaffold: terms, aggregator)
    """
    first, _, second = name.partition("+")
    if f"{second}+{first}" in all_presets or not {first, second} <= set(all_presets):
        return ""
    parts = ", ".join(all_presets[second][1])
    return f' (to combine them, write method = {{name = "{first}", ...}} with the parts of {second}: {parts})'


def _how_to_name_a_part(name: Any) -> str:
    """What to write instead of a part of the user's own as a method; empty if the name is no ``module:Class``."""
    if not isinstance(name, str) or ":" not in name:
        return ""
    write = f'write {{ label = "{name.partition(":")[2]}", objective = {{ name = "{name}" }} }} in place of "{name}"'
    others = "other fields: sharing, terms, personal, upload, aggregator, server_step"
    return f": a method names a part of your own in the field of its kind; {write} for an objective; {others}"


def overlay(preset: Any, given: Any, where: str = "") -> Any:
    """Update a preset's part, or a list's parts by their names, with given options, and a part inside it likewise."""
    if isinstance(preset, list) and isinstance(given, Mapping):
        parts = {part["name"]: part for part in map(as_part, preset)}
        for name in given:
            if name not in parts:
                raise FedblendError(f"{where}.{name}: there is no such part here; valid: {', '.join(parts) or 'none'}")
        return [overlay(part, given.get(name, {})) for name, part in parts.items()]
    if isinstance(given, Mapping) and isinstance(preset, Mapping):
        if "name" in given and given["name"] != preset.get("name"):
            return dict(given)
        parts = {field: one for field, one in preset.items() if isinstance(one, Mapping) and "name" in one}
        return {**preset, **{field: overlay(parts.get(field), value) for field, value in given.items()}}
    return given
