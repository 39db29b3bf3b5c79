"""One experiment as typed, validated data: TOML in, TOML out."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import tomli_w
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from fedblend import methods, parts
from fedblend.errors import FedblendError, did_you_mean
from fedblend.parts import Count, Fraction, NonNegative, Positive


class _Table(BaseModel):
    """A table of an experiment file: unknown keys are refused, values cannot be changed."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


def _part(kind: str, where: str = "") -> Any:
    """The type of a field that holds a part of ``kind``, given by name, as a table, or ready made.

    ``where`` is the field's path in a file, where that is not the kind's name.
    """

    def read(spec: Any) -> Any:
        return parts.build(kind, spec, where or kind)

    return Annotated[Any, BeforeValidator(read), PlainSerializer(parts.dump)]


def _terms(specs: Any) -> tuple[Any, ...]:
    if isinstance(specs, (str, Mapping)):
        specs = [specs]
    if not isinstance(specs, (list, tuple)):
        raise FedblendError(f'method.terms: {specs!r} is not valid: write a list, such as ["proximal"]')
    return tuple(parts.build("term", spec, f"method.terms[{i}]") for i, spec in enumerate(specs))


class Train(_Table):
    """Local training: SGD at lr * lr_decay^round; FedMix's settings by default (appendix B).

    A client's last, smaller batch is kept. ``clip_norm`` bounds the norm of each step's gradient.
    """

    cohort: Count = 10
    epochs: Count = 2
    batch_size: Count = 10
    lr: Positive = 0.01
    lr_decay: Annotated[float, Field(gt=0, le=1)] = 0.999
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None


class Method(_Table):
    """A method as a composition of parts; presets with names are in :mod:`fedblend.methods`.

    ``label`` is what tables and figures call it, where that is not its name.
    """

    name: str = "custom"
    label: str = ""
    sharing: _part("sharing", "method.sharing") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    objective: _part("objective", "method.objective") = Field(default="plain", validate_default=True)  # type: ignore[valid-type]
    terms: Annotated[
        tuple[Any, ...], BeforeValidator(_terms), PlainSerializer(lambda t: [parts.dump(p) for p in t])
    ] = ()
    aggregator: _part("aggregator", "method.aggregator") = Field(default="mean", validate_default=True)  # type: ignore[valid-type]
    server_step: _part("server_step", "method.server_step") = Field(default="none", validate_default=True)  # type: ignore[valid-type]

    @pydantic.model_validator(mode="before")
    @classmethod
    def _expand(cls, spec: Any) -> Any:
        if isinstance(spec, str):
            spec = {"name": spec}
        if not isinstance(spec, Mapping):
            return spec
        # A resolved method names its parts in full; laying them over the preset changes nothing then.
        name = spec.get("name", "custom")
        return {
            "name": name,
            **methods.expand({k: v for k, v in spec.items() if (k, v) != ("name", "custom")}),
        }


class Policy(_Table):
    """What a client refuses: sharing means of fewer than ``min_mean`` samples (unless unsafe)."""

    min_mean: Count = 2


class Arrival(_Table):
    """Data that arrive while training goes on (FedMix, section 3.4).

    Each client starts with the share ``first`` of its samples; in every round each client gets, with
    probability ``clients``, a further share ``portion`` of them.
    """

    first: Fraction = 0.5
    clients: Fraction = 0.1
    portion: Fraction = 0.1


class Experiment(_Table):
    """One run: data, split, model, local training, method, and how it is evaluated.

    Made from a TOML file by :func:`load`, or in Python::

        Experiment(data="mnist5k", partition={"name": "classes", "clients": 20}, method="fedmix")
    """

    name: str = "experiment"
    seed: Annotated[int, Field(ge=0)] = 0
    rounds: Annotated[int, Field(ge=0)] = 10
    eval_every: Count = 1
    target: Fraction | None = None
    unsafe: bool = False
    data: _part("dataset", "data")  # type: ignore[valid-type]
    scale: _part("scale") = Field(default="standard", validate_default=True)  # type: ignore[valid-type]
    partition: _part("partition")  # type: ignore[valid-type]
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    arrival: Arrival | None = None
    model: _part("model") = Field(default="lenet5", validate_default=True)  # type: ignore[valid-type]
    train: Train = Train()
    method: Method = Method()
    channel: _part("channel") = Field(default="ideal", validate_default=True)  # type: ignore[valid-type]
    protection: _part("protection") = Field(default="none", validate_default=True)  # type: ignore[valid-type]
    policy: Policy = Policy()
    min_uploads: Count = 1
    checkpoint_every: Count = 1
    engine: Literal["loop"] = "loop"
    device: str = "cpu"

    @pydantic.model_validator(mode="after")
    def _agree(self) -> Experiment:
        sharing, objective = self.method.sharing, self.method.objective
        for made in (sharing, objective):
            if (getattr(made, "unsafe", False) or getattr(made, "breaks_privacy", False)) and not self.unsafe:
                raise ValueError(
                    f"unsafe: false does not allow '{made.name}', which gives raw samples away; "
                    "set unsafe = true to run it as an upper bound"
                )
        if getattr(sharing, "samples_per_mean", None) == 1 and not self.unsafe:
            raise ValueError(
                "method.sharing.samples_per_mean: 1 would send raw samples as 'means'; "
                'valid: 2 or more, or "all" (or unsafe = true)'
            )
        if self.policy.min_mean == 1 and sharing.travels and sharing.bytes_kind == "means" and not self.unsafe:
            raise ValueError(
                "policy.min_mean: 1 would let a single sample leave a client as a 'mean'; valid: 2 or more "
                "(or unsafe = true)"
            )
        if objective.needs and not sharing.active:
            raise ValueError(
                f"method.sharing: '{sharing.name}' gives nothing, but the objective '{objective.name}' needs "
                f"{', '.join(objective.needs)}; valid: means, local-means, noise, hidden-means or raw"
            )
        if not sharing.travels and getattr(sharing, "server_average", 1) > 1:
            raise ValueError(
                f"method.sharing.server_average: {sharing.server_average}: means of '{sharing.name}' never reach "
                "the server, which could not average them; valid: 1"
            )
        if getattr(sharing, "layer", None) != getattr(objective, "layer", None):
            raise ValueError(
                f"method.sharing.layer: {getattr(sharing, 'layer', None)} and method.objective.layer: "
                f"{getattr(objective, 'layer', None)} differ; both must name the same layer of hidden states"
            )
        if self.min_uploads > self.train.cohort:
            raise ValueError(
                f"min_uploads: {self.min_uploads} is more than train.cohort: {self.train.cohort}; "
                "no round could have enough uploads"
            )
        return self


TABLES: dict[str, type[BaseModel]] = {"train": Train, "method": Method, "policy": Policy, "arrival": Arrival}
"""Fields of an experiment that are tables of their own."""


def resolve(table: Mapping[str, Any]) -> Experiment:
    """An experiment from plain data. Raises :class:`FedblendError` with one message that names the field."""
    _check_keys(table, Experiment)
    try:
        return Experiment(**dict(table))
    except pydantic.ValidationError as error:
        raise FedblendError(parts.explain(error)) from None


def _check_keys(table: Mapping[str, Any], model: type[BaseModel], where: str = "") -> None:
    """Refuse unknown keys with the nearest known one suggested."""
    for key, value in table.items():
        path = f"{where}{key}"
        if key not in model.model_fields:
            valid = ", ".join(model.model_fields)
            raise FedblendError(f"{path}: unknown key{did_you_mean(key, model.model_fields)}; valid: {valid}")
        inner = {"train": Train, "method": Method, "policy": Policy, "arrival": Arrival}.get(key) if not where else None
        if inner and isinstance(value, Mapping):
            _check_keys(value, inner, f"{path}.")  # type: ignore[arg-type]


def as_table(experiment: Experiment) -> dict[str, Any]:
    """The full resolved experiment as plain data that :func:`resolve` reads back to the same experiment."""
    return _without_none(experiment.model_dump())


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_none(v) for k, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, (list, tuple)) else value


def read_toml(path: str | Path) -> dict[str, Any]:
    """A TOML file as plain data. Raises :class:`FedblendError` if it is missing or malformed."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FedblendError(f"{path}: no such file; give the path of an experiment file (TOML)") from None
    except IsADirectoryError:
        raise FedblendError(f"{path}: is a folder; give the path of an experiment file (TOML)") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FedblendError(f"{path}: is not valid TOML: {error}") from None


def write_toml(table: Mapping[str, Any]) -> str:
    """Plain data as TOML text."""
    return tomli_w.dumps(dict(table))


def set_field(table: dict[str, Any], path: str, value: Any) -> None:
    """Set ``a.b.c`` in nested tables, in place; names given as bare strings become tables on the way."""
    *outer, last = path.split(".")
    for step in outer:
        inner = table.get(step)
        if isinstance(inner, str):
            inner = {"name": inner}
        table[step] = dict(inner) if isinstance(inner, Mapping) else {}
        table = table[step]
    table[last] = value


def parse_value(text: str) -> Any:
    """A value from the command line, read as TOML where it is TOML, else as a plain string.

    >>> parse_value("0.1"), parse_value("true"), parse_value("fedmix"), parse_value("[1, 2]")
    (0.1, True, 'fedmix', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
