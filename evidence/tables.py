"""The tables of docs/results.md, reproductions.md and privacy.md, from committed results: no number is copied by hand.

python evidence/tables.py          rewrites each table between its two marks in docs, and draws docs/figures
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from fedblend.experiment.reference import fill

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import augmix_page  # noqa: E402 (they lie beside this file, wherever that is read from)
import mix2fld_page  # noqa: E402
import reproduced_page  # noqa: E402
import xormixfl  # noqa: E402
from mdtable import table  # noqa: E402

DOCS = HERE.parent / "docs"
PAGES = (DOCS / "results.md", DOCS / "reproductions.md", DOCS / "privacy.md")
TARGETS = {"femnist": 0.8, "aggenhance-mnist5k": 0.85, "fedmix-cifar10": 0.45}
"""Accuracy of "rounds to" where a study's is not 70 %."""


def results_of(name: str) -> dict[str, Any]:
    """What is kept of a study."""
    found: dict[str, Any] = json.loads((HERE / "results" / f"{name}.json").read_text())
    return found


def by_method(runs: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs by their method, in the order in which methods occur."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in runs:
        groups[run["method"]].append(run)
    return groups


def mean_std(values: list[float], digits: int = 1) -> str:
    """Mean and sample standard deviation over seeds."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def rounds_to(run: dict[str, Any], target: float) -> int | None:
    """The first evaluated round that reached the target."""
    return next((r for r, a in zip(run["rounds"], run["accuracy"], strict=True) if a >= target), None)


def study(name: str, beside: tuple[str, ...] = ()) -> str:
    """One row a method: final accuracy, mean of the last ten rounds, rounds to the target, megabytes.

    ``beside`` names methods of the Fashion-MNIST study that are shown first, with the same seeds.
    """
    results = results_of(name)
    if beside:
        seeds = {run["seed"] for run in results["runs"]}
        base = results_of("fashion-mnist")["runs"]
        results["runs"] = [r for r in base if r["method"] in beside and r["seed"] in seeds] + results["runs"]
    target = TARGETS.get(name, 0.7)
    reach = f"rounds to {100 * target:g} %"
    rows = []
    for method, runs in by_method(results["runs"]).items():
        reached = [r for run in runs if (r := rounds_to(run, target)) is not None]
        rounds = mean_std([float(r) for r in reached]) if reached else "not reached"
        if reached and len(reached) < len(runs):
            rounds += f" ({len(reached)} of {len(runs)})"
        final = mean_std([100 * run["accuracy"][-1] for run in runs])
        last = mean_std([100 * statistics.mean(run["accuracy"][-10:]) for run in runs])
        sent = (statistics.mean(run["costs"][way] for run in runs) / 1e6 for way in ("bytes_up", "bytes_down"))
        rows.append([method, str(len(runs)), final, last, rounds, *(f"{megabytes:.1f}" for megabytes in sent)])
    head = ["method", "seeds", "final accuracy %", "mean of last 10 %", reach, "MB up", "MB down"]
    return f"`{results['command']}`\n\n" + table(head, rows)


def paired(name: str, base: str = "fedavg") -> str:
    """Each method's mean of the last ten rounds minus FedAvg's with the same seed (same split, same cohorts)."""
    results = results_of(name)
    last = {(r["method"], r["seed"]): 100 * statistics.mean(r["accuracy"][-10:]) for r in results["runs"]}
    seeds = sorted({seed for _, seed in last})
    rows = []
    for method in dict.fromkeys(m for m, _ in last):
        if method != base:
            apart = [last[method, s] - last[base, s] for s in seeds]
            rows.append([method, *(f"{a:+.1f}" for a in apart), f"{statistics.mean(apart):+.1f}"])
    return table(["method", *(f"seed {s}" for s in seeds), "mean"], rows)


def curve(name: str, every: int) -> str:
    """Accuracy of each method by round."""
    results = results_of(name)
    curves: dict[str, list[list[float]]] = defaultdict(list)
    rounds: list[int] = []
    for run in results["runs"]:
        rounds = [r for r in run["rounds"] if r and r % every == 0]
        curves[run["method"]].append([100 * run["accuracy"][run["rounds"].index(r)] for r in rounds])
    means = {m: [statistics.mean(seeds) for seeds in zip(*told, strict=True)] for m, told in curves.items()}
    return table(["round", *map(str, rounds)], ([m, *(f"{a:.1f}" for a in row)] for m, row in means.items()))


def clients(name: str) -> str:
    """Accuracy over clients' own tests, in all and by samples held (FedMix, Table 13)."""
    results = results_of(name)
    sizes = list(dict.fromkeys(size for run in results["runs"] for size in run["clients"]["by_size"]))
    rows = []
    for run in results["runs"]:
        over = run["clients"]
        groups = [over["by_size"].get(size) for size in sizes]
        told = (f"{100 * g['mean']:.1f} ± {100 * g['std']:.1f} ({g['clients']})" if g else "" for g in groups)
        everyone = f"{100 * over['mean']:.1f} ± {100 * over['std']:.1f}"
        rows.append([run["method"], everyone, f"{100 * over['p10']:.1f}", *told])
    return table(["accuracy over writers %", "mean ± std", "10th percentile", *(f"n_k {s}" for s in sizes)], rows)


def channels(name: str) -> str:
    """Final accuracy and best, bits sent up by a device, and seconds of the run over its channel."""
    results = results_of(name)
    rows = []
    for run in results["runs"]:
        sent = 8 * run["costs"]["bytes_up"] / results["clients"]["number"] / 1000
        final, last = 100 * run["accuracy"][-1], 100 * statistics.mean(run["accuracy"][-4:])
        rows.append([run["method"], f"{final:.1f}", f"{last:.1f}", f"{sent:,.0f}", f"{run['clock'][-1]:.1f}"])
    head = ["method", "final %", "mean of last 4 %", "kbit up a device", "seconds"]
    return f"`{results['command']}`\n\n" + table(head, rows)


def epsilons(name: str, what: str, beside: str = "") -> str:
    """Final accuracy, and epsilon of ``what`` left the clients, of each method; those of ``beside`` first."""
    results = results_of(name)
    if beside:
        results["runs"] = results_of(beside)["runs"] + results["runs"]
    rows = []
    for run in results["runs"]:
        spent = run.get("epsilon", {}).get(what)
        final, last = 100 * run["accuracy"][-1], 100 * statistics.mean(run["accuracy"][-10:])
        rows.append([run["method"], f"{final:.1f}", f"{last:.1f}", f"{spent[-1][1]:.2f}" if spent else "none"])
    head = ["method", "accuracy %", "mean of last 10 %", "epsilon"]
    return f"`{results['command']}`\n\n" + table(head, rows)


def crossed(name: str, heading: str) -> str:
    """Final accuracy, a row a method and a column a setting of the grid; or in which round a run broke off."""
    results = results_of(name)
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in [*results["runs"], *results.get("failed", [])]:
        method, _, setting = run["method"].partition(" adversary=")
        broke = run.get("failed")
        cells[method][setting].append(f"broke off in round {broke}" if broke else f"{100 * run['accuracy'][-1]:.1f}")
    settings = list(dict.fromkeys(setting for row in cells.values() for setting in row))
    rows = ([method, *(", ".join(row[setting]) for setting in settings)] for method, row in cells.items())
    return f"`{results['command']}`\n\n" + table([heading, *settings], rows)


def alignment() -> str:
    """Norm of each term's gradient, and its cosine to everyone's and to Global Mixup's gradient, by round."""
    results = results_of("alignment")
    told = [
        f"`{results['command']}`, lambda = {results['lambda']}; each cell: norm, cosine to the gradient of everyone's "
        "data, cosine to Global Mixup's",
    ]
    rounds = list(results["rounds"])
    for where in ("at the global weights", "after local training"):
        rows = []
        for term in results["rounds"][rounds[0]][where]:
            cells = (results["rounds"][r][where][term] for r in rounds)
            row = [f"{c['norm']:.2f}, {c['cosine_to_all']:.2f}, {c['cosine_to_global_mixup']:.2f}" for c in cells]
            rows.append([term, *row])
        told.append(table([where, *(f"round {r}" for r in rounds)], rows))
    return "\n\n".join(told)


def sites(name: str, every: bool = True) -> str:
    """Final accuracy of each method by site (mean over seeds), their mean and the worst; or these two alone."""
    results = results_of(name)
    named = list(dict.fromkeys(site for run in results["runs"] for site in run.get("sites", {}))) if every else []
    rows = []
    for method, runs in by_method(results["runs"]).items():
        told = [[100 * run["sites"][site] for run in runs] for site in runs[0].get("sites", {})]
        means = [statistics.mean(one) for one in told]
        row = [method, str(len(runs)), mean_std([100 * run["accuracy"][-1] for run in runs])]
        row += [f"{mean:.1f}" for mean in means] if every and told else [""] * len(named)
        rows.append([*row, *([f"{statistics.mean(means):.1f}", f"{min(means):.1f}"] if told else ["", ""])])
    head = ["method", "seeds", "all test samples %", *named, "mean of sites", "worst site"]
    return f"`{results['command']}`\n\n" + table(head, rows)


TABLES = {
    "heart": lambda: sites("heart"),
    "har": lambda: sites("har", every=False),
    "fashion-mnist": lambda: study("fashion-mnist"),
    "fashion-mnist paired": lambda: paired("fashion-mnist"),
    "fashion-mnist curve": lambda: curve("fashion-mnist", 10),
    "femnist": lambda: study("femnist"),
    "femnist curve": lambda: curve("femnist", 20),
    "femnist clients": lambda: clients("femnist"),
    "shakespeare curve": lambda: curve("shakespeare", 1),
    "fedmix-search": lambda: study("fedmix-search", ("fedavg", "fedmix 0.1")),
    "fedmix-scale": lambda: study("fedmix-scale", ("fedavg", "fedmix 0.1")),
    "femnist-twice curve": lambda: curve("femnist-twice", 20),
    "fedmix-cifar10": lambda: study("fedmix-cifar10"),
    "fedmix-cifar10 curve": lambda: curve("fedmix-cifar10", 20),
    "fedmix in small": reproduced_page.fedmix_in_small,
    "fedmix-lr": lambda: study("fedmix-lr", ("fedavg", "fedmix 0.1")),
    "alignment": alignment,
    "aggenhance-mnist5k": lambda: study("aggenhance-mnist5k"),
    "aggenhance-fashion": lambda: study("aggenhance-fashion"),
    "robustness": lambda: crossed("robustness", "accuracy % after 20 rounds"),
    "mix2fld-small": lambda: channels("mix2fld-small"),
    "mix2fld-figure-2": mix2fld_page.figure_2,
    "mix2fld-literal": mix2fld_page.literal,
    "mix2fld-claims": mix2fld_page.claims,
    "mix2fld-figure-3": mix2fld_page.figure_3,
    "mix2fld-privacy": mix2fld_page.sample_privacy,
    "private": lambda: epsilons("private", "weights"),
    "reproduced": reproduced_page.details,
    "reproduced overview": reproduced_page.overview,
    "private-means": lambda: epsilons("private-means", "means", "private-base"),
    **augmix_page.TABLES,
    **xormixfl.TABLES,
}


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(), TABLES))
    for name, drawn in xormixfl.FIGURES.items():
        if picture := drawn():
            (DOCS / "figures" / f"{name}.png").write_bytes(picture)
