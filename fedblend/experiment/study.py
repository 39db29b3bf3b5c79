"""A study: one experiment file with several methods, several seeds, and a grid over any field."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import Experiment, check_keys, renamed, resolve
from fedblend.experiment.presets import overlay
from fedblend.experiment.tables import set_field

STUDY_KEYS = ("methods", "seeds", "grid", "variants")
"""Keys of a file that make it a study; every other key belongs to each of its experiments."""


@dataclass(frozen=True)
class Study:
    """Experiments by the name of their run directory inside the study's folder."""

    name: str
    experiments: dict[str, Experiment]


def expand(table: Mapping[str, Any], seeds: Sequence[int] | None = None) -> Study:
    """All experiments of a file: methods x grid x seeds, and those of its variants.

    ``seeds`` replaces the file's. Raises :class:`FedblendError` with one message that names the field.
    """
    table = renamed(table)
    check_keys(table, STUDY_KEYS)
    base = {k: v for k, v in table.items() if k not in STUDY_KEYS}
    methods = _methods(table, base)
    grid = _grid(table.get("grid", {}))
    chosen = _seeds(table.get("seeds") if seeds is None else list(seeds), base)
    experiments: dict[str, Experiment] = {}
    for method, cell, seed in itertools.product(methods, grid, chosen):
        one = copy.deepcopy(base)
        if method is not None:
            one["method"] = copy.deepcopy(method)
        for path, value in cell.items():
            set_field(one, path, value)
        one["seed"] = seed
        label = _label(one, method, methods, cell)
        if label and isinstance(one.get("method", {}), (str, Mapping)):
            set_field(one, "method.label", label)
        try:
            experiment = resolve(one)
        except FedblendError:
            for field in cell:
                _require_in_all(field, base, methods)
            raise
        slug = f"{slugify(experiment.method.label or experiment.method.name)}-seed{seed}"
        if slug in experiments:
            raise FedblendError(f"methods: two runs would both be called '{slug}'; give them labels of their own")
        experiments[slug] = experiment
    for variant in _variants(table, base):
        more = expand(variant, chosen).experiments
        if both := sorted(set(more) & set(experiments)):
            raise FedblendError(f"variants: two runs would both be called '{both[0]}'; give them labels of their own")
        experiments |= more
    return Study(str(base.get("name", "experiment")), experiments)


def _variants(table: Mapping[str, Any], base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of each variant: the file's without its methods and grid, and the variant's own laid over it."""
    given = table.get("variants", [])
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise FedblendError(f"variants: {given!r} is not valid: write a table [[variants]] for each")
    for key in ("name", "seeds", "variants"):
        if any(key in one for one in given):
            raise FedblendError(f"variants.{key}: is the whole file's; write it at the top of the file")
    plain = {key: value for key, value in base.items() if key != "method"}
    return [{**copy.deepcopy(plain), **{key: _over(plain.get(key), one[key]) for key in one}} for one in given]


def _over(below: Any, given: Any) -> Any:
    """A variant's value laid over the file's: options over a part's or a table's, else in its place."""
    if isinstance(below, str) and isinstance(given, Mapping):
        below = {"name": below}
    return overlay(below, given)


def _require_in_all(field: str, base: Mapping[str, Any], methods: Sequence[Mapping[str, Any] | None]) -> None:
    """Raise an error that names the methods that lack a field of the grid, if others have it."""
    try:
        made = [resolve({**base, **({"method": method} if method else {})}) for method in methods]
    except FedblendError:
        # A method that cannot be made without the grid; its own message says why it cannot be with it either.
        return
    lacking = [e.method.label or e.method.name for e in made if not registry.has_option(e, field)]
    if lacking and len(lacking) < len(made):
        raise FedblendError(
            f"grid: {field} is a field of some of this study's methods but not of {' or '.join(lacking)}; write an "
            "entry for each value of the methods that have it under [[methods]], or run the others from another file"
        ) from None


def _methods(table: Mapping[str, Any], base: Mapping[str, Any]) -> list[dict[str, Any] | None]:
    if "methods" not in table:
        return [None]
    given = table["methods"]
    if "method" in base:
        raise FedblendError("methods: stands beside 'method'; a file has one or the other")
    if not isinstance(given, list) or not given or not all(isinstance(m, (str, Mapping)) for m in given):
        raise FedblendError(
            f'methods: {given!r} is not valid: write a list, such as ["fedavg", "fedmix"] or [[methods]]'
        )
    return [{"name": m} if isinstance(m, str) else dict(m) for m in given]


def _grid(given: Any) -> list[dict[str, Any]]:
    if isinstance(given, Mapping) and "seed" in given:
        raise FedblendError(f"grid.seed: {given['seed']!r}: seeds are no part of a grid; write seeds = [0, 1, 2]")
    if not isinstance(given, Mapping) or not all(isinstance(v, list) and v for v in given.values()):
        raise FedblendError(f'grid: {given!r} is not valid: write lists by field, such as "train.lr" = [0.01, 0.1]')
    return [dict(zip(given, values, strict=True)) for values in itertools.product(*given.values())]


def _seeds(given: Any, base: Mapping[str, Any]) -> list[int]:
    if given is None:
        return [base.get("seed", 0)]
    whole = isinstance(given, list) and given and all(isinstance(s, int) and not isinstance(s, bool) for s in given)
    if not whole or len(set(given)) != len(given):
        raise FedblendError(
            f"seeds: {given!r} is not valid: write a list of different whole numbers, such as [0, 1, 2]"
        )
    return list(given)


def _label(
    one: Mapping[str, Any],
    method: Mapping[str, Any] | None,
    methods: Sequence[Mapping[str, Any] | None],
    cell: Mapping[str, Any],
) -> str:
    """A name that tells this run's method from the study's others; empty where the method's own does."""
    spec = one.get("method", {})
    if not isinstance(spec, Mapping):
        spec = {"name": spec}
    label = str(spec.get("label", ""))
    name = str(spec.get("name", "custom"))
    alike = method is not None and sum(m is not None and m.get("name") == method.get("name") for m in methods) > 1
    if not label and alike:
        assert method is not None
        label = " ".join([name, *_options({k: v for k, v in method.items() if k not in ("name", "label")})])
    if cell:
        label = " ".join([label or name, *(f"{_last(path)}={_short(v)}" for path, v in cell.items())])
    return label


def _options(spec: Mapping[str, Any]) -> list[str]:
    """``key=value`` of all leaves of a table."""
    words = []
    for key, value in spec.items():
        words += _options(value) if isinstance(value, Mapping) else [f"{key}={_short(value)}"]
    return words


def _last(path: str) -> str:
    """What a field's path ends in; ``scale.name`` names the scale."""
    return path.removesuffix(".name").split(".")[-1]


def _short(value: Any) -> str:
    return str(value.get("name", value)) if isinstance(value, Mapping) else str(value)


def slugify(label: str) -> str:
    """A label as a folder's name.

    >>> slugify("fedmix lambda=0.05")
    'fedmix-lambda-0.05'
    """
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", label).strip("-.") or "run"
