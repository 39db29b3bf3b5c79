"""Rewrite the tables of docs/results.md, reproductions.md and privacy.md from the committed results; nothing is run.

    python evidence/pages.py

Each table replaces the text between its two marks on a page. Figures that need the results alone are drawn too.
"""

from __future__ import annotations

import ast
import io
import json
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedblend.analysis.plotting import BAND, COLOURS, DASHES, DPI, INK, MUTED, LineStyle, line_styles, style_axes
from fedblend.experiment.reference import fill
from fedblend.papers import formatting
from fedblend.papers.items import Item, all_papers

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "evidence" / "results"
FIGURES = ROOT / "docs" / "figures"
PAGES = tuple(ROOT / "docs" / name for name in ("results.md", "reproductions.md", "privacy.md"))

Row = dict[str, Any]


def study_result(name: str) -> Row:
    """A study's committed result."""
    found: Row = json.loads((RESULTS / "studies" / f"{name}.json").read_text())
    return found


def paper_numbers(item: str, quantity: str, spread: bool = False) -> dict[str, tuple[float, ...]]:
    """A paper's numbers of an item such as ``xormixfl/table-2`` by row, or their standard deviations."""
    paper, _, name = item.partition("/")
    found = all_papers()[paper].items[name].quantities[quantity]
    return found.spread if spread else found.paper


def table(head: Sequence[str], rows: Iterable[Iterable[str]], above: str = "") -> str:
    """A table in Markdown, below a line of text if one is given."""
    lines = ["| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rows)]
    return "\n".join([above, "", *lines] if above else lines)


def command_of(result: Mapping[str, Any]) -> str:
    """The command that made a result, as code."""
    return f"`{result['command']}`"


def by_method(runs: Iterable[Row]) -> dict[str, list[Row]]:
    """Runs by their method, in the order in which methods occur."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for run in runs:
        groups[run["method"]].append(run)
    return groups


def mean_std(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation over seeds; empty for no values."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def final_accuracy(run: Row) -> float:
    """Test accuracy in per cent after the last round."""
    return float(100 * run["accuracy"][-1])


def last_accuracy(run: Row, rounds: int = 10) -> float:
    """Mean test accuracy in per cent of the last evaluated rounds."""
    return 100 * statistics.mean(run["accuracy"][-rounds:])


def figure_of(width: float, height: float) -> Any:
    """An empty figure of this size in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def save_png(figure: Any, name: str) -> None:
    """Write a figure to docs/figures."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    (FIGURES / f"{name}.png").write_bytes(buffer.getvalue())


# Studies of FedMix, AggEnhance and others -----------------------------------------------------------------------

TARGETS = {"femnist": 0.8, "aggenhance-mnist5k": 0.85, "fedmix-cifar10": 0.45}
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
    last = [*groups.values()][-1][-1]
    rounds = [r for r in last["rounds"] if r and r % every == 0]
    rows = []
    for method, runs in groups.items():
        means = (statistics.mean(100 * run["accuracy"][run["rounds"].index(r)] for run in runs) for r in rounds)
        rows.append([method, *(f"{mean:.1f}" for mean in means)])
    return table(["round", *map(str, rounds)], rows)


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


# Results of `fedblend reproduce` -----------------------------------------------------------------------------------

STUDY_HEADINGS = {
    "aggenhance/table-1": "aggenhance-three-ways-to-aggregate-with-and-without-the-points",
    "fed-augmix/table-2": "on-mnist-itself",
    "fed-augmix/table-3": "on-mnist-itself",
    "fed-augmix/figure-3": "on-mnist-itself",
    "fed-augmix/figure-4": "on-mnist-itself",
    "fed-augmix/figure-6": "on-mnist-itself",
    "fedmix/table-1": "fashion-mnist-two-classes-a-client",
    "fedmix/table-2": "shakespeare-mixing-embeddings",
    "fedmix/table-11": "femnist-real-writers",
    "fedmix/table-13": "femnist-real-writers",
    "mix2fld/figure-2": "figure-2-at-the-papers-sizes",
    "mix2fld/figure-3": "figure-3-ten-to-fifty-devices",
    "mix2fld/table-2": "tables-ii-and-iii-sample-privacy",
    "mix2fld/table-3": "tables-ii-and-iii-sample-privacy",
    "xormixfl/table-2": "table-2-accuracy-by-target-label",
    "xormixfl/table-3": "table-3-distance-to-raw-samples",
    "xormixfl/table-4": "table-4-dummy-labels-blending-and-alpha",
}
"""The heading in docs/results.md of a study of the item."""

COMPARED_WITH_FEDMIX = {
    "localmix": "LocalMix's",
    "naivemix": "NaiveMix's",
    "fedavg": "FedAvg's",
    "global": "Global Mixup's",
}
"""Rows that FedMix is compared with, and their names."""

ABSENT_DATA = {"fedmix/table-2": "LEAF's Shakespeare is not at hand"}
"""Items without a result because of their data."""


def all_items() -> dict[str, Item]:
    """Every table and figure of every paper."""
    return {f"{paper}/{name}": item for paper, file in all_papers().items() for name, item in file.items.items()}


def item_results() -> list[Row]:
    """All committed results of items, in the order of papers and items."""
    found = [json.loads(path.read_text()) for paper in all_papers() for path in (RESULTS / paper).glob("*.json")]
    order = list(all_items())
    return sorted(found, key=lambda result: (order.index(result["item"]), result["scale"] != "paper"))


def overview() -> str:
    """A row for each item: scale, data, claims that hold, and a link to the study."""
    results, items = item_results(), all_items()
    claims = Counter(claim["verdict"] for result in results for claim in result["claims"])
    text = (
        f"{len({result['item'] for result in results})} of {len(items)} items have results, {len(results)} in all. "
        f"Of their {claims.total()} claims, {claims['holds']} hold, {claims['holds in part']} in part, "
        f"{claims['does not hold']} do not, and {claims['undecided'] + claims['not measured']} were not decided."
    )
    rows = [
        _overview_row(name, item, [result for result in results if result["item"] == name])
        for name, item in items.items()
    ]
    return table(["item", "what", "scale", "data", "claims that hold", "also"], rows, text)


def _overview_row(name: str, item: Item, results: list[Row]) -> list[str]:
    study = f"[a study](#{STUDY_HEADINGS[name]})" if name in STUDY_HEADINGS else ""
    if not results:
        return [name, item.title, ABSENT_DATA.get(name, "not yet"), "", "", study]
    heading = re.sub(r"[^\w\- ]", "", f"{name}: {item.title}".lower()).replace(" ", "-")
    columns = zip(*map(_scale_data_claims, results), strict=True)
    cells = ("; ".join(dict.fromkeys(column)) for column in columns)
    return [f"[{name}](reproductions.md#{heading})", item.title, *cells, study]


def _scale_data_claims(result: Row) -> tuple[str, str, str]:
    """The scale, the data, and how many of the claims hold."""
    full = not (result["smaller"] or result["other_data"])
    # A result in which nothing is trained has no facts.
    data = ", ".join(result["facts"].get("data", {})) or ", ".join(t.split(" for ")[0] for t in result["other_data"])
    verdicts = [claim["verdict"] for claim in result["claims"]]
    decided = [verdict for verdict in verdicts if verdict not in ("undecided", "not measured")]
    in_part = f", {verdicts.count('holds in part')} in part" if "holds in part" in verdicts else ""
    holding = f"{verdicts.count('holds')} of {len(decided)}{in_part}" if verdicts else ""
    return "the paper's" if full else result["scale"], data, holding


def fedmix_in_small() -> str:
    """In how many cells on Fashion-MNIST FedMix ends above other methods; equal pairs of accuracies count once."""
    pairs: dict[str, set[tuple[float, float]]] = defaultdict(set)
    for result in item_results():
        if not (result["item"].startswith("fedmix/") and "fashion-mnist for cifar10" in result["other_data"]):
            continue
        cells = {(c["row"], c["column"]): c["ours"] for c in result["quantities"].get("accuracy", {}).get("cells", [])}
        for row, column in cells:
            fedmix = cells.get(("fedmix", column))
            if row in COMPARED_WITH_FEDMIX and column != "femnist" and cells[row, column] and fedmix:
                mean, other = (formatting.mean_over_seeds(ours) or 0.0 for ours in (fedmix, cells[row, column]))
                pairs[row].add((mean, other))
    texts = []
    for row, name in COMPARED_WITH_FEDMIX.items():
        differences = sorted(mean - other for mean, other in pairs[row])
        above = f"{sum(d > 0 for d in differences)} of {len(differences)} places"
        texts.append(f"{name} in {above} ({differences[0]:+.1f} to {differences[-1]:+.1f} points)")
    return f"Final accuracies of FedMix, on Fashion-MNIST in small, are above {', '.join(texts)}."


def item_pages() -> str:
    """Every result of an item, as its command printed it."""
    return "\n".join(formatting.markdown(result) for result in item_results()).rstrip()


# Mix2FLD ----------------------------------------------------------------------------------------------------------

PANELS = {
    "power_up=23.0 form=iid": "asymmetric channel, even labels",
    "power_up=40.0 form=iid": "symmetric channel, even labels",
    "power_up=23.0 form=non-iid": "asymmetric channel, uneven labels",
    "power_up=40.0 form=non-iid": "symmetric channel, uneven labels",
}
"""Figure 2's panels a, b, c and d: the end of a run's label, and the panel's title."""

BEST = "Mix2FLD 50, 100"
LAST = 3
"""Last evaluated rounds whose mean is the final accuracy."""

NEAR = 0.01
"""A run has converged in the first round whose accuracy is at most this much below the final one."""

CHANGE = 0.05
"""The paper's epsilon: it ends a run when the model, or the mean outputs of each label, change by less."""

Panel = dict[str, list[Row]]


def panels() -> dict[str, Panel]:
    """The runs of Figure 2 by panel and method, a list of seeds each."""
    found: dict[str, Panel] = {panel: defaultdict(list) for panel in PANELS}
    for run in study_result("mix2fld-figure-2")["runs"]:
        for panel, methods in found.items():
            if run["method"].endswith(" " + panel) and "t_max" not in run["method"]:
                methods[run["method"].removesuffix(" " + panel)].append(run)
    order = list(found[next(iter(PANELS))])
    return {panel: {name: methods[name] for name in order if name in methods} for panel, methods in found.items()}


def converged(run: Row) -> int:
    """The index, among evaluated rounds after training began, of the first near the final accuracy."""
    final = statistics.mean(run["accuracy"][-LAST:])
    return next(k for k, accuracy in enumerate(run["accuracy"]) if k and accuracy >= final - NEAR)


def seconds_to_converge(run: Row, kind: str = "clock") -> float:
    """Seconds until a run has converged: in total (``clock``), or of transmissions alone (``air``)."""
    return float(run[kind][converged(run)])


def stopping_round(run: Row) -> int | None:
    """The first round in which the paper's rule would have ended a run, if any."""
    changes = enumerate(run.get("change", []), 1)
    return next((k for k, change in changes if k > 1 and change is not None and 0 < change < CHANGE), None)


def mean(runs: Sequence[Row], measure: Callable[[Row], float]) -> float:
    """A measure's mean over seeds."""
    return statistics.mean(map(measure, runs))


def draw_mix2fld_figure_2() -> None:
    """Accuracy over seconds, a panel for each channel and split; bands span the seeds, at their mean times."""
    from matplotlib.lines import Line2D

    found = panels()
    chosen = line_styles(list(dict.fromkeys(method for panel in found.values() for method in panel)))
    figure = figure_of(11, 8.4)
    axes = figure.subplots(2, 2, sharey=True)
    for (panel, title), one in zip(PANELS.items(), axes.flat, strict=True):
        for method, runs in found[panel].items():
            _draw_line(one, runs, chosen[method])
        one.set_title(title, loc="left", fontsize=9.5, color=MUTED)
    for number, one in enumerate(axes.flat):
        style_axes(
            one, "seconds, on the air and computing" if number > 1 else "", "" if number % 2 else "test accuracy (%)"
        )
    handles = [
        Line2D([], [], color=look.colour, linestyle=look.dash, marker=look.marker, markersize=4, linewidth=2)
        for look in chosen.values()
    ]
    lowest = min(min(run["accuracy"][1:]) for panel in found.values() for runs in panel.values() for run in runs)
    axes.flat[0].set_ylim(bottom=100 * lowest - 3)  # untrained models would take most of the figure
    words = [
        m.replace("Mix2FLD ", "Mix2FLD, seeds sent and made: ").replace("MixFLD ", "MixFLD, seeds sent: ")
        for m in chosen
    ]
    figure.legend(handles, words, loc="outside lower left", ncols=3, fontsize=9, frameon=False, labelcolor=INK)
    save_png(figure, "mix2fld-figure-2")


def _draw_line(axes: Any, runs: Sequence[Row], look: LineStyle) -> None:
    x = [statistics.mean(times) for times in zip(*(run["clock"] for run in runs), strict=True)]
    values = [[100 * a for a in seeds] for seeds in zip(*(run["accuracy"] for run in runs), strict=True)]
    middle = [statistics.mean(v) for v in values]
    axes.plot(x, middle, color=look.colour, linestyle=look.dash, marker=look.marker, markersize=4, linewidth=1.6)
    if len(runs) > 1:
        axes.fill_between(x, list(map(min, values)), list(map(max, values)), color=look.colour, alpha=BAND, linewidth=0)


def draw_mix2fld_figure_3() -> None:
    """Each device's accuracy by the number of devices, and their mean; a panel for each split."""
    figure = figure_of(9, 3.8)
    forms = {"iid": "even labels", "non-iid": "uneven labels"}
    everything = study_result("mix2fld-figure-3")["runs"]
    for (form, title), axes, colour in zip(forms.items(), figure.subplots(1, 2, sharey=True), COLOURS, strict=False):
        runs = [run for run in everything if run["method"].endswith(f" form={form}")]
        by_number = {len(run["devices"]): run for run in sorted(runs, key=lambda run: len(run["devices"]))}
        for number, run in by_number.items():
            axes.plot([number] * number, [100 * a for a in run["devices"]], "o", color=colour, alpha=0.3)
        means = [100 * run["mean"] for run in by_number.values()]
        axes.plot(list(by_number), means, color=colour, marker="D", linewidth=1.6, label="mean")
        axes.set_title(title, loc="left", fontsize=9.5, color=MUTED)
        axes.set_xticks(list(by_number))
        axes.margins(x=0.06)
        axes.legend(fontsize=9, frameon=False, labelcolor=INK, loc="lower right")
        style_axes(axes, "devices", "" if form == "non-iid" else "test accuracy of each device (%)")
    save_png(figure, "mix2fld-figure-3")


def channel_table(name: str) -> str:
    """Final accuracy and mean of the last rounds, bits sent up by a device, and seconds of the run over its channel."""
    result = study_result(name)
    rows = []
    for run in result["runs"]:
        sent = 8 * run["costs"]["bytes_up"] / result["clients"]["number"] / 1000
        accuracies = (f"{final_accuracy(run):.1f}", f"{last_accuracy(run, 4):.1f}")
        rows.append([run["method"], *accuracies, f"{sent:,.0f}", f"{run['clock'][-1]:.1f}"])
    head = ["method", "final %", "mean of last 4 %", "kbit up a device", "seconds"]
    return table(head, rows, command_of(result))


def mix2fld_figure_2() -> str:
    """A row for each method in each panel: accuracy, time to converge, bits sent up by a device, and uploads lost."""
    result, found = study_result("mix2fld-figure-2"), panels()
    devices = result["clients"]["number"]
    rows = []
    for panel, title in PANELS.items():
        for method, runs in found[panel].items():
            stops = map(stopping_round, runs)
            uploads = sum(devices * run["rounds"][-1] for run in runs)
            rows.append(
                [
                    title.replace(" channel, ", ", ").replace(" labels", ""),
                    method,
                    f"{mean(runs, lambda run: last_accuracy(run, LAST)):.1f}",
                    ", ".join(str(runs[0]["rounds"][converged(run)]) for run in runs),
                    f"{mean(runs, lambda run: seconds_to_converge(run, 'air')):.2f}",
                    f"{mean(runs, seconds_to_converge):.1f}",
                    ", ".join("-" if stop is None else str(stop) for stop in stops),
                    f"{mean(runs, lambda run: 8 * run['costs']['bytes_up']) / devices / 1000:,.0f}",
                    f"{sum(run.get('lost', 0) for run in runs)} of {uploads}",
                ]
            )
    head = ("channel, labels", "method", f"mean of last {LAST} %", "converged in round", "s on the air until then",
            "s in all", "round of the paper's rule", "kbit up a device", "uploads lost")  # fmt: skip
    return table(head, rows, command_of(result))


def mix2fld_t_max() -> str:
    """FL at the paper's own T_max: accuracy by round, and uploads lost."""
    rows = []
    for run in study_result("mix2fld-figure-2")["runs"]:
        if "t_max=0.1" in run["method"]:
            curve = ", ".join(f"{100 * accuracy:.1f}" for accuracy in run["accuracy"][1:])
            rows.append([run["method"], curve, f"{run['lost']} of {10 * run['rounds'][-1]}"])
    return table(("method", "accuracy % by round", "uploads lost"), rows)


def mix2fld_figure_3() -> str:
    """A row for each number of devices: mean and variance of their accuracies, for both splits."""
    result = study_result("mix2fld-figure-3")
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run in result["runs"]:
        method, _, form = run["method"].rpartition(" form=")
        groups[form, method].append(run)
    ten = {form: runs for (form, _), runs in reversed(groups.items())}
    rows = []
    for (form, method), runs in sorted(groups.items(), key=lambda item: item[0][0]):
        (average, variance), (average_of_ten, variance_of_ten) = (
            (mean(some, lambda run: run["mean"]), mean(some, lambda run: run["variance"])) for some in (runs, ten[form])
        )
        rows.append(
            [
                form,
                method,
                f"{100 * average:.2f}",
                f"{100 * (average - average_of_ten):+.2f}",
                f"{1e4 * variance:.3f}",
                f"{variance / variance_of_ten:.2f}",
                f"{100 * mean(runs, lambda run: run['server']):.2f}",
            ]
        )
    head = ("labels", "devices", "mean accuracy %", "beside 10", "variance, points^2", "x 10's", "server's model %")
    return table(head, rows, command_of(result))


def sample_privacy() -> str:
    """Mix2FLD's Tables II and III: for each data set the paper's row, the smallest distances, and the mean ones."""
    result = study_result("mix2fld-privacy")
    rows = []
    for which, title, item in (("mixup", "II, Mixup", "table-2"), ("mix2up", "III, Mix2up", "table-3")):
        for one in result["sets"]:
            note = ", labels coordinated" if one["coordinated"] else ""
            paper = paper_numbers(f"mix2fld/{item}", "privacy")[one["data"]]
            rows.append([title, f"{one['data']}, the paper", *(f"{v:.3f}" for v in paper), "", ""])
            for kind in ("smallest", "mean"):
                values = [row[f"{which}_{kind}"] for row in one["rows"]]
                largest = max((ours - theirs for ours, theirs in zip(values, paper, strict=True)), key=abs)
                rows.append(["", f"{kind}{note}", *(f"{v:.3f}" for v in values), f"{largest:+.3f}", ""])
            rows[-1][-1] = ", ".join(f"{100 * row[f'{which}_recognised']:.0f}" for row in one["rows"])
    lambdas = (f"{lam:g}" for lam in result["lambdas"])
    head = ("table", "data", *lambdas, "largest difference", "recognised %, by lambda")
    return table(head, rows, command_of(result))


def mix2fld_claims() -> str:
    """The claims of Figure 2: the paper's number, ours for even and uneven labels, and a verdict."""
    found = panels()
    rows = [*_channel_claims(found, "asymmetric"), *_channel_claims(found, "symmetric")]
    rows += [*_seed_claims(found), _payload_claim(found)]
    return table(("claim", "the paper", "here: even labels; uneven", "verdict"), rows)


class MethodPair:
    """Two methods in the two panels of a channel, even labels first."""

    def __init__(self, found: Mapping[str, Panel], channel: str, a: str, b: str) -> None:
        power = {"asymmetric": "power_up=23.0", "symmetric": "power_up=40.0"}[channel]
        two = [found[f"{power} form={form}"] for form in ("iid", "non-iid")]
        self.pairs = [(panel[a], panel[b]) for panel in two]

    def above(self, claim: str, paper: str, uneven: bool = False) -> list[str]:
        """A row: points of accuracy by which a is above b. ``uneven``: uneven labels alone decide the verdict."""
        by = [100 * (mean(a, _final) - mean(b, _final)) for a, b in self.pairs]
        return [claim, paper, "; ".join(f"{one:+.1f}" for one in by), verdict(by[uneven:], 0.0)]

    def faster(self, claim: str, paper: str, kind: str = "clock") -> list[str]:
        """A row: b's time to converge over a's."""
        times = [[mean(runs, lambda run: seconds_to_converge(run, kind)) for runs in pair] for pair in self.pairs]
        by = [b / a for a, b in times]
        return [claim, paper, "; ".join(f"{one:.2f}x" for one in by), verdict(by, 1.0)]


def _final(run: Row) -> float:
    return statistics.mean(run["accuracy"][-LAST:])


def _channel_claims(found: Mapping[str, Panel], channel: str) -> list[list[str]]:
    fl, fd = MethodPair(found, channel, BEST, "FL"), MethodPair(found, channel, BEST, "FD")
    asymmetric = channel == "asymmetric"
    rows = [
        fl.faster(f"{channel}: Mix2FLD converges sooner than FL", "1.2x" if asymmetric else "1.9x"),
        fl.faster(f"{channel}: the same, counting the air alone", "", "air"),
    ]
    if not asymmetric:
        best = MethodPair(found, channel, "FL", BEST)
        return [best.above("symmetric: FL is more accurate than Mix2FLD", "highest; as high, if uneven"), *rows]
    return [
        fl.above("asymmetric: Mix2FLD is more accurate than FL", "up to +16.7"),
        *rows,
        fd.above("Mix2FLD is more accurate than FD", "up to +17.3"),
        MethodPair(found, channel, "FD", BEST).faster("FD converges sooner than Mix2FLD", "1.025x"),
    ]


def _seed_claims(found: Mapping[str, Panel]) -> list[list[str]]:
    """The claims about seed samples, which do not depend on the channel."""
    few, many = "Mix2FLD 10, 10", "Mix2FLD 50, 50"

    def pair(a: str, b: str) -> MethodPair:
        return MethodPair(found, "asymmetric", a, b)

    return [
        pair(BEST, "MixFLD 50").above("inversely mixed seeds beat mixed ones", "most, if uneven"),
        pair("FD", "MixFLD 50").above("MixFLD falls behind FD, labels uneven", "fails", uneven=True),
        pair("Mix2FLD 10, 20", few).above("making 20 of 10 seeds beats making 10", "up to +1.7"),
        pair(BEST, many).above("making 100 of 50 seeds beats making 50", "up to +1.7"),
        pair(many, few).above("50 seeds are more accurate than 10", "more"),
        pair(few, many).faster("10 seeds converge sooner than 50", "sooner"),
    ]


def _payload_claim(found: Mapping[str, Panel]) -> list[str]:
    fl, few = (found["power_up=23.0 form=iid"][name][0] for name in ("FL", "Mix2FLD 10, 10"))
    quotient = fl["costs"]["bytes_up"] / few["costs"]["bytes_up"]
    claim = f"bits up, beside FL's: 10 seeds, {fl['rounds'][-1]} rounds"
    return [claim, "42.4x fewer", f"{quotient:.1f}x fewer", verdict([quotient], 1.0)]


def verdict(values: Sequence[float], bound: float) -> str:
    """Whether all numbers lie above a bound, none of them, or some."""
    above = [value > bound for value in values]
    return "comes out" if all(above) else "does not come out" if not any(above) else "comes out in one of two"


# XorMixFL -----------------------------------------------------------------------------------------------------

PAPER_ROWS = {
    "xormixfl": "xormixfl",
    "xormixfl, 1 dummy": "xormixfl",
    "mixfl": "mixfl",
    "mixfl, 1 dummy": "mixfl",
    "mixfl, equal parts": "mixfl",
    "vanilla-fl": "vanilla",
    "standalone": "standalone",
}
"""The row of the paper's tables that a method of ours is compared with."""

DUMMIES = ([3], [3, 4], [3, 4, 5])
ALPHAS = (0.25, 0.5, 0.95)
HIDDEN_LABEL = 9
"""The target label of Tables 3 and 4."""

LEAKS = {
    "clear": "sent in clear %",
    "clear_ink": "of the target's ink %",
    "bits": "bits right after a usual dummy %",
    "blind": "bits right unseen %",
    "sent_recognised": "seed known %",
    "made_recognised": "decoded known %",
}
"""Columns of ``fedblend privacy xor`` by their names in its JSON."""


class XorRun(NamedTuple):
    """A run of XorMixFL's studies."""

    method: str
    settings: dict[str, Any]
    """The settings in the run's label."""
    seed: int
    accuracy: float
    """Final test accuracy in per cent."""
    by_label: list[float]
    """The same by label."""

    def label_accuracy(self, labels: Iterable[int]) -> float:
        """Mean accuracy of some labels."""
        return statistics.mean(self.by_label[label] for label in labels)


Measure = Callable[[XorRun], float]


def all_accuracy(run: XorRun) -> float:
    """Final test accuracy."""
    return run.accuracy


def target_accuracy(run: XorRun) -> float:
    """Mean accuracy of the run's own target labels."""
    return run.label_accuracy(run.settings["targets"])


def xor_runs(result: Row) -> list[XorRun]:
    """The runs of a study's result."""
    return [
        XorRun(*parsed(run["method"]), run["seed"], final_accuracy(run), [100 * a for a in run["per_class"]])
        for run in result["runs"]
    ]


def parsed(label: str) -> tuple[str, dict[str, Any]]:
    """A method's name and settings, from a label such as ``xormixfl, 1 dummy targets=[0, 2]``."""
    found = re.findall(r" (\w+)=(\[[^]]*\]|\S+)", label)
    return re.split(r" \w+=", label)[0], {name: ast.literal_eval(value) for name, value in found}


def ours_and_paper(ours: Sequence[float], paper: float | None) -> str:
    """Ours, and in brackets the paper's with the difference: ``93.1 ± 0.4 (94.4, -1.3)``."""
    if not ours or paper is None:
        return mean_std(ours)
    return f"{mean_std(ours)} ({paper:.1f}, {statistics.mean(ours) - paper:+.1f})"


# Table 2 and Figure 3: four methods by choice of target labels.

TARGET_METHODS = ("xormixfl", "xormixfl, 1 dummy", "mixfl", "mixfl, 1 dummy", "vanilla-fl", "standalone")


class TargetRuns:
    """The runs of Table 2 by method and target labels, with the paper's choices of labels and its numbers."""

    def __init__(self, name: str) -> None:
        self.result = study_result(name)
        self.runs = xor_runs(self.result)
        item = all_items()["xormixfl/table-2"]
        self.targets: list[list[int]] = list(map(list, item.grid["partition.targets"]))
        self.paper = paper_numbers("xormixfl/table-2", "accuracy")

    def accuracies(self, method: str, targets: Sequence[int]) -> list[float]:
        """Accuracies of a method with these target labels, one for each seed."""
        return [r.accuracy for r in self.runs if r.method == method and r.settings["targets"] == list(targets)]

    def by_seed(self, method: str, number: int, measure: Measure) -> list[float]:
        """For each seed the mean of a measure over all choices of ``number`` target labels."""
        runs = [r for r in self.runs if r.method == method and len(r.settings["targets"]) == number]
        seeds = sorted({r.seed for r in runs})
        return [statistics.mean(measure(r) for r in runs if r.seed == seed) for seed in seeds]


def xor_table_2(name: str = "xormixfl-mnist") -> str:
    """Final test accuracy: a row for each choice of target labels, and a mean for each number of them."""
    found = TargetRuns(name)
    methods = [m for m in TARGET_METHODS if any(r.method == m for r in found.runs)]
    rows = []
    for k, targets in enumerate(found.targets):
        cells = [ours_and_paper(found.accuracies(m, targets), found.paper[PAPER_ROWS[m]][k]) for m in methods]
        rows.append([", ".join(map(str, targets)), *cells])
    for number in sorted({len(targets) for targets in found.targets}):
        chosen = [k for k, targets in enumerate(found.targets) if len(targets) == number]
        means = [statistics.mean(found.paper[PAPER_ROWS[m]][k] for k in chosen) for m in methods]
        ours = [found.by_seed(m, number, all_accuracy) for m in methods]
        rows.append([f"**mean, N = {number}**", *map(ours_and_paper, ours, means)])
    seeds = len({r.seed for r in found.runs})
    above = f"{command_of(found.result)}; {seeds} seed{'s' if seeds > 1 else ''}; test accuracy in per cent: ours ± "
    return table(["target labels", *methods], rows, f"{above}deviation over seeds (the paper's, difference)")


def xor_figure_3_table(name: str = "xormixfl-mnist") -> str:
    """Accuracy of the target labels by their number."""
    found = TargetRuns(name)
    numbers = sorted({len(targets) for targets in found.targets})
    rows = [[m, *(mean_std(found.by_seed(m, n, target_accuracy)) for n in numbers)] for m in TARGET_METHODS]
    text = table(["target labels' accuracy %", *(f"N = {n}" for n in numbers)], rows)
    picture = f"figures/{name.removesuffix('-mnist')}-figure-3.png"
    return f"{text}\n\n![Accuracy of each target label, for N = 1, 2 and 4]({picture})"


def xor_target_claims(name: str = "xormixfl-mnist") -> str:
    """The paper's claims of Table 2 and Figure 3, and whether they came out."""
    found = TargetRuns(name)
    rows = []
    for method in ("standalone", "vanilla-fl", "mixfl"):
        columns = [[found.accuracies(m, targets) for targets in found.targets] for m in ("xormixfl", method)]
        ours = [(statistics.mean(a), statistics.mean(b)) for a, b in zip(*columns, strict=True) if a and b]
        paper = list(zip(found.paper["xormixfl"], found.paper[PAPER_ROWS[method]], strict=True))
        if not ours:
            continue
        claim = f"XorMixFL above {method}, points: mean (least to most)"
        rows.append([claim, _gap(paper), _gap(ours), _same_order(paper, ours)])
        if method != "mixfl":
            gains = [max(100 * (a / b - 1) for a, b in pairs) for pairs in (paper, ours)]
            words = [f"{gain:.1f}" for gain in gains]
            rows.append([f"the largest gain over {method}, relative %", *words, _reached(*gains)])
    one, alone = (found.by_seed(m, 1, target_accuracy) for m in ("xormixfl", "standalone"))
    if one and alone:
        share, times = statistics.mean(one), statistics.mean(one) / max(statistics.mean(alone), 0.1)
        rows.append(["target's accuracy at N = 1, %", "65", f"{share:.1f}", _reached(65, share)])
        rows.append(["the same as a multiple of standalone's", "1.87", f"{times:.2f}", _reached(1.87, times)])
    by_number = [statistics.mean(v) for n in (1, 2, 4) if (v := found.by_seed("xormixfl", n, target_accuracy))]
    if len(by_number) == 3:
        falls = by_number[0] > by_number[1] > by_number[2]
        ours_and_verdict = ("yes", "came out") if falls else ("no", "did not")
        rows.append(["target's accuracy falls with N", "yes", *ours_and_verdict])
    return table(["claim", "the paper", "ours", ""], rows)


def _gap(pairs: Sequence[tuple[float, float]]) -> str:
    differences = [a - b for a, b in pairs]
    return f"{statistics.mean(differences):+.1f} ({min(differences):+.1f} to {max(differences):+.1f})"


def _same_order(paper: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]]) -> str:
    above = statistics.mean(a - b for a, b in paper) > 0
    return f"the paper's order in {sum((a > b) == above for a, b in ours)} of {len(ours)}"


def _reached(paper: float, ours: float) -> str:
    return "reached" if ours >= paper else "not reached"


BAR_METHODS = ("xormixfl", "mixfl", "vanilla-fl", "standalone")


def draw_xor_figure_3(name: str = "xormixfl-mnist") -> None:
    """Figure 3: accuracy of each target label, their mean, and of all labels; a panel for each number of targets N.

    Bars are means over seeds and over the choices of target labels that include the label.
    """
    found = TargetRuns(name)
    figure = figure_of(11.0, 7.2)
    figure.suptitle(
        "XorMixFL: accuracy of target labels", x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK
    )
    grid = figure.add_gridspec(2, 2)
    for number, cell in {1: grid[0, :], 2: grid[1, 0], 4: grid[1, 1]}.items():
        axes = figure.add_subplot(cell)
        _draw_bars(axes, found, number)
        axes.set_title(f"N = {number}", loc="left", fontsize=9.5, color=MUTED)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", fontsize=9, frameon=False, labelcolor=INK, ncols=len(names))
    save_png(figure, f"{name.removesuffix('-mnist')}-figure-3")


def _draw_bars(axes: Any, found: TargetRuns, number: int) -> None:
    labels = sorted({label for targets in found.targets if len(targets) == number for label in targets})
    heads = [*map(str, labels), "targets", "all labels"]
    width = 0.8 / len(BAR_METHODS)
    for k, (method, look) in enumerate(line_styles(BAR_METHODS).items()):
        runs = [r for r in found.runs if r.method == method and len(r.settings["targets"]) == number]
        bars = [[r.by_label[label] for r in runs if label in r.settings["targets"]] for label in labels]
        bars += [found.by_seed(method, number, measure) for measure in (target_accuracy, all_accuracy)]
        x = [bar + (k - (len(BAR_METHODS) - 1) / 2) * width for bar in range(len(bars))]
        means = [statistics.mean(values) if values else 0.0 for values in bars]
        errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in bars]
        axes.bar(x, means, 0.9 * width, yerr=errors, color=look.colour, label=method, error_kw={"linewidth": 0.8})
    style_axes(axes, "target label", "accuracy (%)")
    axes.set_ylim(0, 100)
    axes.set_xticks(range(len(heads)), heads)


# Table 3: the distance from raw samples of what the server trains on.

DISTANCE_METHODS = ("xormixfl", "mixfl", "mixfl, equal parts")
Means = Mapping[str, Sequence[Sequence[float]]]
"""Mean distances by method: a row for each number of dummy labels M, a column for each p from 1 to 5."""


def _short(method: str, number: int) -> str:
    """A row of the paper's Tables 3 and 4, such as ``xor-1``."""
    return f"{'xor' if PAPER_ROWS[method] == 'xormixfl' else 'mixfl'}-{number}"


def _distance_row(rows: Sequence[Row], method: str, dummies: Sequence[int], p: int) -> Row:
    return next(r for r in rows if r["p"] == p and parsed(r["method"]) == (method, {"dummies": list(dummies)}))


def xor_table_3(name: str = "xormixfl-distance") -> str:
    """Distance after multidimensional scaling by method, M and p; in a second table the distance itself."""
    result = study_result(name)
    paper, deviations = (paper_numbers("xormixfl/table-3", "mds", spread) for spread in (False, True))
    parts = [f"{command_of(result)}; mean ± deviation over samples (the paper's)"]
    for measure, words in (("mds", "MDS"), ("distance", "distance itself")):
        rows = []
        for method in dict.fromkeys(parsed(row["method"])[0] for row in result["rows"]):
            for m, dummies in enumerate(DUMMIES, 1):
                cells = []
                for p in range(1, 6):
                    mean, deviation = _distance_row(result["rows"], method, dummies, p)[measure]
                    key = _short(method, m)
                    theirs = f" ({paper[key][p - 1]:.0f} ± {deviations[key][p - 1]:.0f})" if measure == "mds" else ""
                    cells.append(f"{mean:.0f} ± {deviation:.0f}{theirs}")
                rows.append([method, str(m), *cells])
        parts.append(table([words, "M", *(f"p = {p}" for p in range(1, 6))], rows))
    return "\n\n".join(parts)


def xor_distance_claims(name: str = "xormixfl-distance") -> str:
    """The paper's claims of Table 3, for its numbers, for ours after scaling, and for the distance itself."""
    rows, numbers = study_result(name)["rows"], paper_numbers("xormixfl/table-3", "mds")
    paper = {method: [numbers[_short(method, m)] for m in (1, 2, 3)] for method in DISTANCE_METHODS}
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


# Table 4: dummy labels, blending and alpha; and the offset.

TABLE_4_MEASURES: Mapping[str, Measure] = {
    "accuracy": all_accuracy,
    "target": lambda run: run.label_accuracy([HIDDEN_LABEL]),
}
Grid = Mapping[int, Sequence[Sequence[float]]]
"""A measure by p: a row for each number of dummy labels, a column for each alpha."""


def _dummy_values(runs: Sequence[XorRun], method: str, measure: Measure) -> dict[int, list[list[list[float]]]]:
    """A measure over seeds by p, dummy labels and alpha."""

    def values(p: int, dummies: Sequence[int], alpha: float) -> list[float]:
        settings = {"p": p, "dummies": list(dummies), "alpha": alpha}
        return [measure(r) for r in runs if r.method == method and r.settings == settings]

    return {p: [[values(p, dummies, alpha) for alpha in ALPHAS] for dummies in DUMMIES] for p in (1, 5)}


def _paper_grid(method: str, measure: str) -> Grid:
    """The paper's numbers of Table 4, whose columns are pairs of dummy labels and alpha."""
    numbers = paper_numbers("xormixfl/table-4", measure)
    width = len(ALPHAS)
    return {p: [numbers[_short(method, p)][width * m :][:width] for m in range(len(DUMMIES))] for p in (1, 5)}


def xor_table_4(name: str = "xormixfl-dummies") -> str:
    """Test accuracy and the target's, by method, p, M and alpha."""
    result = study_result(name)
    runs = xor_runs(result)
    rows = []
    for method in dict.fromkeys(r.method for r in runs):
        pairs = [(_dummy_values(runs, method, of), _paper_grid(method, key)) for key, of in TABLE_4_MEASURES.items()]
        for p in (1, 5):
            for m in range(len(DUMMIES)):
                cells = [
                    ours_and_paper(a, b) for ours, paper in pairs for a, b in zip(ours[p][m], paper[p][m], strict=True)
                ]
                rows.append([method, str(p), str(m + 1), *cells])
    seeds = len({r.seed for r in runs})
    heads = [f"{what}, alpha {alpha:g}" for what in ("accuracy", "target's") for alpha in ALPHAS]
    above = f"{command_of(result)}; {seeds} seed{'s' if seeds > 1 else ''}; per cent, ours (the paper's, difference)."
    above += " At p = 1 nothing is blended, and alpha plays no part."
    return table(["method", "p", "M", *heads], rows, above)


def xor_dummy_claims(name: str = "xormixfl-dummies") -> str:
    """The paper's claims of Table 4, and whether they came out."""
    runs = xor_runs(study_result(name))
    rows = []
    for method in dict.fromkeys(r.method for r in runs):
        for measure, words in {"accuracy": "test accuracy", "target": "target's accuracy"}.items():
            values = _dummy_values(runs, method, TABLE_4_MEASURES[measure])
            ours = {p: [[statistics.mean(seeds) for seeds in row] for row in grid] for p, grid in values.items()}
            for setting, change in TABLE_4_CHANGES.items():
                changes = [statistics.mean(change(grid)) for grid in (_paper_grid(method, measure), ours)]
                sign = "the paper's sign" if changes[0] * changes[1] > 0 else "not the paper's sign"
                rows.append([f"{method}: {words}, {setting}", *(f"{c:+.1f}" for c in changes), sign])
    return table(["change in points, mean over the other settings", "the paper", "ours", ""], rows)


TABLE_4_CHANGES: dict[str, Callable[[Grid], list[float]]] = {
    "from M = 1 to 3": lambda grid: [grid[p][2][a] - grid[p][0][a] for p in (1, 5) for a in range(3)],
    "from p = 1 to 5": lambda grid: [grid[5][m][a] - grid[1][m][a] for m in range(3) for a in range(3)],
    "from alpha 0.25 to 0.95 at p = 5": lambda grid: [grid[5][m][2] - grid[5][m][0] for m in range(3)],
}


def _leak_shares(rows: Sequence[Row], offset: int) -> list[str]:
    """Means in per cent over the target labels, of the rows with an offset; empty where there are none."""
    chosen = [row for row in rows if parsed(row["method"])[1]["offset"] == offset]
    return [f"{100 * statistics.mean(row[key] for row in chosen):.1f}" if chosen else "" for key in LEAKS]


def xor_offset(name: str = "xormixfl-offset", leaks: str = "xormixfl-offset-leaks") -> str:
    """Accuracy, the target's, and what is revealed, by the grey levels that are added to black dummy pixels."""
    result, leak_rows = study_result(name), study_result(leaks)["rows"]
    runs = xor_runs(result)
    rows = []
    for offset in sorted({r.settings["offset"] for r in runs}):
        chosen = [r for r in runs if r.settings["offset"] == offset]
        seeds = sorted({r.seed for r in chosen})
        means = [
            [statistics.mean(measure(r) for r in chosen if r.seed == seed) for seed in seeds]
            for measure in (all_accuracy, target_accuracy)
        ]
        rows.append([str(offset), *map(mean_std, means), *_leak_shares(leak_rows, offset)])
    targets = ", ".join(map(str, sorted({r.settings["targets"][0] for r in runs})))
    above = f"{command_of(result)}; means over the target labels {targets}, deviation over seeds"
    return table(["offset", "accuracy %", "target's accuracy %", *LEAKS.values()], rows, above)


def xor_offset_leaks(leaks: str = "xormixfl-offset-leaks") -> str:
    """What is revealed, by the grey levels that are added to black dummy pixels; means over the target labels."""
    result = study_result(leaks)
    offsets = sorted({parsed(row["method"])[1]["offset"] for row in result["rows"]})
    rows = ([str(offset), *_leak_shares(result["rows"], offset)] for offset in offsets)
    return table(["offset", *LEAKS.values()], rows, command_of(result))


def warm_start(name: str = "warm-start") -> str:
    """FedAvg and FedMix with XorMixFL's one shot before them and without: accuracy by round, megabytes sent."""
    result, rounds = study_result(name), (0, 1, 2, 5, 10)
    rows = []
    for run in result["runs"]:
        by_round = dict(zip(run["rounds"], run["accuracy"], strict=True))
        sent = (run["costs"]["bytes_up"] + run["costs"]["bytes_down"]) / 1e6
        cells = [f"{100 * by_round[r]:.1f}" if r in by_round else "" for r in rounds]
        rows.append([run["method"], str(run["seed"]), *cells, f"{sent:.1f}"])
    head = ["method", "seed", *(f"round {r}" for r in rounds), "MB"]
    return table(head, rows, f"{command_of(result)}; accuracy %")


# Fed-AugMix -----------------------------------------------------------------------------------------------------

AUGMIX_PAPER_ROWS = {
    "fedavg": "fedavg",
    "fed-augmix 2": "fedavg-augmix",
    "fedprox": "fedprox",
    "fedprox+fed-augmix 2": "fedprox-augmix",
}
"""Rows of Table III by our methods; the paper does not state at which severity."""


def augmix_small() -> str:
    """What InvGrad rebuilt of digits of mnist5k, by stage, severity and attacker."""
    result = study_result("augmix-attack")
    rows = []
    for row in result["rows"]:
        numbers = f"{row['mse']:.3f}", f"{row['psnr']:.2f}", f"{100 * row['ssim']:.1f}"
        rows.append([row["stage"], f"{row['severity']}", row["attacker"], *numbers])
    return table(["model", "severity", "attacker", "MSE", "PSNR dB", "SSIM %"], rows, command_of(result))


def augmix_accuracy() -> str:
    """Table III's MNIST block: accuracy on the global test set and over clients' own tests, with the paper's."""
    result, paper = study_result("augmix-mnist"), paper_numbers("fed-augmix/table-3", "clients")
    rows = []
    for run in sorted(result["runs"], key=_severity_order):
        clients = run["clients"]
        own = f"{100 * clients['mean']:.1f} ± {100 * clients['std']:.1f}"
        theirs = f"{paper[AUGMIX_PAPER_ROWS[run['method']]][0]:.2f}" if run["method"] in AUGMIX_PAPER_ROWS else ""
        rows.append([run["method"], f"{final_accuracy(run):.1f}", f"{last_accuracy(run, 3):.1f}", own, theirs])
    head = ["method, severity", "test %", "mean of last 3 %", "own tests %", "the paper %"]
    return table(head, rows, command_of(result))


def _severity_order(run: Row) -> tuple[bool, int]:
    """Runs without a proximal term first, then by severity."""
    name, _, severity = run["method"].partition(" ")
    return name.startswith("fedprox"), int(severity or 0)


def augmix_attacks() -> str:
    """Table II's MNIST block: what InvGrad rebuilt, by stage, severity and attacker."""
    result = study_result("augmix-mnist")
    attack = result["attack"]
    rows = []
    for row in result["rows"]:
        attacker = row["attacker"] if row["loss_scaling"] else f"{row['attacker']}, no loss scaling"
        numbers = [_with_error(row, "mse", 3), _with_error(row, "psnr", 2), _with_error(row, "ssim", 1, 100)]
        cells = [row["stage"], f"{row['severity']}", attacker, f"{len(row['clients'])}"]
        rows.append([*cells, *numbers, f"{row['cost']:.3f}"])
    above = f"InvGrad, {attack['images']} images, {attack['steps']} steps, {attack['iterations']} iterations"
    return table(["model", "severity", "attacker", "clients", "MSE", "PSNR dB", "SSIM %", "cost"], rows, above)


def _with_error(row: Row, measure: str, digits: int, factor: int = 1) -> str:
    """A mean, with its standard error if it is of several clients."""
    error = row.get(f"{measure}_error")
    mean = f"{factor * row[measure]:.{digits}f}"
    return mean if error is None else f"{mean} ± {factor * error:.{digits}f}"


def invgrad_table() -> str:
    """PSNR (SSIM) of what InvGrad rebuilt from untrained models: a row for each target, a column a protection."""
    result = study_result("invgrad")
    names = list(dict.fromkeys(row["protection"] for row in result["rows"]))
    cells: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in result["rows"]:
        target = row["network"], row["data"], f"{row['images']} x {row['steps']}", f"{row['iterations']}"
        cells[target][row["protection"]] = f"{row['psnr']:.1f} ({100 * row['ssim']:.0f})"
    above = f"{command_of(result)}; each cell: PSNR in dB (SSIM in %), mean over images and clients attacked"
    rows = ([*target, *(row.get(name, "") for name in names)] for target, row in cells.items())
    return table(["network", "data", "images x steps", "it.", *names], rows, above)


def invgrad_speed() -> str:
    """Iterations of the attack in a second of one processor, and of the bare double backward."""
    rows = []
    for row in study_result("invgrad")["speeds"]:
        speeds = f"{row['a_second']:.0f}", f"{row['bare_a_second']:.0f}", f"{row['ratio']:.2f}"
        rows.append([f"{row['images']}", f"{row['steps'] or 'gradient'}", *speeds])
    return table(["images", "steps", "iterations a second", "bare double backward", "times the bare"], rows)


def draw_augmix_trade_off() -> None:
    """Figures 4 and 5: accuracy against each measure of the rebuilt images, a line for each stage."""
    result = study_result("augmix-mnist")
    runs = {_severity_order(run): final_accuracy(run) for run in result["runs"]}
    accuracy = {severity: value for (proximal, severity), value in runs.items() if not proximal}
    rows = [row for row in result["rows"] if row["attacker"] == "plain" and row["loss_scaling"]]
    measures = {"mse": ("MSE of what is rebuilt", 1), "ssim": ("SSIM (%)", 100), "psnr": ("PSNR (dB)", 1)}
    figure = figure_of(10.5, 3.9)
    for axes, (measure, (label, factor)) in zip(figure.subplots(1, 3, sharey=True), measures.items(), strict=True):
        for number, stage in enumerate(("untrained", "trained")):
            chosen = sorted((row["severity"], factor * row[measure]) for row in rows if row["stage"] == stage)
            x, y = [value for _, value in chosen], [accuracy[severity] for severity, _ in chosen]
            stroke = DASHES[number]
            axes.plot(x, y, "o", color=COLOURS[number], linestyle=stroke, markersize=6, label=f"{stage} model")
        style_axes(axes, label, "test accuracy (%)" if measure == "mse" else "")
        axes.margins(0.08)
    style: dict[str, Any] = {"fontsize": 8, "color": MUTED, "va": "center", "annotation_clip": False}
    for severity, value in accuracy.items():
        word = "no Fed-AugMix" if severity == 0 else f"s = {severity}"
        axes.annotate(word, (1.03, value), None, axes.get_yaxis_transform(), **style)
    handles, words = axes.get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower left", fontsize=8.5, frameon=False, labelcolor=INK, ncols=2)
    save_png(figure, "augmix-trade-off")


def draw_augmix_accuracy() -> None:
    """Figure 7: test accuracy by round of FedAvg and FedProx, without Fed-AugMix and with it."""
    figure = figure_of(8.2, 4.2)
    axes = figure.subplots()
    for number, run in enumerate(sorted(study_result("augmix-mnist")["runs"], key=_severity_order)):
        stroke = DASHES[1] if run["method"].startswith("fedprox") else "-"
        accuracy = [100 * value for value in run["accuracy"]]
        axes.plot(run["rounds"], accuracy, color=COLOURS[number], linestyle=stroke, linewidth=1.8, label=run["method"])
    style_axes(axes, "round", "test accuracy (%)")
    figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, labelcolor=INK)
    save_png(figure, "augmix-accuracy")


# All tables and figures -------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[], str]] = {
    "heart": lambda: site_table("heart"),
    "har": lambda: site_table("har", each=False),
    "fashion-mnist": lambda: method_table("fashion-mnist"),
    "fashion-mnist paired": lambda: paired_table("fashion-mnist"),
    "fashion-mnist curve": lambda: curve_table("fashion-mnist", 10),
    "femnist": lambda: method_table("femnist"),
    "femnist curve": lambda: curve_table("femnist", 20),
    "femnist clients": lambda: client_table("femnist"),
    "shakespeare curve": lambda: curve_table("shakespeare", 1),
    "fedmix-search": lambda: method_table("fedmix-search", ("fedavg", "fedmix 0.1")),
    "fedmix-scale": lambda: method_table("fedmix-scale", ("fedavg", "fedmix 0.1")),
    "femnist-twice curve": lambda: curve_table("femnist-twice", 20),
    "fedmix-cifar10": lambda: method_table("fedmix-cifar10"),
    "fedmix-cifar10 curve": lambda: curve_table("fedmix-cifar10", 20),
    "fedmix in small": fedmix_in_small,
    "fedmix-lr": lambda: method_table("fedmix-lr", ("fedavg", "fedmix 0.1")),
    "alignment": alignment_table,
    "aggenhance-mnist5k": lambda: method_table("aggenhance-mnist5k"),
    "aggenhance-fashion": lambda: method_table("aggenhance-fashion"),
    "robustness": lambda: adversary_table("robustness", "accuracy % after 20 rounds"),
    "mix2fld-small": lambda: channel_table("mix2fld-small"),
    "mix2fld-figure-2": mix2fld_figure_2,
    "mix2fld-literal": mix2fld_t_max,
    "mix2fld-claims": mix2fld_claims,
    "mix2fld-figure-3": mix2fld_figure_3,
    "mix2fld-privacy": sample_privacy,
    "private": lambda: epsilon_table("private", "weights"),
    "private-means": lambda: epsilon_table("private-means", "means", "private-base"),
    "reproduced": item_pages,
    "reproduced overview": overview,
    "augmix-attack": augmix_small,
    "augmix-mnist accuracy": augmix_accuracy,
    "augmix-mnist attacks": augmix_attacks,
    "invgrad": invgrad_table,
    "invgrad speed": invgrad_speed,
    "xormixfl table 2": xor_table_2,
    "xormixfl figure 3": xor_figure_3_table,
    "xormixfl claims": xor_target_claims,
    "xormixfl table 3": xor_table_3,
    "xormixfl table 3 claims": xor_distance_claims,
    "xormixfl leaks": xor_leaks,
    "xormixfl table 4": xor_table_4,
    "xormixfl table 4 claims": xor_dummy_claims,
    "xormixfl offset": xor_offset,
    "xormixfl offset leaks": xor_offset_leaks,
    "xormixfl-mnist5k table 2": lambda: xor_table_2("xormixfl-mnist5k"),
    "xormixfl-mnist5k figure 3": lambda: xor_figure_3_table("xormixfl-mnist5k"),
    "xormixfl-mnist5k claims": lambda: xor_target_claims("xormixfl-mnist5k"),
    "warm-start": warm_start,
}
"""The functions that make the tables, by the marks on the pages."""

DRAWINGS: tuple[Callable[[], None], ...] = (
    draw_mix2fld_figure_2,
    draw_mix2fld_figure_3,
    draw_xor_figure_3,
    lambda: draw_xor_figure_3("xormixfl-mnist5k"),
    draw_augmix_trade_off,
    draw_augmix_accuracy,
)
"""The functions that draw figures from results alone; others need the runs (run.py, inversion.py)."""


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(fill(page.read_text(), TABLES))
    for draw in DRAWINGS:
        draw()
