"""Reading pickled lists, dictionaries and arrays without running anything that a pickle asks for.

Python's own reader looks up and calls whatever a pickle names, so that a file from outside can run any code. Here the
opcodes are only read (``pickletools`` does not execute them) and a few of them are acted upon: those that build
numbers, texts, bytes, lists, tuples and dictionaries, and the three names that a NumPy array of numbers is pickled
with. Everything else is refused.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedblend.core.errors import FedblendError

KINDS = {"u1": np.uint8, "i1": np.int8, "i4": np.int32, "i8": np.int64, "f4": np.float32, "f8": np.float64}
"""The types of an array's numbers that are read, little-endian."""

ARRAY = {"numpy.core.multiarray _reconstruct", "numpy._core.multiarray _reconstruct"}
NAMES = ARRAY | {"numpy ndarray", "numpy dtype", "_codecs encode"}
"""The names that may stand in a pickle. None is looked up: each only says what its arguments mean."""

DAMAGED = (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError, RecursionError)
"""What reading a damaged pickle may end in."""


class Refused(Exception):
    """A pickle asks for more than data; the text says what."""


class Mark:
    """Where a list of arguments begins on the stack."""


@dataclass(frozen=True)
class Name:
    """A name that a pickle would have looked up."""

    text: str


@dataclass
class Kind:
    """The type of an array's numbers, such as "u1"."""

    code: str


@dataclass
class Pending:
    """An array whose shape and bytes are yet to come. It stays in the memo, so that it is filled in place."""

    filled: np.ndarray | None = None

    def fill(self, state: tuple[Any, ...]) -> None:
        """Take NumPy's state: (version, shape, type, whether column by column, bytes)."""
        _, shape, kind, columns, raw = state
        if not isinstance(kind, Kind):
            raise ValueError("an array without a type")
        self.filled = np.frombuffer(raw, KINDS[kind.code]).reshape(shape, order="F" if columns else "C")


def read_plain(path: Path) -> Any:
    """What is pickled in a file, if it is data only.

    Texts and bytes of Python 2 come as ``str`` (one character a byte). Raises :class:`FedblendError` for a file that
    is damaged, and for one that asks for anything but data; nothing that it asks for is run.
    """
    try:
        raw = path.read_bytes()
        return Reader(len(raw)).read(pickletools.genops(raw))
    except Refused as error:
        raise FedblendError(
            f"{path}: is not data only: it asks for {error}, which could run any code; take the file from its publisher"
        ) from None
    except DAMAGED as error:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise FedblendError(f"{path}: is damaged or no pickle ({reason}); fetch it anew") from None


class Reader:
    """The stack and the memo of a pickle that is being read, and the ``room`` for what is made of it.

    An entry takes a byte of the file or more, and so does a byte of an array. Only what stands at many places through
    the memo can come to more than the file has bytes; lists of one list twice, of such lists twice, and so on, would
    come to more than any memory holds.
    """

    def __init__(self, room: int) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.room = room

    def read(self, opcodes: Iterable[tuple[pickletools.OpcodeInfo, Any, int | None]]) -> Any:
        """The object that the opcodes build."""
        for opcode, argument, _ in opcodes:
            if opcode.name == "STOP":
                return self.whole(self.stack.pop())
            if opcode.name in VALUES:
                self.stack.append(VALUES[opcode.name](argument))
            elif opcode.name in MOVES:
                MOVES[opcode.name](self, argument)
            elif opcode.name not in SILENT:
                raise Refused(f"the opcode {opcode.name}")
        raise ValueError("it ends in the middle")

    def since_mark(self) -> list[Any]:
        """Take everything since the last mark from the stack."""
        # From the end: many marks on a high stack would else take forever.
        at = len(self.stack) - 1
        while not isinstance(self.stack[at], Mark):
            at -= 1
            if at < 0:
                raise ValueError("no mark on the stack")
        taken = self.stack[at + 1 :]
        del self.stack[at:]
        return taken

    def take(self, count: int) -> list[Any]:
        """Take the last ``count`` entries from the stack."""
        taken = self.stack[len(self.stack) - count :]
        if len(taken) < count:
            raise ValueError("too little on the stack")
        del self.stack[len(self.stack) - count :]
        return taken

    def name(self, text: str) -> None:
        """Put a name onto the stack, if it is one of those that arrays are pickled with."""
        if text not in NAMES:
            raise Refused(f"{text.replace(' ', '.')!r:.120}")
        self.stack.append(Name(text))

    def stack_name(self, _: Any) -> None:
        """A name whose two halves lie on the stack."""
        module, name = self.take(2)
        self.name(f"{_text(module)} {_text(name)}")

    def extend(self, entries: list[Any]) -> None:
        """Append to the list below."""
        below = self.stack[-1]
        if not isinstance(below, list):
            raise ValueError("no list to append to")
        below.extend(entries)

    def set(self, entries: list[Any]) -> None:
        """Set keys of the dictionary below."""
        below = self.stack[-1]
        if not isinstance(below, dict):
            raise ValueError("no dictionary to set keys of")
        below.update(_pairs(entries))

    def take_room(self, count: int) -> None:
        """Count entries or bytes that were made. Raises :class:`ValueError` where they are more than the file's."""
        self.room -= count
        if self.room < 0:
            raise ValueError("it tells the same over and over, to more than the file's own size")

    def encoded(self, text: str) -> bytes:
        """The bytes of an array that are told as text, one character a byte."""
        self.take_room(len(text))
        return text.encode("latin-1")

    def whole(self, value: Any) -> Any:
        """The value with its arrays filled in. Raises if one never was, or something else stands where data should."""
        self.take_room(1)
        if isinstance(value, Pending):
            if value.filled is None:
                raise ValueError("an array without numbers")
            return value.filled
        if isinstance(value, dict):
            return {key: self.whole(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.whole(entry) for entry in value)
        if isinstance(value, Name | Kind | Mark):
            raise ValueError("a name where data should be")
        return value

    def call(self, _: Any) -> None:
        """What a call means, of those that are known."""
        called, arguments = self.take(2)
        if not isinstance(called, Name) or called.text == "numpy ndarray":
            raise Refused("a call of something else than an array")
        if called.text in ARRAY:
            self.stack.append(Pending())
        elif called.text == "numpy dtype":
            code = _text(arguments[0])
            if code not in KINDS:
                raise Refused(f"an array of {code!r:.120}")
            self.stack.append(Kind(code))
        else:
            self.stack.append(self.encoded(_text(arguments[0])))

    def build(self, _: Any) -> None:
        """Fill an array; the state of a type says nothing that is not known but its byte order."""
        (state,) = self.take(1)
        below = self.stack[-1]
        if isinstance(below, Pending):
            *rest, raw = state
            below.fill((*rest, self.encoded(raw) if isinstance(raw, str) else raw))
        elif not isinstance(below, Kind):
            raise Refused("an object with a state of its own")
        elif state[1] == ">":
            raise Refused("an array of big-endian numbers")


VALUES: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(
        (
            "BININT", "BININT1", "BININT2", "INT", "LONG", "LONG1", "BINFLOAT", "FLOAT", "STRING", "BINSTRING",
            "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8",
        ),
        lambda value: value,
    ),
    "NONE": lambda _: None,
    "NEWTRUE": lambda _: True,
    "NEWFALSE": lambda _: False,
    "EMPTY_DICT": lambda _: {},
    "EMPTY_LIST": lambda _: [],
    "EMPTY_TUPLE": lambda _: (),
    "MARK": lambda _: Mark(),
}  # fmt: skip
"""Opcodes that put a value onto the stack."""

MOVES: dict[str, Callable[[Reader, Any], None]] = {
    "GLOBAL": Reader.name,
    "STACK_GLOBAL": Reader.stack_name,
    "REDUCE": Reader.call,
    "BUILD": Reader.build,
    "APPEND": lambda r, _: r.extend(r.take(1)),
    "APPENDS": lambda r, _: r.extend(r.since_mark()),
    "SETITEM": lambda r, _: r.set(r.take(2)),
    "SETITEMS": lambda r, _: r.set(r.since_mark()),
    "TUPLE": lambda r, _: r.stack.append(tuple(r.since_mark())),
    "TUPLE1": lambda r, _: r.stack.append(tuple(r.take(1))),
    "TUPLE2": lambda r, _: r.stack.append(tuple(r.take(2))),
    "TUPLE3": lambda r, _: r.stack.append(tuple(r.take(3))),
    "LIST": lambda r, _: r.stack.append(r.since_mark()),
    "DICT": lambda r, _: r.stack.append(_pairs(r.since_mark())),
    **dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), lambda r, at: r.memo.update({at: r.stack[-1]})),
    "MEMOIZE": lambda r, _: r.memo.update({len(r.memo): r.stack[-1]}),
    **dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda r, at: r.stack.append(r.memo[at])),
}
"""Opcodes that act on the stack and the memo."""

SILENT = {"PROTO", "FRAME"}


def _text(value: Any) -> str:
    """A value that must be a text. Raises :class:`ValueError` for anything else, of which no text is made."""
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where a text should be")
    return value


def _pairs(entries: list[Any]) -> dict[Any, Any]:
    """Keys and values in turn as a dictionary. Raises :class:`ValueError` for a key that is no text or number."""
    for key in entries[::2]:
        # The hash of a tuple of tuples can take forever, as its entries can be counted over and over.
        if not isinstance(key, str | bytes | int | float | None):
            raise ValueError(f"a {type(key).__name__} as a key")
    return dict(zip(entries[::2], entries[1::2], strict=True))
