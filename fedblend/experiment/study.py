"""A study: one file of several experiments, by methods, seeds, variants, and a grid over any fields."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal

import pydantic
from pydantic import Field

from fedblend.core import registry
from fedblend.core.errors import FedblendError, brief
from fedblend.core.registry import Count, Float, Int, Positive
from fedblend.experiment.changes import change_field, override
from fedblend.experiment.config import Experiment, check_keys, resolve
from fedblend.experiment.fields import LONGEST_NAME, FrozenTable, Method
from fedblend.experiment.parts import has_option
from fedblend.experiment.toml_tables import set_field

STUDY_KEYS = ("methods", "seeds", "grid", "variants", "tune")
"""Keys of a file that are of all its experiments together; all other keys apply to each of its experiments."""


@dataclass(frozen=True)
class Study:
    """A named set of experiments."""

    name: str
    experiments: dict[str, Experiment]
    """Experiments by the name of their run directory in the study's folder."""


def expand(table: Mapping[str, Any], seeds: Sequence[int] | None = None) -> Study:
    """All experiments of a file: methods x grid x seeds, and those of its variants.

    ``seeds`` replaces the file's. A table ``tune`` must be valid, and has no effect: its fields have the file's values.
    """
    check_keys(table, STUDY_KEYS)
    if "tune" in table:
        read_tune(table)
    base = {k: v for k, v in table.items() if k not in STUDY_KEYS}
    variants = _variants(table, base)
    methods = _methods(table, base, variants)
    grid = _grid(table.get("grid", {}))
    if "seed" in table and "seeds" in table:
        given = f"seed: {brief(table['seed'])} and seeds: {brief(table['seeds'])}"
        raise FedblendError(f"{given} are both given; give one of them")
    chosen = _seeds(table.get("seeds") if seeds is None else list(seeds), base)
    experiments: dict[str, Experiment] = {}
    for method, (cell, words), seed in itertools.product(methods, grid, chosen):
        one = copy.deepcopy(base)
        if method is not None:
            one["method"] = copy.deepcopy(method)
        for path, value in cell.items():
            change_field(one, path, value)
        one["seed"] = seed
        label = " ".join(filter(None, [_label(one, method, methods, bool(words)), *words]))
        if words and len(label) > LONGEST_NAME:
            told = f"grid: a run's label of its method and fields has {len(label)} characters ({brief(label)})"
            raise FedblendError(f"{told}; valid: at most {LONGEST_NAME}; shorten methods' labels, or give fewer fields")
        if label and isinstance(one.get("method", {}), (str, Mapping)):
            set_field(one, "method.label", label)
        try:
            experiment = resolve(one)
        except FedblendError:
            for field in cell:
                _require_in_all(field, base, methods)
            raise
        add_experiment(experiments, experiment, "methods and grid" if words else "methods")
    for variant in variants:
        more = expand(variant, chosen).experiments
        if both := sorted(set(more) & set(experiments)):
            raise _same_folder("variants", both[0], experiments[both[0]], more[both[0]])
        experiments |= more
    return Study(str(base.get("name", "experiment")), experiments)


def _same_folder(field: str, slug: str, *runs: Experiment) -> FedblendError:
    labels, of, how = list(dict.fromkeys(brief(run.method.label) for run in runs if run.method.label)), "", ""
    if len(labels) > 1:
        of, how = f", of the labels {' and '.join(labels)}", ", which differ in letters A to Z or digits"
    return FedblendError(f"{field}: two runs would both be called '{slug}'{of}; give them labels of their own{how}")


def add_experiment(experiments: dict[str, Experiment], one: Experiment, field: str) -> None:
    """Add an experiment under its run's name. Raises :class:`FedblendError` that names ``field`` if it is taken."""
    slug = f"{slugify(one.method.label or one.method.name)}-seed{one.seed}"
    if slug in experiments:
        raise _same_folder(field, slug, experiments[slug], one)
    experiments[slug] = one


def _variants(table: Mapping[str, Any], base: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The table of each variant: the file's table without its methods and grid, updated with the variant's own."""
    given = table.get("variants", [])
    if not isinstance(given, list) or not all(isinstance(one, Mapping) for one in given):
        raise FedblendError(f"variants: {brief(given)} is not valid: write a table [[variants]] for each")
    for key in ("name", "seed", "seeds", "variants"):
        if any(key in one for one in given):
            raise FedblendError(f"variants.{key}: applies to the whole file; write it at the top of the file")
    plain = {key: value for key, value in base.items() if key != "method"}
    return [override(Experiment, plain, one) for one in given]


def _require_in_all(field: str, base: Mapping[str, Any], methods: Sequence[Mapping[str, Any] | None]) -> None:
    try:
        resolved = [resolve({**base, **({"method": method} if method else {})}) for method in methods]
    except FedblendError:
        # This method is invalid without the grid too; the caller raises the error of the method itself.
        return
    missing = [e.method.label or e.method.name for e in resolved if not has_option(e, field)]
    if missing and len(missing) < len(resolved):
        told = f"is a field of some of this study's methods but not of {' or '.join(missing)}"
        how = "write an entry for each value of the methods that have it under [[methods]], or run the others apart"
        raise FedblendError(f"grid: {field} {told}; {how}") from None


def _methods(
    table: Mapping[str, Any], base: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any] | None]:
    """The file's own methods: none where only its variants name methods; None for the method of ``base`` or FedAvg."""
    if "methods" not in table:
        variants_only = bool(variants) and all({"method", "methods"} & set(one) for one in variants)
        return [] if variants_only and "method" not in base and "grid" not in table else [None]
    given = table["methods"]
    if "method" in base:
        raise FedblendError("methods: cannot be combined with 'method'; give only one of them")
    if not isinstance(given, list) or not given or not all(isinstance(m, (str, Mapping)) for m in given):
        how = 'write a list, such as ["fedavg", "fedmix"] or [[methods]]'
        raise FedblendError(f"methods: {brief(given)} is not valid: {how}")
    return [{"name": m} if isinstance(m, str) else dict(m) for m in given]


def _grid(given: Any) -> list[tuple[dict[str, Any], list[str]]]:
    """The cells of a grid: values by field, and the words of each field in labels."""
    if isinstance(given, Mapping) and "seed" in given:
        raise FedblendError(f"grid.seed: {brief(given['seed'])}: a grid cannot contain seeds; write seeds = [0, 1, 2]")
    if not isinstance(given, Mapping) or not all(isinstance(v, list) and v for v in given.values()):
        valid = 'write lists by field, such as "train.lr" = [0.01, 0.1]'
        raise FedblendError(f"grid: {brief(given)} is not valid: {valid}")
    words = [_words(path, values, LONGEST_NAME // (1 + len(given))) for path, values in given.items()]
    cells = zip(itertools.product(*given.values()), itertools.product(*words), strict=True)
    return [(dict(zip(given, values, strict=True)), list(chosen)) for values, chosen in cells]


def _words(path: str, values: Sequence[Any], longest: int) -> list[str]:
    """``field=value`` of each value of a grid's field. Parts have their options where their names are not enough.

    Values whose words would be alike, or above ``longest`` characters, are numbered.
    """
    texts = [repr(value) for value in values]
    if twice := [value for i, value in enumerate(values) if texts[i] in texts[:i]]:
        raise FedblendError(f"grid: {path}: {brief(twice[0])} is listed twice; write a list of different values")
    # `scale.name` is labelled `scale`.
    field = path.removesuffix(".name").split(".")[-1]
    for text_of in (_short, _with_options):
        words = [f"{field}={text_of(value)}" for value in values]
        if len(set(map(slugify, words))) == len(words) and max(map(len, words)) <= longest:
            return words
    return [f"{field}=#{number}" for number in range(1, len(values) + 1)]


def _seeds(given: Any, base: Mapping[str, Any]) -> list[int]:
    if given is None:
        return [base.get("seed", 0)]
    # A range, a tuple or NumPy's numbers in Python.
    seeds = list(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else []
    valid = seeds and all(isinstance(s, Integral) and not isinstance(s, bool) for s in seeds)
    if not valid or len(set(seeds)) != len(seeds):
        how = "write a list of different whole numbers, such as [0, 1, 2]"
        raise FedblendError(f"seeds: {brief(given)} is not valid: {how}")
    return [int(seed) for seed in seeds]


def _label(
    one: Mapping[str, Any], method: Mapping[str, Any] | None, methods: Sequence[Mapping[str, Any] | None], words: bool
) -> str:
    """A label of this run's method; empty if its name suffices, unless ``words`` of a grid follow."""
    spec = one.get("method", {})
    if not isinstance(spec, Mapping):
        spec = {"name": spec}
    label = str(spec.get("label", ""))
    try:
        name = Method(**spec).name
    except (FedblendError, pydantic.ValidationError):
        return label  # expand() raises the error of the invalid method
    same_name = method is not None and sum(m is not None and m.get("name") == method.get("name") for m in methods) > 1
    if not label and same_name and method:
        label = " ".join([name, *_options(method, ("name", "label"))])
    return label or (name if words else "")


def _options(spec: Mapping[str, Any], left_out: Sequence[str] = ("name",)) -> list[str]:
    words = []
    for key, value in spec.items():
        if key not in left_out:
            words += _options(value, ()) if isinstance(value, Mapping) else [f"{key}={value}"]
    return words


def _short(value: Any) -> str:
    return str(value.get("name", value)) if isinstance(value, Mapping) else str(value)


def _with_options(value: Any) -> str:
    return " ".join([_short(value), *(_options(value) if isinstance(value, Mapping) else ())])


def slugify(label: str) -> str:
    """A label as the name of a folder.

    >>> slugify("fedmix lambda=0.05")
    'fedmix-lambda-0.05'
    """
    return re.sub(r"[^A-Za-z0-9.+_]+", "-", label).strip("-.") or "run"


# The table [tune] --------------------------------------------------------------------------------------------


class Interval(FrozenTable):
    """The values from ``low`` to ``high``: whole numbers if both are."""

    low: Int | Float
    """The least value."""
    high: Int | Float
    """The largest value."""
    log: bool = False
    """Whether values are drawn on a logarithmic scale, as suits learning rates."""

    @pydantic.model_validator(mode="after")
    def _require_an_interval(self) -> Interval:
        if not self.low < self.high or (self.log and self.low <= 0):
            bound = "above 0 and " if self.log else ""
            raise ValueError(f"low {self.low:g}, high {self.high:g} is no interval; valid: low {bound}below high")
        return self


class Tune(FrozenTable):
    """A search for the best values of fields, on validation samples. Every method has the same budget."""

    fields: dict[str, list[Any] | Interval] = Field(min_length=1)
    """The fields by their path, such as "train.lr": a list of values, or a table with `low`, `high` and `log`. A method
    without a field is searched over the others. At least one method must have each field.
    """
    search: Literal["random", "grid", "tpe"] = "random"
    """How values are chosen: at random, all combinations of lists, or by a tree of Parzen estimators (Optuna's TPE)."""
    trials: Count | None = None
    """Most trials of a method (default: 20, in a grid all)."""
    rounds: Count | None = None
    """Most rounds of a method over all its trials; no further trial begins after them."""
    minutes: Positive | None = None
    """Most minutes of a method over all its trials, those before an interruption too; no further trial begins after
    them.
    """
    halving: bool = False
    """End trials once, after a third of the rounds, that are not among the best third at that round (the first step of
    successive halving). All others make all their rounds.
    """

    @pydantic.model_validator(mode="after")
    def _require_values(self) -> Tune:
        for field, values in self.fields.items():
            if field == "seed":
                valid = "seeds = [0, 1, 2] for the best values"
                raise ValueError(f"fields.seed: a search would choose the seed; valid: {valid}")
            if values == []:
                raise ValueError(f"fields.{field}: [] is not valid: at least one value is needed")
            if self.search == "grid" and isinstance(values, Interval):
                raise ValueError(f"fields.{field}: search = 'grid' needs a list of values, not an interval")
        return self

    def trials_of(self, fields: Mapping[str, Any]) -> int:
        """Most trials of a method with these of the fields."""
        if self.search != "grid":
            return self.trials or 20
        cells = math.prod(len(values) for values in fields.values())
        return min(cells, self.trials or cells)


def read_tune(table: Mapping[str, Any]) -> Tune:
    """The table ``tune`` of a file. Raises :class:`FedblendError` if it is missing or invalid."""
    given = table.get("tune")
    if not isinstance(given, Mapping):
        example = '"train.lr" = { low = 0.001, high = 1.0, log = true }'
        raise FedblendError(f"tune: is missing; say what to search, such as [tune.fields] with {example}")
    for key in ("grid", "variants"):
        if key in table:
            raise FedblendError(f"{key}: not valid beside 'tune'; write its fields under [tune.fields]")
    try:
        return Tune(**given)
    except pydantic.ValidationError as error:
        raise FedblendError(registry.explain(error, "tune")) from None
