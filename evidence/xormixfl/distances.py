"""Table 3: how far what the server trains on lies from the raw samples that it was made of."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from mdtable import table

from xormixfl.dummies import DUMMIES, LEAKS
from xormixfl.results import NOT_YET, PAPERS, command, paper, rows_of, settings_of


def table_3(name: str = "xormixfl-distance") -> str:
    """Distance after multidimensional scaling by method, M and p; in a second table without it."""
    measured, theirs = rows_of(name), paper()["table_3"]
    if not measured:
        return NOT_YET
    parts = [f"{command(name)}; mean ± deviation over samples (the paper's)"]
    for measure, words in (("mds", "MDS"), ("distance", "distance itself")):
        rows = []
        for method in dict.fromkeys(settings_of(row["method"])[0] for row in measured):
            for m, dummies in enumerate(DUMMIES):
                cells = []
                for p in range(1, 6):
                    mean, deviation = _measured(measured, method, dummies, p)[measure]
                    its = theirs[PAPERS.get(method, method)]
                    papers = f" ({its['mean'][m][p - 1]:.0f} ± {its['deviation'][m][p - 1]:.0f})"
                    cells.append(f"{mean:.0f} ± {deviation:.0f}" + (papers if measure == "mds" else ""))
                rows.append([method, str(len(dummies)), *cells])
        parts.append(table([words, "M", *(f"p = {p}" for p in range(1, 6))], rows))
    return "\n\n".join(parts)


def _measured(rows: Sequence[Mapping[str, Any]], method: str, dummies: Sequence[int], p: int) -> Mapping[str, Any]:
    return next(r for r in rows if r["p"] == p and settings_of(r["method"]) == (method, {"dummies": list(dummies)}))


def distance_claims(name: str = "xormixfl-distance") -> str:
    """What the paper claims of Table 3, and whether it came out: of the distance scaled, and itself."""
    measured, theirs = rows_of(name), paper()["table_3"]
    if not measured:
        return NOT_YET
    rows = []
    papers = {method: theirs[PAPERS.get(method, method)]["mean"] for method in METHODS}
    scaled, plain = ({m: _means(measured, m, which) for m in METHODS} for which in ("mds", "distance"))
    for words, claim in CLAIMS.items():
        told = [claim(numbers) for numbers in (papers, scaled, plain)]
        rows.append([words, *told])
    return table(["claim", "the paper", "ours, MDS", "ours, distance itself"], rows)


def leaks(name: str = "xormixfl-distance") -> str:
    """What can be told of the raw samples, by p, with one dummy label."""
    measured = rows_of(name)
    if not measured:
        return NOT_YET
    rows = []
    for method in METHODS[:2]:
        for p in range(1, 6):
            one = _measured(measured, method, DUMMIES[0], p)
            shares = [one[key] for key in LEAKS]
            rows.append([method, str(p), *("" if share is None else f"{100 * share:.0f}" for share in shares)])
    return f"{command(name)}, target 9, dummy 3\n\n" + table(["method", "p", *LEAKS.values()], rows)


METHODS = ("xormixfl", "mixfl", "mixfl, equal parts")
Means = Mapping[str, Sequence[Sequence[float]]]


def _means(rows: Sequence[Mapping[str, Any]], method: str, measure: str) -> list[list[float]]:
    return [[_measured(rows, method, dummies, p)[measure][0] for p in range(1, 6)] for dummies in DUMMIES]


def _lowest_and_highest(means: Means) -> str:
    low, high = min(map(min, means["xormixfl"])), max(max(map(max, means[m])) for m in METHODS[1:])
    return f"{low:.0f} and {high:.0f}: {'yes' if low > high else 'no'}"


def _nearest_of_a_kind(means: Means) -> str:
    """XorMixFL over MixFL, cell by cell; of MixFL's two kinds the farther."""
    ours = [value for row in means["xormixfl"] for value in row]
    theirs = [
        max(values) for rows in zip(*(means[m] for m in METHODS[1:]), strict=True) for values in zip(*rows, strict=True)
    ]
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def _grows(means: Means, method: str, by: str) -> str:
    lines = means[method] if by == "p" else list(zip(*means[method], strict=True))
    rising = sum(list(line) == sorted(line) for line in lines)
    apart = statistics.mean(line[-1] - line[0] for line in lines)
    return f"{apart:+.0f}, rising in {rising} of {len(lines)}"


CLAIMS = {
    "XorMixFL's lowest, MixFL's highest: is the first above?": _lowest_and_highest,
    "XorMixFL over MixFL: mean ratio of cells": _nearest_of_a_kind,
    "XorMixFL, from p = 1 to 5": lambda means: _grows(means, "xormixfl", "p"),
    "XorMixFL, from M = 1 to 3": lambda means: _grows(means, "xormixfl", "M"),
    "MixFL, from p = 1 to 5": lambda means: _grows(means, "mixfl", "p"),
    "MixFL, from M = 1 to 3": lambda means: _grows(means, "mixfl", "M"),
    "MixFL in equal parts, from M = 1 to 3": lambda means: _grows(means, "mixfl, equal parts", "M"),
}
