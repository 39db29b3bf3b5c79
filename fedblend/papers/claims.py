"""Claims as comparisons: ``fedmix > naivemix > fedavg``, ``xormixfl - standalone >= 8``, ``fedmix@60 > fedmix@20``.

A word names a row, compared in every column; ``@column`` a column, compared in every row; ``row@column`` one cell.
``mean:``, ``min:``, ``max:`` or ``spread:`` before a row (or an ``@column``) makes one number of all its cells.
Numbers, ``+ - * /``, brackets and ``< <= > >=`` stand between them, with blanks around each.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fedblend.core.errors import FedblendError, did_you_mean

Cells = Mapping[tuple[str, str], float]
"""A number by (row, column); cells without one are left out. ``inf`` is a target that was never reached."""

OVER: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "spread": lambda values: max(values) - min(values),
}
_ORDER: dict[type, Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type, Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SIGN = re.compile(r"[-+*/()]|[<>]=?")
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


@dataclass(frozen=True)
class Word:
    """A name in a claim: of a row, of a column, or of both; ``over`` makes one number of several cells."""

    text: str
    row: str | None
    column: str | None
    over: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A claim that was read: its syntax tree, whose names are ``_0``, ``_1``, ..., and the words they stand for."""

    text: str
    tree: ast.Compare
    words: tuple[Word, ...]

    @property
    def along(self) -> str:
        """Where it is asserted: in each ``column``, in each ``row``, or ``once``."""
        free = [word for word in self.words if word.over is None]
        if any(word.column is None for word in free):
            return "column"
        return "row" if any(word.row is None for word in free) else "once"


@dataclass(frozen=True)
class Found:
    """Whether a claim holds at a place, and by how much: the least difference of two neighbours in it.

    ``holds`` is ``None`` where it cannot be told: a target that neither side reached.
    """

    holds: bool | None
    margin: float


def read(text: str, rows: Sequence[str], columns: Sequence[str]) -> Comparison:
    """A claim from its text. Raises :class:`FedblendError` that names what is not valid."""
    words: list[Word] = []
    code = []
    for token in text.split():
        if _SIGN.fullmatch(token) or _NUMBER.fullmatch(token):
            code.append(token)
        else:
            code.append(f"_{len(words)}")
            words.append(_word(token, rows, columns, text))
    try:
        tree = ast.parse(" ".join(code), mode="eval").body
    except SyntaxError:
        raise FedblendError(f"claim {text!r}: cannot be read; blanks stand around every sign") from None
    if not isinstance(tree, ast.Compare) or not all(type(sign) in _ORDER for sign in tree.ops):
        raise FedblendError(f"claim {text!r}: compares nothing; write <, <=, > or >=")
    made = Comparison(text, tree, tuple(words))
    free = [word for word in words if word.over is None]
    if any(w.column is None for w in free) and any(w.row is None for w in free):
        raise FedblendError(f"claim {text!r}: names rows and columns alone; write row@column for one of them")
    return made


def _word(token: str, rows: Sequence[str], columns: Sequence[str], text: str) -> Word:
    over, colon, rest = token.partition(":")
    if not colon or over not in OVER:
        over, rest = "", token
    row, at, column = rest.partition("@")
    for name, known, what in ((row, rows, "row"), (column if at else "", columns, "column")):
        if name and name not in known:
            raise FedblendError(f"claim {text!r}: no {what} '{name}'{did_you_mean(name, known)}")
    if over and row and at:
        raise FedblendError(f"claim {text!r}: '{token}' is one cell, of which there is no {over}")
    return Word(token, row or None, column if at else None, over or None)


def at(claim: Comparison, cells: Cells, place: str) -> Found | None:
    """A claim in one column, row, or once (any place); ``None`` where a cell that it names is not known."""
    values = []
    for word in claim.words:
        value = _value(word, claim, cells, place)
        if value is None:
            return None
        values.append(value)
    sides = [_number(side, values) for side in (claim.tree.left, *claim.tree.comparators)]
    holds: bool | None = True
    margins = []
    for sign, left, right in zip(claim.tree.ops, sides, sides[1:], strict=False):
        if math.isnan(left) or math.isnan(right) or (math.isinf(left) and left == right):
            holds = None if holds else holds
            continue
        falling = isinstance(sign, (ast.Gt, ast.GtE))
        margins.append(left - right if falling else right - left)
        if not _ORDER[type(sign)](left, right):
            holds = False
    return Found(holds, min(margins, default=math.nan))


def _value(word: Word, claim: Comparison, cells: Cells, place: str) -> float | None:
    if word.over is not None:
        among = [v for (row, column), v in cells.items() if word.row in (None, row) and word.column in (None, column)]
        return OVER[word.over](among) if among else None
    row = place if word.row is None else word.row
    column = place if word.column is None else word.column
    return cells.get((row, column))


def _number(node: ast.expr, values: Sequence[float]) -> float:
    if isinstance(node, ast.Name):
        return values[int(node.id[1:])]
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, values)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _number(node.left, values), _number(node.right, values)
        if isinstance(node.op, ast.Div) and right == 0:
            return math.nan
        return _ARITHMETIC[type(node.op)](left, right)
    raise FedblendError("claim: only numbers, names, + - * / and brackets stand between comparisons")


@dataclass(frozen=True)
class Verdict:
    """What our numbers say of a claim, over all places and seeds.

    ``places`` maps each place where it could be told to whether it holds for the means over seeds and by how much;
    ``seeds`` counts (seed, place) pairs in which it holds, and all of them.
    """

    places: dict[str, Found]
    seeds: tuple[int, int]

    @property
    def word(self) -> str:
        """``holds``, ``does not hold``, ``holds in part``, ``undecided`` or ``not measured``.

        It holds where it does so in every place; where some of them are undecided it holds in part.
        """
        told = [found.holds for found in self.places.values() if found.holds is not None]
        if not told:
            return "undecided" if self.places else "not measured"
        if all(told) and len(told) == len(self.places):
            return "holds"
        return "holds in part" if any(told) else "does not hold"


def judge(claim: Comparison, means: Cells, by_seed: Mapping[int, Cells], where: Sequence[str] | None = None) -> Verdict:
    """A claim on the means over seeds at every place, and on each seed by itself."""
    index = {"column": 1, "row": 0}.get(claim.along)
    every = [""] if index is None else list(dict.fromkeys(cell[index] for cell in means))
    places = [place for place in every if where is None or index is None or place in where]
    told = {place: found for place in places if (found := at(claim, means, place)) is not None}
    single = [at(claim, cells, place) for cells in by_seed.values() for place in told]
    decided = [found for found in single if found is not None and found.holds is not None]
    return Verdict(told, (sum(bool(found.holds) for found in decided), len(decided)))
