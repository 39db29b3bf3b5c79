"""Parts of the user's own, checked where they are declared, and all parts as tables of an experiment file."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, dataclass_transform

from fedblend.core import registry
from fedblend.core.errors import FedblendError, brief, did_you_mean, or_valid
from fedblend.core.part import MODULES
from fedblend.core.registry import FILE_WORDS, WrongOption, fields_of, is_own, known

T = TypeVar("T")

BASES = {
    "sharing": "fedblend.core.sharing:Sharing",
    "objective": "fedblend.core.objective:Objective",
    "term": "fedblend.core.objective:Term",
    "personal": "fedblend.core.objective:Personal",
    "optimizer": "fedblend.core.optimizer:Optimizer",
    "schedule": "fedblend.core.optimizer:Schedule",
    "upload": "fedblend.core.upload:Upload",
    "aggregator": "fedblend.core.aggregator:Aggregator",
    "server_step": "fedblend.core.server_step:ServerStep",
    "selection": "fedblend.core.selection:Selection",
    "channel": "fedblend.core.channel:Channel",
    "protection": "fedblend.core.protection:Protection",
    "adversary": "fedblend.core.protection:Adversary",
    "metric": "fedblend.core.metric:Metric",
    "callback": "fedblend.core.callbacks:Callback",
}
"""The base class of each kind of part that has one in the core."""

METHODS = {
    "dataset": ("load", "self"),
    "scale": ("fit", "self", "data"),
    "partition": ("split", "self", "labels", "classes", "seed", "natural"),
    "model": ("build", "self", "shape", "outputs"),
}
"""The method, with its parameters, of the kinds of part that have no base class."""


@dataclass_transform(frozen_default=True, kw_only_default=False)
def part(kind: str, name: str) -> Callable[[type[T]], type[T]]:
    """Declare a class of your own as the part ``name`` of ``kind``: a frozen, validated dataclass.

    Raises :class:`FedblendError` if there is no such kind or another class has that name, or if the class does not
    inherit from the kind's base class, lacks a method, or has one that cannot be called as the base's.
    """
    if kind not in MODULES:
        raise FedblendError(f"part: unknown kind {brief(kind)}{or_valid(str(kind), MODULES)}")

    def declare(cls: type[T]) -> type[T]:
        require_usable(kind, name, cls)
        return registry.part(kind, name)(cls)

    return declare


def require_usable(kind: str, name: str, cls: type) -> None:
    """Raise :class:`FedblendError` unless a class can stand where a part of its kind is expected."""
    what = f"the {kind} '{name}'"
    if kind in METHODS:
        attribute, *parameters = METHODS[kind]
        expected = inspect.Signature([inspect.Parameter(one, inspect.Parameter.POSITIONAL_ONLY) for one in parameters])
        _require_one(what, cls, attribute, object, _definition(attribute, expected))
        _require_callable(what, cls, attribute, expected)
    if kind not in BASES:
        return
    module, _, word = BASES[kind].partition(":")
    base = getattr(importlib.import_module(module), word)
    if not issubclass(cls, base):
        valid = f"class {cls.__name__}({word}), with {word} from {module}"
        raise FedblendError(f"{what} does not inherit from {word}; valid: {valid}")
    renamed = {old: new for one in base.__mro__ for old, new in vars(one).get("renamed", {}).items()}
    for old, new in renamed.items():
        if any(old in vars(one) for one in cls.__mro__ if not one.__module__.startswith("fedblend.")):
            raise FedblendError(f"{what} has {old}, which fedblend 0.3 no longer reads; valid: {new}")
    for choice in base.to_define:
        _require_one(what, cls, choice, base, f"methods as in {word}")
    for attribute, of_base in ((one, inspect.getattr_static(base, one)) for one in dir(base)):
        if inspect.isfunction(of_base) and not attribute.startswith("_"):
            _require_callable(what, cls, attribute, inspect.signature(of_base))


def _require_one(what: str, cls: type, choice: str, base: type, valid: str) -> None:
    """Raise :class:`FedblendError` unless a class defines one of ``"a or b"`` anew, as a method or a field."""
    words = choice.split(" or ")
    fields = {
        field for one in cls.__mro__ if not issubclass(base, one) for field in vars(one).get("__annotations__", ())
    }
    static = inspect.getattr_static
    if fields.isdisjoint(words) and all(static(cls, word, None) is static(base, word, None) for word in words):
        own = [word for word in dir(cls) if not hasattr(base, word)]
        alike = next(filter(None, (did_you_mean(word, own) for word in words)), "")
        raise FedblendError(f"{what} defines no {choice}{alike.replace('did you mean', 'is it')}; valid: {valid}")


def _require_callable(what: str, cls: type, attribute: str, expected: inspect.Signature) -> None:
    """Raise :class:`FedblendError` if a function of a class cannot be called with the arguments that are always given.

    A function that a decorator wraps is judged by its wrapper, which is what is called.
    """
    function = inspect.getattr_static(cls, attribute)
    given = [name for name, one in expected.parameters.items() if one.default is one.empty]
    try:
        if inspect.isfunction(function):
            inspect.signature(function, follow_wrapped=False).bind(*given)
    except TypeError as error:
        valid = _definition(attribute, expected)
        raise FedblendError(f"{what}: {attribute} cannot be called: {error}; valid: {valid}") from None


def _definition(attribute: str, signature: inspect.Signature) -> str:
    """A function's first line without annotations."""
    plain = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
    return f"def {attribute}({', '.join(map(str, plain))})"


def takes(cls: type, option: str, value: Any) -> bool:
    """Whether a class of parts has an option, as a file spells it, for which a value is valid by itself.

    >>> [takes(registry.find("partition", "iid"), "clients", value) for value in (20, 0)]
    [True, False]
    """
    python = next((field for field, word in FILE_WORDS.items() if word == option), option)
    if not dataclasses.is_dataclass(cls) or python not in fields_of(cls):
        return False
    try:
        cls(**{python: value})
    except WrongOption as wrong:
        # Other options may be required.
        return wrong.cls is cls and all(fault["loc"][:1] != (python,) for fault in wrong.error.errors())
    except FedblendError:
        return False
    return True


def has_option(part_or_table: Any, path: str) -> bool:
    """Whether ``a.b.c``, as a file spells it, names a field of a part or table, or one further inside.

    >>> fedmix, plain = registry.build("objective", "fedmix"), registry.build("objective", "plain")
    >>> has_option(fedmix, "lambda"), has_option(plain, "lambda")
    (True, False)
    """
    word, _, rest = path.partition(".")
    if isinstance(part_or_table, (list, tuple)):  # parts by their names
        parts = [part for part in part_or_table if getattr(part, "name", None) == word]
        return any(not rest or has_option(part, rest) for part in parts)
    fields = {FILE_WORDS.get(field, field): value for field, value in getattr(part_or_table, "__dict__", {}).items()}
    if word == "name" or isinstance(part_or_table, Mapping):
        return True
    return word in fields and (not rest or has_option(fields[word], rest))


def dump(part: Any) -> dict[str, Any]:
    """A part as the table that builds it again; options that are ``None`` are left out (TOML has no null)."""
    cls = type(part)
    declared = is_own(cls) and known(cls.kind).get(cls.name) is cls
    table: dict[str, Any] = {"name": cls.name if declared else f"{cls.__module__}:{cls.__qualname__}"}
    for field in fields_of(cls):
        value = getattr(part, field)
        if value is not None:
            table[FILE_WORDS.get(field, field)] = _plain(value)
    return table


def _plain(value: Any) -> Any:
    if getattr(type(value), "kind", None) in MODULES:  # a part within a part
        return dump(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, (list, tuple)) else value
