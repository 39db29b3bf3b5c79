"""Table 4, by dummy labels, blending and alpha; and what hiding black dummy pixels costs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mdtable import table

from xormixfl.results import (
    NOT_YET,
    PAPERS,
    Run,
    accuracy_of,
    beside,
    command,
    paper,
    rows_of,
    runs_of,
    settings_of,
    spread,
    target_of,
)

DUMMIES = ([3], [3, 4], [3, 4, 5])
ALPHAS = (0.25, 0.5, 0.95)
HIDDEN = 9
"""The target label of Tables 3 and 4."""


def table_4(name: str = "xormixfl-dummies") -> str:
    """Test accuracy and the target's, by method, p, M and alpha."""
    runs, theirs = runs_of(name), paper()["table_4"]
    if not runs:
        return NOT_YET
    rows = []
    for method in dict.fromkeys(r.method for r in runs):
        for p in (1, 5):
            for m, dummies in enumerate(DUMMIES):
                row = [method, str(p), str(len(dummies))]
                for measure, of in MEASURES.items():
                    for a, alpha in enumerate(ALPHAS):
                        found = [of(r) for r in _cell(runs, method, p, dummies, alpha)]
                        row.append(beside(found, theirs[PAPERS.get(method, method)][str(p)][measure][m][a]))
                rows.append(row)
    seeds = len({r.seed for r in runs})
    heads = [f"{what}, alpha {alpha:g}" for what in ("accuracy", "target's") for alpha in ALPHAS]
    about = f"{command(name)}; {seeds} seed{'s' if seeds > 1 else ''}; per cent, ours (the paper's, difference). At "
    return f"{about}p = 1 nothing is blended, and alpha plays no part.\n\n" + table(["method", "p", "M", *heads], rows)


MEASURES: Mapping[str, Callable[[Run], float]] = {"accuracy": accuracy_of, "target": lambda run: run.target([HIDDEN])}


def _cell(runs: Sequence[Run], method: str, p: int, dummies: Sequence[int], alpha: float) -> list[Run]:
    wanted = {"p": p, "dummies": list(dummies), "alpha": alpha}
    return [r for r in runs if r.method == method and r.settings == wanted]


def dummy_claims(name: str = "xormixfl-dummies") -> str:
    """What the paper claims of Table 4, and whether it came out."""
    runs, theirs = runs_of(name), paper()["table_4"]
    if not runs:
        return NOT_YET
    rows = []
    for method in dict.fromkeys(r.method for r in runs):
        papers = theirs[PAPERS.get(method, method)]
        for measure, of in MEASURES.items():
            ours = {
                str(p): {
                    measure: [[_mean([of(r) for r in _cell(runs, method, p, d, a)]) for a in ALPHAS] for d in DUMMIES]
                }
                for p in (1, 5)
            }
            for words, change in CHANGES.items():
                told = [statistics.mean(change(numbers, measure)) for numbers in (papers, ours)]
                agree = "the paper's sign" if told[0] * told[1] > 0 else "not the paper's sign"
                row = [f"{method}: {MEASURE_WORDS[measure]}, {words}", *(f"{t:+.1f}" for t in told), agree]
                rows.append(row)
    return table(["change in points, mean over the other settings", "the paper", "ours", ""], rows)


MEASURE_WORDS = {"accuracy": "test accuracy", "target": "target's accuracy"}


def _mean(values: Sequence[float]) -> float:
    return statistics.mean(values) if values else float("nan")


def _with_dummies(numbers: Mapping[str, Any], measure: str) -> list[float]:
    return [numbers[p][measure][2][a] - numbers[p][measure][0][a] for p in "15" for a in range(3)]


def _with_blending(numbers: Mapping[str, Any], measure: str) -> list[float]:
    return [numbers["5"][measure][m][a] - numbers["1"][measure][m][a] for m in range(3) for a in range(3)]


def _with_alpha(numbers: Mapping[str, Any], measure: str) -> list[float]:
    return [numbers["5"][measure][m][2] - numbers["5"][measure][m][0] for m in range(3)]


CHANGES = {
    "from M = 1 to 3": _with_dummies,
    "from p = 1 to 5": _with_blending,
    "from alpha 0.25 to 0.95 at p = 5": _with_alpha,
}


# The offset -------------------------------------------------------------------------------------------------


def offset(name: str = "xormixfl-offset", leaks: str = "xormixfl-offset-leaks") -> str:
    """Accuracy, the target's, and what is told in clear, by the grey levels that hide black dummy pixels."""
    runs, told = runs_of(name), rows_of(leaks)
    if not runs:
        return NOT_YET
    rows = []
    for levels in sorted({r.settings["offset"] for r in runs}):
        mine = [r for r in runs if r.settings["offset"] == levels]
        seeds = sorted({r.seed for r in mine})
        means = [
            [statistics.mean(of(r) for r in mine if r.seed == seed) for seed in seeds]
            for of in (accuracy_of, target_of)
        ]
        open_ = [row for row in told if settings_of(row["method"])[1].get("offset") == levels]
        shares = [f"{100 * statistics.mean(r[key] for r in open_):.1f}" if open_ else "" for key in LEAKS]
        rows.append([str(levels), *(spread(values) for values in means), *shares])
    targets = sorted({r.settings["targets"][0] for r in runs})
    words = f"{command(name)}; means over the target labels {', '.join(map(str, targets))}, deviation over seeds"
    return f"{words}\n\n" + table(["offset", "accuracy %", "target's accuracy %", *LEAKS.values()], rows)


def offset_leaks(leaks: str = "xormixfl-offset-leaks") -> str:
    """What is told in clear by the grey levels that hide black dummy pixels, means over the target labels."""
    told = rows_of(leaks)
    if not told:
        return NOT_YET
    rows = []
    for levels in sorted({settings_of(row["method"])[1]["offset"] for row in told}):
        mine = [row for row in told if settings_of(row["method"])[1]["offset"] == levels]
        rows.append([str(levels), *(f"{100 * statistics.mean(row[key] for row in mine):.1f}" for key in LEAKS)])
    return f"{command(leaks)}\n\n" + table(["offset", *LEAKS.values()], rows)


LEAKS = {
    "clear": "sent in clear %",
    "clear_ink": "of the target's ink %",
    "bits": "bits right after a usual dummy %",
    "blind": "bits right unseen %",
    "sent_recognised": "seed known %",
    "made_recognised": "decoded known %",
}
"""Columns of ``fedblend privacy xor`` by their names in its JSON."""
