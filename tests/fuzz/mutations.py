"""Changes of bytes, of tables, of arrays and of words, drawn from a random generator.

Hypothesis would not do: an input is made again from its number alone, in a process that the input may end.
"""

from __future__ import annotations

import copy
import datetime
import json
import math
from random import Random
from typing import Any

import numpy as np

TEXTS = (
    "", " ", "none", "true", "NaN", "-1", "1e400", "0x10", "a" * 5_000, "\x00", "\x1b[31mred\x1b[0m", "\x07\x08\r",
    "two\nlines", "\u202ereversed", "\ud7ff\U0001f600", "\u0660\u0661", "[/x]", "[bold]", "{name}", "%s%n", "$(id)",
    "../..", "../../etc/passwd", "/dev/null", "/dev/null/x", "nowhere.npz", "a/b/c", "-seed0", "--", "--help", "a:b",
    "json:loads", "nowhere:Nothing", "é" * 300, "fedmix", "npz", "iid", "cuda:7", "meta", "auto",
)  # fmt: skip
"""Texts at the edges of what a field takes."""

NUMBERS = (
    0, 1, -1, 2, 3, 7, 255, 256, 1_000, 65_536, 10**6, 2**31 - 1, 2**31, 2**32, 10**10, 10**12, 2**53 + 1, 2**63 - 1,
    2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 0.0, -0.0, 0.5, 1.5, -0.1, 1e-300, 5e-324, 1e10, 1e300, 1e308,
    math.inf, -math.inf, math.nan,
)  # fmt: skip
"""Numbers at the edges of what a field takes."""

CHUNKS = (
    b"", b"\x00" * 8, b"\xff" * 8, b"\x1b[2J", b"\r\n", b"\n", b"=", b"[[x]]\n", b"[x]\n", b'"', b"'''", b"{",
    b"[", b",",
    b"NaN", b"Infinity", b"null", b"1e999", b"9" * 5_000, b"[" * 3_000, b'{"a":' * 3_000, b"\xef\xbb\xbf", b"\xff\xfe",
    b"\xc3", b"\xf0\x9f\x98\x80", b"a" * 3_000, b"#", b"\\u0000", b"-", b"0" * 20, b"PK\x03\x04", b"\x93NUMPY",
)  # fmt: skip
"""Bytes that parsers of several formats have to refuse."""

FEW = (1, 1, 1, 2, 3)
"""How often something is changed."""


def deep(levels: int, table: bool) -> Any:
    """A value inside as many lists or tables."""
    value: Any = 1
    for _ in range(levels):
        value = {"name": value} if table else [value]
    return value


OTHERS = (
    True, False, [], {}, [1, 2], ["a", 1, None], {"name": 1}, {"name": ""}, {"name": "x", "y": 1}, [[]], [{}],
    datetime.date(2020, 1, 1), datetime.datetime(1, 1, 1), deep(3, True), deep(60, False), deep(60, True),
    [0] * 1_000, [math.nan], {str(i): i for i in range(200)},
)  # fmt: skip
"""Values that are neither numbers nor texts."""


def value(rng: Random) -> Any:
    """A value that a table of TOML or JSON may hold; TOML has dates, and no ``None``."""
    return copy.deepcopy(rng.choice(rng.choices((NUMBERS, TEXTS, OTHERS), (4, 3, 3))[0]))


def fitting(rng: Random, kind: str) -> Any:
    """A value for a field whose type is in words such as "whole number from 1"; in one of six cases any value."""
    if rng.random() < 0.15:
        return value(rng)
    if "true or false" in kind and rng.random() < 0.7:
        return rng.random() < 0.5
    if "list" in kind and rng.random() < 0.7:
        return rng.choices(NUMBERS, k=rng.choice((0, 1, 2, 3, 40)))
    if "number" in kind:
        whole = "whole" in kind and rng.random() < 0.8
        return rng.choice([number for number in NUMBERS if isinstance(number, int) or not whole])
    words = [word.strip('"') for word in kind.split(" or ") if word.startswith('"')]
    return rng.choice(words if words and rng.random() < 0.7 else TEXTS)


def number_near(rng: Random, number: Any) -> Any:
    """A number made from another one."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return value(rng)
    whole = int(number) if math.isfinite(number) else 0
    near = (-number, number + 1, number - 1, number * 10**12, float(f"{whole}e0"), str(number)[:9_000], [number])
    return rng.choice((*near, bool(number), rng.choice(NUMBERS)))


# Bytes -------------------------------------------------------------------------------------------------------


def of_bytes(rng: Random, raw: bytes) -> bytes:
    """Bytes with one to four changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(raw) + 1)
        # Headers are short, and stand at the front.
        at = min(at, rng.randrange(200)) if rng.random() < 0.4 else at
        end = min(len(raw), at + rng.choice((1, 1, 2, 4, 16, 100, 1_000)))
        old, chunk = raw[at:end], rng.choice(CHUNKS)
        flipped = bytes(byte ^ 1 << rng.randrange(8) for byte in old[:1]) + old[1:]
        filled = rng.choice((b"\x00", b"\xff")) * len(old)
        made = rng.choice((flipped, rng.randbytes(len(old)), b"", 2 * old, chunk + old, chunk, filled))
        raw = rng.choices((raw[:at] + made + raw[end:], raw[:at], raw[at:]), (7, 1, 1))[0]
    return raw


def of_text(rng: Random, text: str) -> str:
    """A text with changes of its bytes."""
    return of_bytes(rng, text.encode()).decode("utf-8", "replace")


def of_lines(rng: Random, text: str) -> str:
    """A text of lines with one to three of them changed, doubled, moved or removed."""
    lines = text.splitlines()
    for _ in range(rng.choice(FEW)):
        at, kind = rng.randrange(len(lines) + 1), rng.randrange(7)
        line = lines[at] if at < len(lines) else ""
        if (kind <= 2 or rng.random() < 0.5) and "=" in line:
            lines[at] = f"{line.partition('=')[0]}= {toml_word(rng)}"
        elif kind == 3:
            lines.insert(at, line)
        elif kind == 4:
            del lines[at : at + 1]
        elif kind == 5:
            lines.insert(at, rng.choice(("[train]", "[a.b.c]", "[[methods]]", "[method]", f"x{at} = {toml_word(rng)}")))
        else:
            lines[at : at + 1] = [of_text(rng, line)]
    return "\n".join(lines) + "\n"


def toml_word(rng: Random) -> str:
    """The right side of a line of TOML, valid or not."""
    if rng.random() < 0.3:
        words = ("nan", "-inf", "1e999", "1979-05-27", "[" * 500, "[[1, [2, [3]]]]", "{a = {b = {c = 1}}}", "'''")
        return rng.choice((*words, '"\\u0000"'))
    return json.dumps(value(rng), default=str).replace("null", '"none"')


# Tables ------------------------------------------------------------------------------------------------------


def of_table(rng: Random, table: Any) -> Any:
    """A copy of nested tables and lists with one to three changes."""
    made = copy.deepcopy(table)
    for _ in range(rng.choice(FEW)):
        places = list(_places(made))
        if not places or rng.random() < 0.02:
            made = value(rng)
            continue
        inside, key = rng.choice(places)
        old, kind = inside[key], rng.randrange(10)
        if kind == 6:
            del inside[key]
        elif kind == 8 and isinstance(inside, dict):
            inside[rng.choice(TEXTS[:30]) or "unknown"] = old if rng.random() < 0.5 else value(rng)
        elif kind >= 8:
            other, place = rng.choice(places)
            inside[key] = copy.deepcopy(other[place])
        elif kind == 7:
            inside[key] = rng.choice(([old], {"name": old}, {"x": old}, [old] * 3))
        else:
            inside[key] = value(rng) if kind <= 3 else number_near(rng, old)
    return made


def _places(node: Any) -> Any:
    """Every entry of nested tables and lists, as (table or list, key or number)."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in list(entries):
        yield node, key
        yield from _places(inner)


def plain(node: Any, toml: bool) -> Any:
    """A changed table in what TOML (without ``None``) or JSON (without dates) can hold."""
    if isinstance(node, dict):
        return {str(key): plain(inner, toml) for key, inner in node.items() if not (toml and inner is None)}
    if isinstance(node, (list, tuple)):
        return [plain(inner, toml) for inner in node if not (toml and inner is None)]
    return str(node) if not toml and isinstance(node, datetime.date) else node


# Arrays ------------------------------------------------------------------------------------------------------

TYPES = ("<f8", "<f4", "<f2", "<i8", "<i4", "u1", "i1", "?", "<u8", "<c16", "<U3", "S3", ">f4", "<M8[s]")
NAMES = ("x", "y", "client", "split", "classes", "client_names", "x_train")


def of_array(rng: Random, array: np.ndarray) -> np.ndarray:
    """An array with one change: of its type, its shape or its numbers."""
    kind = rng.randrange(9)
    try:
        if kind == 0:
            return array.astype(rng.choice(TYPES))
        if kind == 1:
            return array[: rng.choice((0, 1, max(0, len(array) - 1)))]
        if kind == 2:
            return rng.choice((array[..., None], array.reshape(-1), np.concatenate([array, array])))
        if kind == 3:
            return np.zeros(rng.choice(((), (0,), (1,), (0, 3), (2, 0, 2), (1, 1, 1, 1, 1), (len(array), 1, 1))))
        if kind == 4:
            return np.full_like(array, rng.choice((0, -1, 1, 2**31, 2**62, math.nan, math.inf)))
        changed = np.array(array)
        for _ in range(rng.choice((1, 3))):
            changed.reshape(-1)[rng.randrange(max(1, changed.size))] = rng.choice(NUMBERS)
        return changed
    except (TypeError, ValueError, OverflowError, IndexError):
        return array[::-1] if array.ndim else array


def of_arrays(rng: Random, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Named arrays with one to three changes: of an array, or of the names."""
    made = dict(arrays)
    for _ in range(min(rng.choice(FEW), len(made))):
        (name, other), kind = rng.choices(list(made), k=2), rng.randrange(8)
        if kind == 0:
            del made[name]
        elif kind == 1:
            made[rng.choice((*NAMES, f"{name}s"))] = made[name]
        elif kind == 2:
            made[name], made[other] = made[other], made[name]
        else:
            made[name] = of_array(rng, made[name])
    return made


# Words of a command line -------------------------------------------------------------------------------------


def of_words(rng: Random, words: list[str]) -> list[str]:
    """The words of a command with one to three changes."""
    made = list(words)
    for _ in range(rng.choice(FEW)):
        at, new = rng.randrange(len(made) + 1), word(rng)
        old = made[at : at + 1]
        fields = ("rounds", "train.lr", "method", "data", "data.path", "partition.clients", "", ".", "a.b.c")
        setting = [*old, "--set", f"{rng.choice(fields)}={new}"]
        changes = ([new], [new], [], [*old, new], 2 * old, [of_text(rng, one) for one in old], setting, setting)
        made[at : at + 1] = rng.choice(changes)
    # The system passes no word with a zero byte.
    return [one.replace("\0", "") for one in made]


def word(rng: Random) -> str:
    """One word of a command line."""
    if rng.random() < 0.2:
        options = "--out --seeds --resume --jobs --data --set --engine --ranks --round --last"
        return rng.choice(options.split())
    return str(value(rng))[:6_000]
