"""The tables of docs/results.md and docs/privacy.md, made from committed results: no number is copied by hand.

python evidence/tables.py          rewrites each table between its two marks in docs, and draws docs/figures
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from fedblend.reference.filling import fill
from fedblend.reproduce import pages

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import mix2fld_page  # noqa: E402 (they lie beside this file, wherever that is read from)
import xormixfl  # noqa: E402

DOCS = HERE.parent / "docs"
PAGES = (DOCS / "results.md", DOCS / "privacy.md")
TARGETS = {"femnist": 0.8, "aggenhance-mnist5k": 0.85}
"""Accuracy of "rounds to" where a study's is not 70 %."""


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
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    if beside:
        seeds = {run["seed"] for run in results["runs"]}
        base = json.loads((HERE / "results" / "fashion-mnist.json").read_text())["runs"]
        results["runs"] = [r for r in base if r["method"] in beside and r["seed"] in seeds] + results["runs"]
    target = TARGETS.get(name, 0.7)
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in results["runs"]:
        by_method[run["method"]].append(run)
    lines = [
        f"`{results['command']}`",
        "",
        f"| method | seeds | final accuracy % | mean of last 10 % | rounds to {100 * target:g} % | MB up | MB down |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, runs in by_method.items():
        reached = [r for run in runs if (r := rounds_to(run, target)) is not None]
        rounds = mean_std([float(r) for r in reached]) if reached else "not reached"
        if reached and len(reached) < len(runs):
            rounds += f" ({len(reached)} of {len(runs)})"
        cells = [
            method,
            str(len(runs)),
            mean_std([100 * run["accuracy"][-1] for run in runs]),
            mean_std([100 * statistics.mean(run["accuracy"][-10:]) for run in runs]),
            rounds,
            *(f"{statistics.mean(run['costs'][way] for run in runs) / 1e6:.1f}" for way in ("bytes_up", "bytes_down")),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paired(name: str, base: str = "fedavg") -> str:
    """Each method's mean of the last ten rounds minus FedAvg's with the same seed (same split, same cohorts)."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    last = {(r["method"], r["seed"]): 100 * statistics.mean(r["accuracy"][-10:]) for r in results["runs"]}
    seeds = sorted({seed for _, seed in last})
    lines = [
        "| method | " + " | ".join(f"seed {s}" for s in seeds) + " | mean |",
        "|---" * (len(seeds) + 2) + "|",
    ]
    for method in dict.fromkeys(m for m, _ in last):
        if method != base:
            apart = [last[method, s] - last[base, s] for s in seeds]
            cells = [method, *(f"{a:+.1f}" for a in apart), f"{statistics.mean(apart):+.1f}"]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curve(name: str, every: int) -> str:
    """Accuracy of each method by round."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    by_method: dict[str, list[list[float]]] = defaultdict(list)
    rounds: list[int] = []
    for run in results["runs"]:
        rounds = [r for r in run["rounds"] if r and r % every == 0]
        by_method[run["method"]].append([100 * run["accuracy"][run["rounds"].index(r)] for r in rounds])
    lines = ["| round | " + " | ".join(map(str, rounds)) + " |", "|---" * (len(rounds) + 1) + "|"]
    for method, curves in by_method.items():
        means = [statistics.mean(values) for values in zip(*curves, strict=True)]
        lines.append("| " + " | ".join([method, *(f"{m:.1f}" for m in means)]) + " |")
    return "\n".join(lines)


def clients(name: str) -> str:
    """Accuracy over clients' own tests, in all and by samples held (FedMix, Table 13)."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    sizes = list(dict.fromkeys(size for run in results["runs"] for size in run["clients"]["by_size"]))
    lines = [
        "| accuracy over writers % | mean ± std | 10th percentile | " + " | ".join(f"n_k {s}" for s in sizes) + " |",
        "|---" * (len(sizes) + 3) + "|",
    ]
    for run in results["runs"]:
        over = run["clients"]
        groups = [over["by_size"].get(size) for size in sizes]
        cells = [
            run["method"],
            f"{100 * over['mean']:.1f} ± {100 * over['std']:.1f}",
            f"{100 * over['p10']:.1f}",
            *(f"{100 * g['mean']:.1f} ± {100 * g['std']:.1f} ({g['clients']})" if g else "" for g in groups),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def channels(name: str) -> str:
    """Final accuracy and best, bits sent up by a device, and seconds of the run over its channel."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    lines = [
        f"`{results['command']}`",
        "",
        "| method | final % | mean of last 4 % | kbit up a device | seconds |",
        "|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        sent = 8 * run["costs"]["bytes_up"] / results["clients"]["number"] / 1000
        last = 100 * statistics.mean(run["accuracy"][-4:])
        cells = [f"{100 * run['accuracy'][-1]:.1f}", f"{last:.1f}", f"{sent:,.0f}", f"{run['clock'][-1]:.1f}"]
        lines.append(f"| {run['method']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def attacks(name: str) -> str:
    """What InvGrad rebuilt, by stage, severity and what the attacker knows."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    lines = [
        f"`{results['command']}`",
        "",
        "| model | severity | attacker | MSE | PSNR dB | SSIM % |",
        "|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        numbers = [f"{row['mse']:.3f}", f"{row['psnr']:.2f}", f"{100 * row['ssim']:.1f}"]
        lines.append("| " + " | ".join([row["stage"], f"{row['severity']}", row["attacker"], *numbers]) + " |")
    return "\n".join(lines)


def augmix_accuracy() -> str:
    """Table III's MNIST block: accuracy on the global test set and over clients' own tests, beside the paper's."""
    results = json.loads((HERE / "results" / "augmix-mnist.json").read_text())
    lines = [
        f"`{results['command']}`",
        "",
        "| method, severity | test % | mean of last 3 % | own tests % | the paper % |",
        "|---|---|---|---|---|",
    ]
    for run in results["runs"]:
        over, paper = run["clients"], results["paper"].get(run["method"])
        cells = [
            run["method"],
            f"{100 * run['accuracy'][-1]:.1f}",
            f"{100 * statistics.mean(run['accuracy'][-3:]):.1f}",
            f"{100 * over['mean']:.1f} ± {100 * over['std']:.1f}",
            f"{paper:.2f}" if paper else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def augmix_attacks() -> str:
    """Table II's MNIST block: what InvGrad rebuilt, by stage, severity and what the attacker knows."""
    results = json.loads((HERE / "results" / "augmix-mnist.json").read_text())
    attack = results["attack"]
    lines = [
        f"InvGrad, {attack['images']} images, {attack['steps']} steps, {attack['iterations']} iterations",
        "",
        "| model | severity | attacker | clients | MSE | PSNR dB | SSIM % | cost |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["rows"]:
        attacker = row["attacker"] if row["loss_scaling"] else f"{row['attacker']}, no loss scaling"
        numbers = [_with_error(row, "mse", 3), _with_error(row, "psnr", 2), _with_error(row, "ssim", 1, 100)]
        cells = [row["stage"], f"{row['severity']}", attacker, f"{len(row['clients'])}", *numbers, f"{row['cost']:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _with_error(row: dict[str, Any], measure: str, digits: int, factor: int = 1) -> str:
    """A mean, and where there are several its standard error."""
    error = row.get(f"{measure}_error")
    mean = f"{factor * row[measure]:.{digits}f}"
    return mean if error is None else f"{mean} ± {factor * error:.{digits}f}"


def inverted() -> str:
    """PSNR (SSIM) of what InvGrad rebuilt from untrained models: a row a protection, a column what is attacked."""
    results = json.loads((HERE / "results" / "invgrad.json").read_text())
    columns = list(dict.fromkeys(_column(row) for row in results["rows"]))
    cells: dict[str, dict[Any, str]] = defaultdict(dict)
    for row in results["rows"]:
        cells[row["protection"]][_column(row)] = f"{row['psnr']:.1f} ({100 * row['ssim']:.0f})"
    heads = [
        f"{network}, {data}, {images} x {steps}, {iterations} it."
        for network, data, images, steps, iterations in columns
    ]
    lines = [
        f"`{results['command']}`; each cell: PSNR in dB (SSIM in %), mean over images and clients attacked",
        "",
        "| protection | " + " | ".join(heads) + " |",
        "|---" * (len(heads) + 1) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(row.get(one, "") for one in columns) + " |" for name, row in cells.items()]
    return "\n".join(lines)


def _column(row: dict[str, Any]) -> tuple[str, str, int, int, int]:
    return row["network"], row["data"], row["images"], row["steps"], row["iterations"]


def attack_speed() -> str:
    """Iterations of the attack in a second of one processor, beside the bare double backward."""
    results = json.loads((HERE / "results" / "invgrad.json").read_text())
    lines = [
        "| images | steps | iterations a second | bare double backward | times the bare |",
        "|---|---|---|---|---|",
    ]
    for row in results["speeds"]:
        steps = row["steps"] or "gradient"
        cells = [row["images"], steps, f"{row['a_second']:.0f}", f"{row['bare_a_second']:.0f}", f"{row['ratio']:.2f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def epsilons(name: str, what: str, beside: str = "") -> str:
    """Final accuracy, and epsilon of ``what`` left the clients, of each method; those of ``beside`` first."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    if beside:
        results["runs"] = json.loads((HERE / "results" / f"{beside}.json").read_text())["runs"] + results["runs"]
    lines = [
        f"`{results['command']}`",
        "",
        "| method | accuracy % | mean of last 10 % | epsilon |",
        "|---|---|---|---|",
    ]
    for run in results["runs"]:
        spent = run.get("epsilon", {}).get(what)
        last = 100 * statistics.mean(run["accuracy"][-10:])
        shown = f"{spent[-1][1]:.2f}" if spent else "none"
        lines.append(f"| {run['method']} | {100 * run['accuracy'][-1]:.1f} | {last:.1f} | {shown} |")
    return "\n".join(lines)


def crossed(name: str, heading: str) -> str:
    """Final accuracy, a row a method and a column a setting of the grid; or in which round a run broke off."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in [*results["runs"], *results.get("failed", [])]:
        method, _, setting = run["method"].partition(" adversary=")
        broke = run.get("failed")
        cells[method][setting].append(f"broke off in round {broke}" if broke else f"{100 * run['accuracy'][-1]:.1f}")
    settings = list(dict.fromkeys(setting for row in cells.values() for setting in row))
    lines = [
        f"`{results['command']}`",
        "",
        f"| {heading} | " + " | ".join(settings) + " |",
        "|---" * (len(settings) + 1) + "|",
    ]
    lines += ["| " + " | ".join([m, *(", ".join(row[s]) for s in settings)]) + " |" for m, row in cells.items()]
    return "\n".join(lines)


def alignment() -> str:
    """Norm of each term's gradient, and its cosine to everyone's and to Global Mixup's gradient, by round."""
    results = json.loads((HERE / "results" / "alignment.json").read_text())
    lines = [
        f"`{results['command']}`, lambda = {results['lambda']}; each cell: norm, cosine to the gradient of everyone's "
        "data, cosine to Global Mixup's",
    ]
    for where in ("at the global weights", "after local training"):
        rounds = list(results["rounds"])
        lines += [
            "",
            f"| {where} | " + " | ".join(f"round {r}" for r in rounds) + " |",
            "|---" * (len(rounds) + 1) + "|",
        ]
        for term in results["rounds"][rounds[0]][where]:
            cells = [results["rounds"][r][where][term] for r in rounds]
            row = [f"{c['norm']:.2f}, {c['cosine_to_all']:.2f}, {c['cosine_to_global_mixup']:.2f}" for c in cells]
            lines.append("| " + " | ".join([term, *row]) + " |")
    return "\n".join(lines)


def sites(name: str, every: bool = True) -> str:
    """Final accuracy of each method by site (mean over seeds), their mean and the worst; or these two alone."""
    results = json.loads((HERE / "results" / f"{name}.json").read_text())
    by_method: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for run in results["runs"]:
        by_method[run["method"]].append(run)
    named = list(dict.fromkeys(site for run in results["runs"] for site in run.get("sites", {}))) if every else []
    heads = ["method", "seeds", "all test samples %", *named, "mean of sites", "worst site"]
    lines = [f"`{results['command']}`", "", "| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for method, runs in by_method.items():
        told = [[100 * run["sites"][site] for run in runs] for site in runs[0].get("sites", {})]
        means = [statistics.mean(one) for one in told]
        cells = [method, str(len(runs)), mean_std([100 * run["accuracy"][-1] for run in runs])]
        cells += [f"{mean:.1f}" for mean in means] if every and told else [""] * len(named)
        cells += [f"{statistics.mean(means):.1f}", f"{min(means):.1f}"] if told else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def reproduced() -> str:
    """Every result of `fedblend reproduce` that is kept in evidence/reproductions, as its command printed it."""
    kept = sorted((HERE / "reproductions").glob("*.json"))
    return "\n".join(pages.markdown(json.loads(path.read_text()), level=3) for path in kept).rstrip()


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
    "fedmix-lr": lambda: study("fedmix-lr", ("fedavg", "fedmix 0.1")),
    "alignment": alignment,
    "aggenhance-mnist5k": lambda: study("aggenhance-mnist5k"),
    "aggenhance-fashion": lambda: study("aggenhance-fashion"),
    "robustness": lambda: crossed("robustness", "accuracy % after 20 rounds"),
    "augmix-attack": lambda: attacks("augmix-attack"),
    "augmix-mnist accuracy": augmix_accuracy,
    "augmix-mnist attacks": augmix_attacks,
    "invgrad": inverted,
    "invgrad speed": attack_speed,
    "mix2fld-small": lambda: channels("mix2fld-small"),
    "mix2fld-figure-2": mix2fld_page.figure_2,
    "mix2fld-literal": mix2fld_page.literal,
    "mix2fld-claims": mix2fld_page.claims,
    "mix2fld-figure-3": mix2fld_page.figure_3,
    "mix2fld-privacy": mix2fld_page.sample_privacy,
    "private": lambda: epsilons("private", "weights"),
    "reproduced": reproduced,
    "private-means": lambda: epsilons("private-means", "means", "private-base"),
    **xormixfl.TABLES,
}


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(), TABLES))
    for name, drawn in xormixfl.FIGURES.items():
        if picture := drawn():
            (DOCS / "figures" / f"{name}.png").write_bytes(picture)
