"""Claims as comparisons: ``fedmix > naivemix > fedavg``, ``xormixfl - standalone >= 8``, ``fedmix@60 > fedmix@20``.

A name stands for a row, compared in every column; ``@column`` stands for a column, compared in every row;
``row@column`` is one cell. ``mean:``, ``min:``, ``max:`` or ``spread:`` before a row (or an ``@column``) reduces its
cells to one number, where all of them are measured; ``min:xor-*`` is of all rows whose names begin so. A smallest or
largest number leaves out the cells that the claim names, so that ``a@2 > max:a`` compares a@2 with the best of the
others. ``nearest:standalone*`` is, in each column, that of the rows whose mean is nearest to the paper's number: a
baseline whose setting the paper leaves open. Numbers, ``+ - * /``, brackets and ``< <= > >=`` may be used, with blanks
around each.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import filter as matching
from fnmatch import fnmatchcase
from types import MappingProxyType

from fedblend.core.errors import FedblendError, or_valid

Cells = Mapping[tuple[str, str], float]
"""Numbers by (row, column); cells without a number are left out. ``inf`` is a target that was never reached."""

REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: math.fsum(values) / len(values),
    "min": min,
    "max": max,
    "spread": lambda values: max(values) - min(values),
}
NEAREST = "nearest"  # The prefix of a row that the paper's numbers choose in each column
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
class Operand:
    """A name in a claim: of a row, of a column, or of both."""

    row: str | None
    """The row; where the cells are reduced or a row is chosen, it may be a pattern of rows, such as ``xor-*``."""
    column: str | None
    reduction: str | None = None
    """The key in :data:`REDUCTIONS` that makes one number of the row's or column's cells, or :data:`NEAREST`."""


@dataclass(frozen=True)
class Comparison:
    """A parsed claim."""

    tree: ast.Compare
    """The syntax tree, in which operands are the names ``_0``, ``_1``, ..."""
    operands: tuple[Operand, ...]

    @property
    def named(self) -> list[Operand]:
        """The operands that are one cell each."""
        return [o for o in self.operands if o.row is not None and o.column is not None]

    @property
    def axis(self) -> str:
        """Where the claim is asserted: in each ``column``, in each ``row``, or ``once``."""
        single = [operand for operand in self.operands if operand.reduction in (None, NEAREST)]
        if any(operand.column is None for operand in single):
            return "column"
        return "row" if any(operand.row is None for operand in single) else "once"

    def names(self, row: str, column: str) -> bool:
        """Whether the claim compares this cell."""
        return any(fnmatchcase(row, o.row or "*") and o.column in (None, column) for o in self.operands)

    def with_nearest(self, column: str, means: Cells, paper: Cells) -> Comparison:
        """The comparison in a column, with the row whose mean is nearest to the paper's for each ``nearest:``."""

        def chosen(operand: Operand) -> Operand:
            gaps = {
                row: abs(means[row, place] - paper[row, place])
                for row, place in means.keys() & paper.keys()
                if place == column and operand.reduction == NEAREST and fnmatchcase(row, operand.row or "")
            }
            return Operand(min(sorted(gaps), key=gaps.__getitem__), None) if gaps else operand

        return replace(self, operands=tuple(map(chosen, self.operands)))


@dataclass(frozen=True)
class Check:
    """Whether a claim holds in one line, that is a column or row, and by how much."""

    holds: bool | None
    """``None`` where it is undecided: no side reached its target."""
    margins: tuple[float, ...]
    """The difference of each two neighbours in the comparison; negative where it does not hold, NaN where undecided."""

    @property
    def margin(self) -> float:
        """The smallest difference of two neighbours; NaN where all are undecided."""
        return min((margin for margin in self.margins if not math.isnan(margin)), default=math.nan)


def parse_claim(text: str, rows: Sequence[str] | None = None, columns: Sequence[str] | None = None) -> Comparison:
    """Parse a claim's text; with ``rows`` and ``columns`` names must be among them. Raises :class:`FedblendError`."""
    operands: list[Operand] = []
    code = []
    for token in text.split():
        if _SIGN.fullmatch(token) or _NUMBER.fullmatch(token):
            code.append(token)
        else:
            code.append(f"_{len(operands)}")
            operands.append(_operand(token, rows, columns, text))
    try:
        tree = ast.parse(" ".join(code), mode="eval").body
    except SyntaxError:
        raise FedblendError(f"claim {text!r}: cannot be read; blanks stand around every sign") from None
    if not isinstance(tree, ast.Compare) or not all(type(sign) in _ORDER for sign in tree.ops):
        raise FedblendError(f"claim {text!r}: compares nothing; write <, <=, > or >=")
    single = [operand for operand in operands if operand.reduction in (None, NEAREST)]
    if any(o.column is None for o in single) and any(o.row is None for o in single):
        raise FedblendError(f"claim {text!r}: names rows and columns alone; write row@column for one of them")
    return Comparison(tree, tuple(operands))


def _operand(token: str, rows: Sequence[str] | None, columns: Sequence[str] | None, text: str) -> Operand:
    reduction, colon, rest = token.partition(":")
    if not colon or reduction not in (*REDUCTIONS, NEAREST):
        reduction, rest = "", token
    row, at, column = rest.partition("@")
    for name, valid, what in ((row, rows, "row"), (column if at else "", columns, "column")):
        if name and valid is not None and not (matching(valid, name) if reduction and what == "row" else name in valid):
            raise FedblendError(f"claim {text!r}: no {what} '{name}'{or_valid(name, valid)}")
    if reduction and row and at:
        raise FedblendError(f"claim {text!r}: '{token}' is one cell, of which there is no {reduction}")
    return Operand(row or None, column if at else None, reduction or None)


def check_line(
    comparison: Comparison, cells: Cells, line: str, expected: Collection[tuple[str, str]] = ()
) -> Check | None:
    """Check a claim in one column or row (any name if it is asserted once); ``None`` if one of its cells is empty.

    ``expected`` has the cells (row, column) that a mean, smallest or largest number or a spread is taken of, beside
    those in ``cells``.
    """
    values = []
    for operand in comparison.operands:
        value = _operand_value(operand, cells, line, expected, comparison.named)
        if value is None:
            return None
        values.append(value)
    sides = [_evaluate(side, values) for side in (comparison.tree.left, *comparison.tree.comparators)]
    holds: bool | None = True
    margins = []
    for sign, left, right in zip(comparison.tree.ops, sides, sides[1:], strict=False):
        if math.isnan(left) or math.isnan(right) or (math.isinf(left) and left == right):
            holds = None if holds else holds
            margins.append(math.nan)
            continue
        falling = isinstance(sign, (ast.Gt, ast.GtE))
        margins.append(left - right if falling else right - left)
        if not _ORDER[type(sign)](left, right):
            holds = False
    return Check(holds, tuple(margins))


def _operand_value(
    operand: Operand, cells: Cells, line: str, expected: Collection[tuple[str, str]], named: Collection[Operand]
) -> float | None:
    if operand.reduction in REDUCTIONS:
        apart = named if operand.reduction in ("min", "max") else ()
        reduced = {
            (row, column)
            for row, column in {*cells, *expected}
            if fnmatchcase(row, operand.row or "*")
            and operand.column in (None, column)
            and Operand(row, column) not in apart
        }
        whole = reduced and reduced <= cells.keys()
        return REDUCTIONS[operand.reduction]([cells[cell] for cell in reduced]) if whole else None
    row = line if operand.row is None else operand.row
    column = line if operand.column is None else operand.column
    return cells.get((row, column))


def _evaluate(node: ast.expr, values: Sequence[float]) -> float:
    if isinstance(node, ast.Name):
        return values[int(node.id[1:])]
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_evaluate(node.operand, values)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        left, right = _evaluate(node.left, values), _evaluate(node.right, values)
        if isinstance(node.op, ast.Div) and right == 0:
            return math.nan
        return _ARITHMETIC[type(node.op)](left, right)
    raise FedblendError("claim: only numbers, names, + - * / and brackets stand between comparisons")


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds for some numbers, over all lines and seeds."""

    lines: dict[str, Check]
    """The check of the means over seeds in each line (column or row) that has all cells of the claim."""
    seeds: tuple[int, int]
    """The number of decided (seed, line) pairs in which the claim holds, and of all decided ones."""

    @property
    def word(self) -> str:
        """``holds``, ``does not hold``, ``holds in part``, ``undecided`` or ``not measured``.

        ``holds`` means in every line. A claim that is undecided in some lines and holds in the others holds in part.
        """
        decided = [check.holds for check in self.lines.values() if check.holds is not None]
        if not decided:
            return "undecided" if self.lines else "not measured"
        if all(decided) and len(decided) == len(self.lines):
            return "holds"
        return "holds in part" if any(decided) else "does not hold"


def judge_claim(
    comparison: Comparison,
    means: Cells,
    by_seed: Mapping[int, Cells],
    only: Sequence[str] | None = None,
    expected: Collection[tuple[str, str]] = (),
    paper: Cells = MappingProxyType({}),
) -> Verdict:
    """Judge a claim on the means over seeds, and on each seed, in every line or ``only`` in some.

    A line counts the seeds alone in which all of its cells have a number: other means would compare different seeds.
    A number over several cells, such as a spread, needs all ``expected`` ones, and all that another seed has.
    Without ``by_seed``, as with the paper's numbers, ``means`` are judged as they are. ``paper`` has the numbers by
    which ``nearest:`` chooses a row.
    """
    index, given = {"column": 1, "row": 0}.get(comparison.axis), comparison
    every = [""] if index is None else list(dict.fromkeys(cell[index] for cell in means))
    expected = {*expected, *(cell for cells in by_seed.values() for cell in cells)}
    checks: dict[str, Check] = {}
    decided: list[Check] = []
    for line in every:
        if only is not None and index is not None and line not in only:
            continue
        comparison = given.with_nearest(line, means, paper)
        whole = [cells for cells in by_seed.values() if check_line(comparison, cells, line, expected) is not None]
        shared = [{cell: cells[cell] for cell in whole[0] if all(cell in one for one in whole)} for cells in whole]
        over_seeds = {cell: math.fsum(one[cell] for one in shared) / len(shared) for cell in (shared or [{}])[0]}
        check = check_line(comparison, over_seeds if by_seed else means, line, expected)
        if check is not None:
            checks[line] = check
            single = [check_line(comparison, cells, line, expected) for cells in shared]
            decided += [one for one in single if one is not None and one.holds is not None]
    return Verdict(checks, (sum(bool(check.holds) for check in decided), len(decided)))
