"""Verdicts that take noise into account: claims judged by paired differences over seeds.

The margin of a claim with one seed is the difference that the claim asserts, with the same split, first weights and
cohorts on both sides (:class:`fedblend.papers.claims.Check`). A verdict is drawn from the mean of these margins and its
95 % interval by Student's t distribution. One seed has no interval, so it decides nothing. A chain such as
``a > b > c`` asserts several differences. Each has a mean and an interval, and the weakest decides.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from fedblend.papers.claims import Cells, check_line, parse_claim
from fedblend.runs.differences import Difference, half_width

DIGITS = 5  # Digits of margins: written results have six digits, and a difference of two has an error in the sixth
FEWEST = 3  # Fewest seeds that decide without an interval: two agree by chance in one case of two, three in one of four
HOLDS, FAILS, PART, NOISE = "holds", "does not hold", "holds in part", "within noise"
ONE_SEED = "one seed"
UNDECIDED = "undecided"
NOT_COMPARABLE = "not comparable"
NO_VERDICT = "no verdict"
WORDS = (HOLDS, PART, FAILS, NOISE, ONE_SEED, UNDECIDED, NOT_COMPARABLE, NO_VERDICT)  # All verdicts


@dataclass(frozen=True)
class LineVerdict:
    """A claim in one column or row: the margins of its weakest difference, one for each seed that decided it."""

    margins: tuple[float, ...]
    """Infinite where one side never reached its target."""
    held: tuple[bool, ...] = ()
    """Whether the whole claim holds, for each seed that decided it."""
    exact: bool = False
    """Whether the margins are of counted or computed numbers (:func:`~fedblend.runs.differences.half_width`)."""

    @property
    def mean(self) -> float:
        """The mean margin over seeds; infinite if a margin is, NaN if margins are infinite with both signs."""
        return sum(self.margins) / len(self.margins)

    @property
    def rank(self) -> float:
        """The mean margin, by which lines are ordered; of both signs, the lowest."""
        return -math.inf if math.isnan(self.mean) else self.mean

    @functools.cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the mean margin; ``None`` for one seed, or where a margin is infinite."""
        if len(self.margins) < 2 or not math.isfinite(sum(map(abs, self.margins))):
            return None
        half = half_width([round(margin, DIGITS) for margin in self.margins], self.exact)
        return self.mean - half, self.mean + half

    @property
    def p_value(self) -> float:
        """The probability of a mean at least as far from 0 by chance (two-sided t test); NaN without an interval."""
        if self.interval is None:
            return math.nan
        low, high = self.interval
        return Difference(tuple(range(len(self.margins))), self.mean, (high - low) / 2).p_value

    @property
    def word(self) -> str:
        """One of :data:`WORDS`, except "holds in part".

        Where a target was never reached there is no interval: the verdict is that of three seeds or more that agree.
        A claim of "at least" holds where both sides are equal in each seed.
        """
        if not self.margins:
            return UNDECIDED
        if len(self.margins) == 1:
            return ONE_SEED
        if self.interval is None and len(self.margins) < FEWEST:
            return NOISE
        low, high = self.interval or (min(self.margins), max(self.margins))
        level = low == high == 0 and bool(self.held) and all(self.held)
        return HOLDS if low > 0 or level else FAILS if high < 0 else NOISE


@dataclass(frozen=True)
class ClaimVerdict:
    """A claim over all of its columns or rows."""

    lines: dict[str, LineVerdict]
    links: tuple[LineVerdict, ...] = ()
    """All differences that the claim asserts: those of a chain, in each line."""
    unjudged: str = NO_VERDICT
    """The word where there is no line to judge."""

    @property
    def word(self) -> str:
        """One of :data:`WORDS`, of the words of the lines.

        "holds" means in every line, "holds in part" in some, "does not hold" in none and clearly not in one at least.
        """
        if not self.lines:
            return self.unjudged
        words = {line.word for line in self.lines.values()}
        if len(words) == 1:
            return words.pop()
        return PART if HOLDS in words else next((w for w in (FAILS, NOISE, ONE_SEED) if w in words), UNDECIDED)

    @property
    def p_value(self) -> float | None:
        """The p-value of the verdict, to be tested beside other claims; ``None`` if a difference has no interval.

        A claim holds if all of its differences are above 0: the largest p-value counts. It fails if any is below 0: the
        smallest of those below 0 counts, times the number of differences.
        """
        if not self.links or any(link.interval is None for link in self.links):
            return None
        if self.word == HOLDS:
            return max(link.p_value for link in self.links)
        return min([1.0, *(len(self.links) * link.p_value for link in self.links if link.mean < 0)])

    @property
    def weakest(self) -> LineVerdict | None:
        """The line with the smallest mean margin; ``None`` if no line has one."""
        lines = [line for line in self.lines.values() if line.margins]
        return min(lines, key=lambda line: line.rank, default=None)


def judge(
    text: str,
    by_seed: Mapping[int, Cells],
    lines: Iterable[str],
    expected: Collection[tuple[str, str]] = (),
    exact: bool = False,
    paper: Cells = MappingProxyType({}),
) -> ClaimVerdict:
    """Judge a claim's text in some lines (columns or rows; any one name where it is asserted once).

    A number over several cells, such as a spread, needs all ``expected`` ones (row, column), and all that another seed
    has. ``paper`` has the numbers by which ``nearest:`` chooses a row.
    """
    given = parse_claim(text)
    numbers: dict[tuple[str, str], list[float]] = {}
    for cell, number in (one for cells in by_seed.values() for one in cells.items()):
        numbers.setdefault(cell, []).append(number)
    means = {cell: math.fsum(values) / len(values) for cell, values in numbers.items()}
    expected = {*expected, *(cell for cells in by_seed.values() for cell in cells)}
    found, every_link = {}, []
    for line in lines:
        comparison = given.with_nearest(line, means, paper)
        every = (check_line(comparison, by_seed[seed], line, expected) for seed in sorted(by_seed))
        checks = [check for check in every if check is not None]
        held = tuple(check.holds for check in checks if check.holds is not None)
        links = zip(*(check.margins for check in checks), strict=True)
        verdicts = [LineVerdict(tuple(m for m in link if not math.isnan(m)), held, exact) for link in links]
        found[line] = min(verdicts, key=_strength, default=LineVerdict(()))
        every_link += verdicts or [found[line]]
    return ClaimVerdict(found, tuple(every_link))


def _strength(link: LineVerdict) -> tuple[int, float]:
    """The order of a chain's differences by strength: failed, negative, undecided, not clearly above 0, clearly."""
    if not link.margins:
        return 2, 0.0
    weak = 0 if link.word == FAILS else 1 if link.mean < 0 else 4 if link.word == HOLDS else 3
    return weak, link.rank


def judge_result(result: Mapping[str, Any], claim: Mapping[str, Any]) -> ClaimVerdict:
    """Judge a claim of a written result (:mod:`fedblend.papers.result`) on its numbers by seed."""
    lines = ["" if place == "all" and "" in result["columns"] else place for place in claim["places"]]
    verdict = judge_numbers(result, claim["holds"], claim["of"], lines)
    return replace(verdict, unjudged=NOT_COMPARABLE) if claim.get("not_comparable") else verdict


def judge_numbers(result: Mapping[str, Any], text: str, of: str, lines: Iterable[str]) -> ClaimVerdict:
    """Judge a claim's text on a quantity of a written result, in some lines."""
    by_seed: dict[int, dict[tuple[str, str], float]] = {}
    quantity = result["quantities"][of]
    cells = quantity["cells"]
    for cell in cells:
        for seed, value in cell["ours"].items():
            number = math.inf if value in ("never", "∞") else value
            if isinstance(number, (int, float)):
                by_seed.setdefault(int(seed), {})[cell["row"], cell["column"]] = float(number)
    expected = {(cell["row"], cell["column"]) for cell in cells}
    paper = {
        (cell["row"], cell["column"]): float(cell["paper"])
        for cell in cells
        if isinstance(cell.get("paper"), (int, float))
    }
    return judge(text, by_seed, lines, expected, quantity.get("exact", False), paper)


def count(verdicts: Iterable[ClaimVerdict]) -> Counter[str]:
    """Verdicts by their word."""
    return Counter(verdict.word for verdict in verdicts)
