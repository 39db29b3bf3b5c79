"""Tables of XorMixFL's Table 3: distances of seeds to raw samples, and what seeds reveal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from tables.common import (
    Row,
    command_of,
    paper_numbers,
    study_result,
    table,
)
from tables.xormixfl import DUMMIES, LEAKS, paper_row, parsed

# Table 3: the distance from raw samples of what the server trains on.

DISTANCE_METHODS = ("xormixfl", "mixfl", "mixfl, equal parts")
Means = Mapping[str, Sequence[Sequence[float]]]
"""Mean distances by method: a row for each number of dummy labels M, a column for each p from 1 to 5."""


def _distance_row(rows: Sequence[Row], method: str, dummies: Sequence[int], p: int) -> Row:
    return next(r for r in rows if r["p"] == p and parsed(r["method"]) == (method, {"dummies": list(dummies)}))


def xor_distance_claims(name: str = "xormixfl-distance") -> str:
    """The paper's claims of Table 3, for its numbers, for ours after scaling, and for the distance itself."""
    rows, numbers = study_result(name)["rows"], paper_numbers("xormixfl/table-3", "mds")
    paper = {method: [numbers[paper_row(method, m)] for m in (1, 2, 3)] for method in DISTANCE_METHODS}
    ours = [
        {
            method: [[_distance_row(rows, method, d, p)[measure][0] for p in range(1, 6)] for d in DUMMIES]
            for method in DISTANCE_METHODS
        }
        for measure in ("mds", "distance")
    ]
    cells = ([words, *(claim(means) for means in (paper, *ours))] for words, claim in DISTANCE_CLAIMS.items())
    return table(["claim", "the paper", "ours, MDS", "ours, distance itself"], cells)


def _lowest_and_highest(means: Means) -> str:
    low = min(map(min, means["xormixfl"]))
    high = max(max(map(max, means[m])) for m in DISTANCE_METHODS[1:])
    return f"{low:.0f} and {high:.0f}: {'yes' if low > high else 'no'}"


def _ratio_to_mixfl(means: Means) -> str:
    """XorMixFL over MixFL, cell by cell; of MixFL's two kinds the one with the larger distance."""
    ours = [value for row in means["xormixfl"] for value in row]
    kinds = zip(*(means[m] for m in DISTANCE_METHODS[1:]), strict=True)
    mixfl = [max(values) for rows in kinds for values in zip(*rows, strict=True)]
    ratios = [a / b for a, b in zip(ours, mixfl, strict=True)]
    return f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _growth(means: Means, method: str, by: str) -> str:
    lines = means[method] if by == "p" else list(zip(*means[method], strict=True))
    rising = sum(list(line) == sorted(line) for line in lines)
    growth = statistics.mean(line[-1] - line[0] for line in lines)
    return f"{growth:+.0f}, rising in {rising} of {len(lines)}"


DISTANCE_CLAIMS: dict[str, Callable[[Means], str]] = {
    "XorMixFL's lowest, MixFL's highest: is the first above?": _lowest_and_highest,
    "XorMixFL over MixFL: mean ratio of cells": _ratio_to_mixfl,
    "XorMixFL, from p = 1 to 5": lambda means: _growth(means, "xormixfl", "p"),
    "XorMixFL, from M = 1 to 3": lambda means: _growth(means, "xormixfl", "M"),
    "MixFL, from p = 1 to 5": lambda means: _growth(means, "mixfl", "p"),
    "MixFL, from M = 1 to 3": lambda means: _growth(means, "mixfl", "M"),
    "MixFL in equal parts, from M = 1 to 3": lambda means: _growth(means, "mixfl, equal parts", "M"),
}


def xor_leaks(name: str = "xormixfl-distance") -> str:
    """How much of the raw samples is revealed, by p, with one dummy label."""
    result = study_result(name)
    rows = []
    for method in DISTANCE_METHODS[:2]:
        for p in range(1, 6):
            row = _distance_row(result["rows"], method, DUMMIES[0], p)
            shares = [row[key] for key in LEAKS]
            rows.append([method, str(p), *("" if share is None else f"{100 * share:.0f}" for share in shares)])
    return table(["method", "p", *LEAKS.values()], rows, f"{command_of(result)}, target 9, dummy 3")
