"""Tables of studies: FedMix, AggEnhance, robustness, privacy, sites."""

from __future__ import annotations

import statistics
from collections import defaultdict

from fedblend.analysis.plotting import BAND, MUTED, LineStyle, add_legend, blank_figure, line_styles, style_axes
from fedblend.report.guarantees import PRIVACY_NOTE
from tables.common import (
    Row,
    by_method,
    command_of,
    final_accuracy,
    last_accuracy,
    mean_std,
    save_svg,
    study_result,
    table,
)

TARGETS = {
    "femnist": 0.8,
    "femnist-checked": 0.8,
    "femnist-settings": 0.8,
    "aggenhance-mnist5k": 0.85,
    "fedmix-cifar10": 0.45,
}
"""Target accuracies of studies; 0.7 for others."""


def method_table(name: str, fashion_methods: tuple[str, ...] = ()) -> str:
    """A row for each method: final accuracy, mean of the last ten rounds, rounds to the target, megabytes.

    ``fashion_methods`` names methods of the Fashion-MNIST study that come first, with the same seeds.
    """
    result = study_result(name)
    seeds = {run["seed"] for run in result["runs"]}
    fashion = study_result("fashion-mnist")["runs"] if fashion_methods else []
    runs = [run for run in fashion if run["method"] in fashion_methods and run["seed"] in seeds] + result["runs"]
    target = TARGETS.get(name, 0.7)
    rows = []
    for method, group in by_method(runs).items():
        reached = [number for run in group if (number := _rounds_to(run, target)) is not None]
        rounds = mean_std(reached) or "not reached"
        if reached and len(reached) < len(group):
            rounds += f" ({len(reached)} of {len(group)})"
        accuracies = (mean_std(list(map(measure, group))) for measure in (final_accuracy, last_accuracy))
        sent = (statistics.mean(run["costs"][way] for run in group) / 1e6 for way in ("bytes_up", "bytes_down"))
        rows.append([method, str(len(group)), *accuracies, rounds, *(f"{megabytes:.1f}" for megabytes in sent)])
    reach = f"rounds to {100 * target:g} %"
    head = ["method", "seeds", "final accuracy %", "mean of last 10 %", reach, "MB up", "MB down"]
    return table(head, rows, command_of(result))


def draw_study(name: str, title: str, shown: tuple[str, ...]) -> None:
    """Accuracy by round: methods ``shown`` in colour, with a band over seeds; the others, which are level, in grey."""
    groups = by_method(study_result(name)["runs"])
    styles = line_styles(list(groups))
    figure = blank_figure(6.5, 3.6)
    axes = figure.subplots()
    for method, runs in groups.items():
        style = styles[method] if method in shown else LineStyle(MUTED, "-", "")
        seeds = [[100 * accuracy for accuracy in run["accuracy"]] for run in runs]
        mean, low, high = (list(map(pick, zip(*seeds, strict=True))) for pick in (statistics.mean, min, max))
        width = 2.0 if method in shown else 0.8
        axes.plot(runs[0]["rounds"], mean, color=style.colour, linestyle=style.dash, linewidth=width, label=method)
        if method in shown:
            axes.fill_between(runs[0]["rounds"], low, high, color=style.colour, alpha=BAND, linewidth=0)
    handles, names = axes.get_legend_handles_labels()
    rest = [method for method in groups if method not in shown]
    lines = {shown: line for line, shown in zip(handles, names, strict=True)}
    words = [f"{method} ({PRIVACY_NOTE})" if method == "global-mixup" else method for method in shown]
    add_legend(figure, [*(lines[method] for method in shown), lines[rest[0]]], [*words, ", ".join(rest)], ncols=2)
    style_axes(axes, "round", "test accuracy (%)")
    seeds = max(map(len, groups.values()))
    save_svg(figure, name, f"{title} ({'one seed' if seeds == 1 else f'means and range of {seeds} seeds'})")


def _rounds_to(run: Row, target: float) -> float | None:
    """The first evaluated round that reached the target."""
    return next((float(r) for r, a in zip(run["rounds"], run["accuracy"], strict=True) if a >= target), None)


def paired_table(name: str, base: str = "fedavg") -> str:
    """Each method's mean of the last ten rounds minus FedAvg's with the same seed (same split, same cohorts)."""
    last = {(run["method"], run["seed"]): last_accuracy(run) for run in study_result(name)["runs"]}
    seeds = sorted({seed for _, seed in last})
    rows = []
    for method in dict.fromkeys(method for method, _ in last):
        if method != base:
            differences = [last[method, seed] - last[base, seed] for seed in seeds]
            rows.append([method, *(f"{d:+.1f}" for d in differences), f"{statistics.mean(differences):+.1f}"])
    return table(["method", *(f"seed {seed}" for seed in seeds), "mean"], rows)


def curve_table(name: str, every: int) -> str:
    """Mean accuracy of each method by round, one round in ``every``."""
    groups = by_method(study_result(name)["runs"])
    rounds = sorted({r for runs in groups.values() for r in runs[-1]["rounds"] if r and r % every == 0})
    rows = []
    for method, runs in groups.items():
        by_round = {
            r: [100 * run["accuracy"][run["rounds"].index(r)] for run in runs if r in run["rounds"]] for r in rounds
        }
        rows.append([method, *(f"{statistics.mean(some):.1f}" if some else "" for some in by_round.values())])
    return table(["round", *map(str, rounds)], rows)


def share_table(name: str, every: int) -> str:
    """The share of samples whose Taylor prediction fails, in per cent, by method: the mean of ``every`` rounds each."""
    groups = {m: runs for m, runs in by_method(study_result(name)["runs"]).items() if "taylor_failed" in runs[0]}
    ends = range(every, 1 + max(len(run["taylor_failed"]) for runs in groups.values() for run in runs), every)
    rows = []
    for method, runs in groups.items():
        parts = [[100 * share for run in runs for share in run["taylor_failed"][end - every : end]] for end in ends]
        rows.append([method, *(f"{statistics.mean(part):.1f}" if part else "" for part in parts)])
    return table(["rounds", *(f"{end - every + 1} to {end}" for end in ends)], rows)


def client_table(name: str) -> str:
    """Accuracy over clients' own tests, of all clients and by samples held (FedMix, Table 13)."""
    runs = study_result(name)["runs"]
    sizes = list(dict.fromkeys(size for run in runs for size in run["clients"]["by_size"]))
    rows = []
    for run in runs:
        overall = run["clients"]
        groups = [overall["by_size"].get(size) for size in sizes]
        cells = (f"{100 * g['mean']:.1f} ± {100 * g['std']:.1f} ({g['clients']})" if g else "" for g in groups)
        both = f"{100 * overall['mean']:.1f} ± {100 * overall['std']:.1f}"
        rows.append([run["method"], both, f"{100 * overall['p10']:.1f}", *cells])
    return table(["accuracy over writers %", "mean ± std", "10th percentile", *(f"n_k {s}" for s in sizes)], rows)


def epsilon_table(name: str, what: str, base: str = "") -> str:
    """Accuracy of each method, and the epsilon stated for ``what``; the runs of the study ``base`` come first."""
    result = study_result(name)
    rows = []
    for run in (study_result(base)["runs"] if base else []) + result["runs"]:
        spent = run.get("epsilon", {}).get(what)
        accuracies = (f"{final_accuracy(run):.1f}", f"{last_accuracy(run):.1f}")
        rows.append([run["method"], *accuracies, f"{spent[-1][1]:.2f}" if spent else "none"])
    return table(["method", "accuracy %", "mean of last 10 %", "epsilon"], rows, command_of(result))


def adversary_table(name: str, heading: str) -> str:
    """Final accuracy, or the round in which a run failed: a row for each method, a column for each adversary."""
    result = study_result(name)
    cells: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for run in [*result["runs"], *result["failed"]]:
        method, _, adversary = run["method"].partition(" adversary=")
        failed = run.get("failed")
        cells[method][adversary].append(f"broke off in round {failed}" if failed else f"{final_accuracy(run):.1f}")
    adversaries = list(dict.fromkeys(adversary for row in cells.values() for adversary in row))
    rows = ([method, *(", ".join(row[adversary]) for adversary in adversaries)] for method, row in cells.items())
    return table([heading, *adversaries], rows, command_of(result))


def alignment_table() -> str:
    """Norm of each term's gradient, and its cosines to the gradient over all data and to Global Mixup's, by round."""
    result = study_result("alignment")
    parts = [
        f"{command_of(result)}, lambda = {result['lambda']}; each cell: norm, cosine to the gradient of everyone's "
        "data, cosine to Global Mixup's",
    ]
    rounds = list(result["rounds"])
    for where in ("at the global weights", "after local training"):
        rows = []
        for term in result["rounds"][rounds[0]][where]:
            cells = (result["rounds"][r][where][term] for r in rounds)
            row = [f"{c['norm']:.2f}, {c['cosine_to_all']:.2f}, {c['cosine_to_global_mixup']:.2f}" for c in cells]
            rows.append([term, *row])
        parts.append(table([where, *(f"round {r}" for r in rounds)], rows))
    return "\n\n".join(parts)


def site_table(name: str, each: bool = True) -> str:
    """Final accuracy of each method: over all test samples, at ``each`` site if wanted, their mean and the worst."""
    result = study_result(name)
    sites = list(dict.fromkeys(site for run in result["runs"] for site in run.get("sites", {}))) if each else []
    rows = []
    for method, runs in by_method(result["runs"]).items():
        means = [statistics.mean(100 * run["sites"][site] for run in runs) for site in runs[0].get("sites", {})]
        row = [method, str(len(runs)), mean_std(list(map(final_accuracy, runs)))]
        row += [f"{mean:.1f}" for mean in means] if each and means else [""] * len(sites)
        rows.append([*row, *([f"{statistics.mean(means):.1f}", f"{min(means):.1f}"] if means else ["", ""])])
    head = ["method", "seeds", "all test samples %", *sites, "mean of sites", "worst site"]
    return table(head, rows, command_of(result))
