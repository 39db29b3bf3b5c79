"""Parts: small frozen dataclasses, each found by its kind and its name.

A part is declared in the file of its idea::

    @part("objective", "fedmix")
    class FedMix:
        lam: Fraction = 0.1

and named in an experiment file as ``objective = {name = "fedmix", lambda = 0.2}``. A part of the
user's own is named by its dotted path: ``{name = "my_module:MyObjective"}``. A part of an installed package
also has a name, if the package declares an entry point in the group of its kind, such as ``fedblend.objective``.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pkgutil
import sysconfig
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any, TypeVar, dataclass_transform

import pydantic
import pydantic.dataclasses
from pydantic import BeforeValidator, ConfigDict, Field, Strict
from pydantic_core import ErrorDetails

from fedblend.core.errors import FedblendError, brief, legible, or_valid
from fedblend.core.part import MODULES
from fedblend.core.paths import absolute

T = TypeVar("T")

LARGEST_INT = 2**63 - 1
"""Largest whole number of 64 bits, as arrays and tensors hold it."""
LARGEST_FLOAT = 1e38
"""The largest number of a field. float32 holds it too."""

Int = Annotated[int, Strict(), Field(ge=-LARGEST_INT, le=LARGEST_INT)]
"""A whole number of 64 bits; ``true`` and "2" are refused."""
Float = Annotated[float, Strict(), Field(allow_inf_nan=False, ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)]
"""A finite number; ``true`` and "2" are refused."""
Fraction = Annotated[Float, Field(ge=0, le=1)]
"""A number in [0, 1]."""
Positive = Annotated[Float, Field(gt=0)]
"""A number above 0."""
NonNegative = Annotated[Float, Field(ge=0)]
"""A number from 0 up."""
Count = Annotated[Int, Field(ge=1)]
"""A whole number from 1 up."""
FilePath = Annotated[str, BeforeValidator(absolute)]
"""A path of a file or folder: in an experiment file relative to it, else to the current folder; kept absolute."""

FILE_WORDS = {"lam": "lambda", "kind_": "kind"}
"""Fields whose natural name is a reserved word in Python, or a part's own: name in Python -> name in files."""

imported_from: set[str] = set()
"""Folders that parts of the user's own were imported from; a run keeps them, to be resumed elsewhere."""


class UntrustedCode(FedblendError):
    """Code that is not fedblend's own, named where it is not trusted."""


_trust: ContextVar[tuple[frozenset[str], str] | None] = ContextVar("trust", default=None)
"""The paths of code that may be imported, and how to trust more; ``None`` where all code is trusted."""

_registry: defaultdict[str, dict[str, type]] = defaultdict(dict)


@dataclass_transform(frozen_default=True, kw_only_default=False)
def part(kind: str, name: str) -> Callable[[type[T]], type[T]]:
    """Declare a class as the part ``name`` of ``kind``: a frozen, validated dataclass.

    Raises :class:`FedblendError` if another class has that name. ``fedblend.part`` checks the class of a user, too.
    """

    def declare(cls: type[T]) -> type[T]:
        declared = pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid"))(cls)
        declared.kind, declared.name = kind, name  # type: ignore[attr-defined]
        _refuse_in_one_line(declared)
        other = _registry[kind].setdefault(name, declared)
        if (other.__module__, other.__qualname__) != (declared.__module__, declared.__qualname__):
            raise FedblendError(f"the {kind} '{name}' exists already ({other.__module__}); give yours another name")
        _registry[kind][name] = declared
        return declared  # type: ignore[return-value]

    return declare


class WrongOption(FedblendError, ValueError):
    """An option of a part of the class ``cls`` that is made in Python; ``error`` is pydantic's."""

    cls: type
    error: pydantic.ValidationError


def _wrong_option(cls: type, error: pydantic.ValidationError) -> WrongOption:
    """The error with options as Python spells them."""
    first, options = error.errors(include_url=False)[0], fields_of(cls)
    place = first["loc"][0] if first["loc"] else ""
    if first["type"] == "unexpected_positional_argument":
        text = f"{cls.__name__}: {len(options)} options at most; valid: {', '.join(options) or 'none'}"
    elif first["type"] == "unexpected_keyword_argument":
        text = f"{cls.__name__}: no option {place}{or_valid(str(place), options)}"
    else:
        option = options[place] if isinstance(place, int) else place
        spelled = f"{cls.__name__}.{FILE_WORDS.get(str(place), place)}:"
        text = explain(error, cls.__name__).replace(spelled, f"{cls.__name__}.{option}:", 1)
    wrong = WrongOption(text)
    wrong.cls, wrong.error = cls, error
    return wrong


def _refuse_in_one_line(declared: type) -> None:
    """Let a part that is made in Python with a wrong option raise :class:`WrongOption` in place of pydantic's error."""
    init = declared.__init__  # type: ignore[misc]

    @functools.wraps(init)
    def make(self: Any, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except pydantic.ValidationError as error:
            raise _wrong_option(declared, error) from None

    declared.__init__ = make  # type: ignore[misc]


def known(kind: str) -> dict[str, type]:
    """All parts of a kind by name, module by module: those of every module in the kind's package."""
    if kind in MODULES:
        _import_parts(MODULES[kind])
    # In whatever order modules were imported.
    return dict(sorted(_registry[kind].items(), key=lambda item: item[1].__module__))


@functools.cache  # Reading an experiment looks up some twenty parts, and each would list a folder.
def _import_parts(name: str) -> None:
    """Import a package and each of its modules, which declares their parts."""
    package = importlib.import_module(name)
    for module in pkgutil.iter_modules(getattr(package, "__path__", ())):
        importlib.import_module(f"{name}.{module.name}")


def installed(kind: str) -> dict[str, str]:
    """The paths of other packages' parts of a kind by name: the entry points of the group ``fedblend.KIND``."""
    return {one.name: one.value for one in entry_points(group=f"fedblend.{kind}") if ":" in one.value}


def build(kind: str, spec: Any, where: str | None = None) -> Any:
    """Make a part of ``kind`` from a name, a table ``{name, **fields}`` or a part already made.

    ``where`` is the field's path in the experiment, for messages. Raises :class:`FedblendError`
    that names the field, the value and what would be valid.
    """
    where = where or kind
    if getattr(type(spec), "kind", None) == kind:
        return spec
    if isinstance(spec, type):
        raise FedblendError(f"{where}: {spec.__name__} is a class; write {spec.__name__}()")
    fields = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(fields, Mapping) or not isinstance(fields.get("name"), str):
        form = '[{name = "..."}]' if where.endswith("]") else '{name = "..."}'
        field = where.rpartition(".")[2].partition("[")[0]
        hint = f"; for an object of a class of your own put @part('{kind}', NAME) above the class"
        if kind == "dataset":
            hint = (
                '; arrays x and y: data = fedblend.from_torch(list(zip(x, y)), "mine.npz"); '
                'a data frame: write it to a .csv or .parquet file for {name = "table"}'
            )
        raise FedblendError(
            f"{where}: {brief(spec)} names no {kind}; write {field} = {form} with one of {', '.join(known(kind))}"
            + hint * (not isinstance(spec, str | int | float))
        )
    cls = find(kind, fields["name"], where)
    back = {word: python for python, word in FILE_WORDS.items() if python in fields_of(cls)}
    given = {back.get(k, k): v for k, v in fields.items() if k != "name"}
    for field in given:
        if field not in fields_of(cls):
            valid = or_valid(field, words_of(cls))
            raise FedblendError(f"{where}.{field}: unknown key for the {kind} '{fields['name']}'{valid}")
    try:
        return cls(**given)
    except WrongOption as wrong:
        # Of another part that this one makes, the message has the place.
        raise FedblendError(explain(wrong.error, where) if wrong.cls is cls else f"{where}: {wrong}") from None


def find(kind: str, name: str, where: str | None = None) -> type:
    """The class of the part ``name`` (or ``package.module:Class``) of ``kind``."""
    if ":" not in name and name not in known(kind):
        others = installed(kind)
        if name not in others:
            raise unknown(kind, name, [*known(kind), *others], where or kind)
        name = others[name]
    if ":" in name:
        cls = import_path(name, where or kind)
        if getattr(cls, "kind", None) != kind:
            remedy = f"put @part('{kind}', NAME) above the class"
            if kind == "model":
                remedy += f', or give {{name = "module", path = "{name}"}} for a torch.nn.Module'
            raise FedblendError(f"{where or kind}: '{name}' is no part of the kind '{kind}'; {remedy}")
        return cls
    cls = known(kind)[name]
    if not is_own(cls):  # a module that was imported for another part may have declared this one
        require_trusted(f"{cls.__module__}:{cls.__qualname__}", where or kind)
    return cls


def unknown(kind: str, name: str, names: Collection[str], where: str) -> FedblendError:
    """The error for a name that is not one of the ``names`` of the parts of a kind."""
    valid = or_valid(name, names, everything=f"fedblend list {kind}")
    return FedblendError(f"{where}.name: unknown {kind} '{name}'{valid}")


def is_own(cls: type) -> bool:
    """Whether a class is fedblend's own."""
    return cls.__module__.startswith("fedblend.")


@contextmanager
def trust_only(paths: Collection[str], remedy: str) -> Iterator[None]:
    """Refuse, inside the context, all code that is not fedblend's own, except the exact ``paths``.

    A path is ``package.module:Name``. ``remedy`` is the end of the message: how to trust the code.
    """
    outer = _trust.set((frozenset(paths), remedy))
    try:
        yield
    finally:
        _trust.reset(outer)


def trusts_all() -> bool:
    """Whether any code may be imported here."""
    return _trust.get() is None


def require_trusted(path: str, where: str) -> str:
    """Return a path that may be imported here. Raises :class:`UntrustedCode` for any other."""
    trust = _trust.get()
    if trust is not None and path not in trust[0]:
        # Whoever wrote the experiment chooses the path.
        raise UntrustedCode(f"{where}: '{legible(path)}' is not code of fedblend's own and is not trusted; {trust[1]}")
    return path


def import_path(path: str, where: str) -> Any:
    """The object at ``package.module:Name``.

    Raises :class:`FedblendError` if there is none, it is not trusted, or the module raises an error; it names the line.
    """
    require_trusted(path, where)
    module, _, attribute = path.partition(":")
    if module.startswith("."):
        raise FedblendError(f"{where}: '{path}' is relative; write package.module:Name")
    try:
        imported = importlib.import_module(module)
        found = getattr(imported, attribute)
    except UntrustedCode:
        raise
    except Exception as error:
        if not (line := _line_of(error)):
            remedy = "write package.module:Name"
            if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
                own = f"{module.replace('.', '/')}.py"
                remedy += f", with {own} beside the experiment file or in a folder of PYTHONPATH"
            raise FedblendError(f"{where}: cannot import '{path}': {error}; {remedy}") from None
        reason = getattr(error, "msg", error) if isinstance(error, SyntaxError) else error
        kind = "" if isinstance(error, FedblendError) else f"{type(error).__name__}: "
        raise FedblendError(f"{where}: cannot import '{path}': {line}: {kind}{reason}; mend this line") from None
    # A notebook's own module and built-in ones have no file.
    if file := getattr(imported, "__file__", None):
        inside = len(module.split(".")) - (0 if hasattr(imported, "__path__") else 1)
        imported_from.add(str(Path(file).resolve().parents[inside]))
    return found


def _line_of(error: Exception) -> str:
    """The file and line of an imported module, or of one that this imports, that raised an error; empty if none did.

    Lines of Python, of installed packages and of fedblend count only where no other line is involved.
    """
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
        return f"{error.filename}, line {error.lineno}"
    # Without this module and importlib, which come first.
    lines = [f for f in traceback.extract_tb(error.__traceback__)[2:] if not f.filename.startswith("<frozen importlib")]
    packages = (*map(sysconfig.get_path, ("stdlib", "purelib", "platlib")), str(Path(__file__).parents[1]))
    own = [line for line in lines if not line.filename.startswith(packages)]
    return f"{(own or lines)[-1].filename}, line {(own or lines)[-1].lineno}" if lines else ""


def fields_of(cls: type) -> tuple[str, ...]:
    """The names of a part's options, as Python spells them."""
    return tuple(f.name for f in dataclasses.fields(cls) if f.init)


def words_of(cls: type) -> list[str]:
    """The names of a part's options, as files spell them."""
    return [FILE_WORDS.get(field, field) for field in fields_of(cls)]


def explain(error: pydantic.ValidationError, where: str = "") -> str:
    """The first fault of a validation error in one line: field, value, and what would be valid."""
    faults = error.errors(include_url=False)
    first = faults[0]
    path = _path(first["loc"])
    field = ".".join(([where] if where else []) + path)
    if first["type"] in ("missing", "missing_argument"):
        return f"{field}: is missing; it must be given"
    # A field of several types has one fault for each of them.
    alike = [_message(fault) for fault in faults if _path(fault["loc"]) == path]
    message = ", or ".join(dict.fromkeys(alike))
    if first["type"] == "value_error" and not path:
        return f"{field}: {message}" if field else message
    return f"{field}: {brief(first['input'])} is not valid: {message}"


def _path(place: tuple[int | str, ...]) -> list[str]:
    """A fault's place as the file spells it, without the names of a field's several types."""
    words = [str(p) for p in place if isinstance(p, int) or p.isidentifier()]
    return [FILE_WORDS.get(w, w) for w in words if w not in ("int", "float", "str", "bool")]


def _message(fault: ErrorDetails) -> str:
    """A fault in the words of a file: tuples are lists there."""
    if fault["type"] == "tuple_type":
        alone = isinstance(fault["input"], (int, float))
        return f"write a list, such as [{fault['input']}]" if alone else "write a list"
    if fault["type"] == "value_error":
        return fault["msg"].removeprefix("Value error, ")
    return fault["msg"][0].lower() + fault["msg"][1:]
