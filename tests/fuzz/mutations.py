"""Changes of bytes, of tables, of arrays and of words, drawn from a random generator."""

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


def deep(levels: int, table: bool) -> Any:
    """A value inside as many lists or tables."""
    value: Any = 1
    for _ in range(levels):
        value = {"name": value} if table else [value]
    return value


def value(rng: Random) -> Any:
    """A value that a table of TOML or JSON may hold; TOML has dates, and no ``None``."""
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    others = (
        True, False, [], {}, [1, 2], ["a", 1, None], {"name": 1}, {"name": ""}, {"name": "x", "y": 1}, [[]], [{}],
        datetime.date(2020, 1, 1), datetime.datetime(1, 1, 1), deep(3, True), deep(60, False), deep(60, True),
        [0] * 1_000, [math.nan], {str(i): i for i in range(200)},
    )  # fmt: skip
    return copy.deepcopy(rng.choice(others))


def fitting(rng: Random, kind: str) -> Any:
    """A value for a field whose type is in words such as "whole number from 1"; in one of six cases any value."""
    if rng.random() < 0.15:
        return value(rng)
    if "true or false" in kind and rng.random() < 0.7:
        return rng.random() < 0.5
    if "list" in kind and rng.random() < 0.7:
        return [rng.choice(NUMBERS) for _ in range(rng.choice((0, 1, 2, 3, 40)))]
    if "number" in kind:
        whole = [number for number in NUMBERS if isinstance(number, int)]
        return rng.choice(whole) if "whole" in kind and rng.random() < 0.8 else rng.choice(NUMBERS)
    words = [word.strip('"') for word in kind.split(" or ") if word.startswith('"')]
    return rng.choice(words) if words and rng.random() < 0.7 else rng.choice(TEXTS)


def number_near(rng: Random, number: float) -> Any:
    """A number made from another one."""
    if not isinstance(number, (int, float)) or isinstance(number, bool):
        return value(rng)
    changes = (
        lambda: -number, lambda: number + 1, lambda: number - 1, lambda: number * 10**12, lambda: float(number),
        lambda: str(number), lambda: [number], lambda: bool(number), lambda: rng.choice(NUMBERS),
    )  # fmt: skip
    try:
        return rng.choice(changes)()
    except OverflowError:
        return value(rng)


# Bytes -------------------------------------------------------------------------------------------------------


def of_bytes(rng: Random, raw: bytes) -> bytes:
    """Bytes with one to four changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        raw = _one_of_bytes(rng, raw)
    return raw


def _one_of_bytes(rng: Random, raw: bytes) -> bytes:
    kind, at = rng.randrange(9), rng.randrange(len(raw) + 1)
    # Headers are short, and stand at the front.
    at = min(at, rng.randrange(200)) if rng.random() < 0.4 else at
    end = min(len(raw), at + rng.choice((1, 1, 2, 4, 16, 100, 1_000)))
    if kind == 0 and raw:
        at = min(at, len(raw) - 1)
        return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1 :]
    if kind == 1:
        return raw[:at] + rng.randbytes(end - at) + raw[end:]
    if kind == 2:
        return raw[:at] + raw[end:]
    if kind == 3:
        return raw[:at] + raw[at:end] * 2 + raw[end:]
    if kind == 4:
        return raw[:at] + rng.choice(CHUNKS) + raw[at:]
    if kind == 5:
        return raw[:at] + rng.choice(CHUNKS) + raw[end:]
    if kind == 6:
        return raw[:at]
    if kind == 7:
        return raw[at:]
    return raw[:at] + rng.choice((b"", b"\x00", b"\xff")) * (end - at) + raw[end:]


def of_lines(rng: Random, text: str) -> str:
    """A text of lines with one to three of them changed, doubled, moved or removed."""
    lines = text.splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines)) if lines else 0
        kind = rng.randrange(7)
        line = lines[at] if lines else ""
        if (kind <= 2 or rng.random() < 0.5) and "=" in line:
            lines[at] = f"{line.partition('=')[0]}= {toml_word(rng)}"
        elif kind == 3:
            lines.insert(at, line)
        elif kind == 4 and lines:
            del lines[at]
        elif kind == 5:
            lines.insert(at, rng.choice(("[train]", "[a.b.c]", "[[methods]]", "[method]", f"x{at} = {toml_word(rng)}")))
        elif lines:
            lines[at] = of_bytes(rng, line.encode()).decode("utf-8", "replace")
    return "\n".join(lines) + "\n"


def toml_word(rng: Random) -> str:
    """The right side of a line of TOML, valid or not."""
    words = (
        "nan",
        "-inf",
        "1e999",
        "1979-05-27",
        "[" * 500,
        "[[1, [2, [3]]]]",
        "{a = {b = {c = 1}}}",
        "'''",
        '"\\u0000"',
    )
    if rng.random() < 0.3:
        return rng.choice(words)
    return json.dumps(value(rng), default=str).replace("null", '"none"')


# Tables ------------------------------------------------------------------------------------------------------


def of_table(rng: Random, table: Any, times: int | None = None) -> Any:
    """A copy of nested tables and lists with one to three changes."""
    made = copy.deepcopy(table)
    for _ in range(times or rng.choice((1, 1, 1, 2, 3))):
        made = _one_of_table(rng, made)
    return made


def _one_of_table(rng: Random, made: Any) -> Any:
    places = list(_places(made))
    if not places or rng.random() < 0.02:
        return value(rng)
    inside, key = rng.choice(places)
    kind = rng.randrange(10)
    if kind <= 3:
        inside[key] = value(rng)
    elif kind <= 5:
        inside[key] = number_near(rng, inside[key])
    elif kind == 6:
        del inside[key]
    elif kind == 7:
        inside[key] = rng.choice(([inside[key]], {"name": inside[key]}, {"x": inside[key]}, [inside[key]] * 3))
    elif kind == 8 and isinstance(inside, dict):
        inside[rng.choice(TEXTS[:30]) or "unknown"] = inside[key] if rng.random() < 0.5 else value(rng)
    else:
        other, place = rng.choice(places)
        inside[key] = copy.deepcopy(other[place])
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


def of_array(rng: Random, array: np.ndarray) -> np.ndarray:
    """An array with one change: of its type, its shape or its numbers."""
    kind = rng.randrange(9)
    try:
        if kind == 0:
            return array.astype(rng.choice(TYPES))
        if kind == 1:
            return array[: rng.choice((0, 1, max(0, len(array) - 1)))]
        if kind == 2:
            return array[..., None] if rng.random() < 0.5 else array.reshape(-1)
        if kind == 3:
            return np.concatenate([array, array])
        if kind == 4:
            return np.zeros(rng.choice(((), (0,), (1,), (0, 3), (2, 0, 2), (1, 1, 1, 1, 1), (len(array), 1, 1))))
        if kind == 5:
            return np.full_like(array, rng.choice((0, -1, 1, 2**31, 2**62, math.nan, math.inf)))
        changed = np.array(array)
        flat = changed.reshape(-1)
        for _ in range(rng.choice((1, 3))):
            flat[rng.randrange(max(1, flat.size))] = rng.choice(NUMBERS)
        return changed
    except (TypeError, ValueError, OverflowError, IndexError):
        return array[::-1] if array.ndim else array


def of_arrays(rng: Random, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Named arrays with one to three changes: of an array, or of the names."""
    made = dict(arrays)
    for _ in range(rng.choice((1, 1, 2, 3))):
        if not made:
            break
        name, kind = rng.choice(list(made)), rng.randrange(8)
        if kind == 0:
            del made[name]
        elif kind == 1:
            made[rng.choice(("x", "y", "client", "split", "classes", "client_names", "x_train", f"{name}s"))] = made[
                name
            ]
        elif kind == 2:
            other = rng.choice(list(made))
            made[name], made[other] = made[other], made[name]
        else:
            made[name] = of_array(rng, made[name])
    return made


# Words of a command line -------------------------------------------------------------------------------------


def of_words(rng: Random, words: list[str]) -> list[str]:
    """The words of a command with one to three changes."""
    made = list(words)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(len(made) + 1), rng.randrange(8)
        inside = min(at, len(made) - 1)
        if kind <= 1 and made:
            made[inside] = word(rng)
        elif kind == 2 and made:
            del made[inside]
        elif kind == 3:
            made.insert(at, word(rng))
        elif kind == 4 and made:
            made.insert(at, made[inside])
        elif kind == 5 and made:
            made[inside] = of_bytes(rng, made[inside].encode()).decode("utf-8", "replace").replace("\0", "")
        else:
            field = rng.choice(
                ("rounds", "train.lr", "method", "data", "data.path", "partition.clients", "", ".", "a.b.c")
            )
            made[at:at] = ["--set", f"{field}={word(rng)}"]
    # The system passes no word with a zero byte.
    return [one.replace("\0", "") for one in made]


def word(rng: Random) -> str:
    """One word of a command line."""
    options = ("--out", "--seeds", "--resume", "--jobs", "--data", "--set", "--engine", "--ranks", "--round", "--last")
    if rng.random() < 0.2:
        return rng.choice(options)
    made = value(rng)
    return made if isinstance(made, str) else str(made)[:6_000]
