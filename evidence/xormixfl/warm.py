"""FedAvg and FedMix with and without XorMixFL's one shot before them."""

from __future__ import annotations

import json

from mdtable import table

from xormixfl import results
from xormixfl.results import NOT_YET, command

ROUNDS = (0, 1, 2, 5, 10)


def warm_start(name: str = "warm-start") -> str:
    """Accuracy by round of each method, and megabytes sent; a row a run."""
    path = results.RESULTS / f"{name}.json"
    if not path.exists():
        return NOT_YET
    rows = []
    for run in json.loads(path.read_text())["runs"]:
        by_round = dict(zip(run["rounds"], run["accuracy"], strict=True))
        sent = (run["costs"]["bytes_up"] + run["costs"]["bytes_down"]) / 1e6
        cells = [f"{100 * by_round[r]:.1f}" if r in by_round else "" for r in ROUNDS]
        rows.append([run["method"], str(run["seed"]), *cells, f"{sent:.1f}"])
    heads = [f"round {r}" for r in ROUNDS]
    return f"{command(name)}; accuracy %\n\n" + table(["method", "seed", *heads, "MB"], rows)
