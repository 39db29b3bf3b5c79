"""Tables and figures of XorMixFL's studies on accuracy: Tables 2 and 4, Figure 3, offset, warm start."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fedblend.analysis.plotting import INK, MUTED, add_legend, blank_figure, line_styles, style_axes
from tables.common import (
    Row,
    all_items,
    command_of,
    final_accuracy,
    mean_std,
    paper_numbers,
    save_svg,
    study_result,
    table,
)

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


def paper_row(method: str, number: int) -> str:
    """A row of the paper's Tables 3 and 4, such as ``xor-1``."""
    return f"{'xor' if PAPER_ROWS[method] == 'xormixfl' else 'mixfl'}-{number}"


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


def xor_figure_3_table() -> str:
    """Accuracy of the target labels by their number."""
    found = TargetRuns("xormixfl-mnist")
    numbers = sorted({len(targets) for targets in found.targets})
    rows = [[m, *(mean_std(found.by_seed(m, n, target_accuracy)) for n in numbers)] for m in TARGET_METHODS]
    text = table(["target labels' accuracy %", *(f"N = {n}" for n in numbers)], rows)
    return f"{text}\n\n![Accuracy of each target label, for N = 1, 2 and 4](figures/xormixfl-figure-3.svg)"


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


def draw_xor_figure_3() -> None:
    """Figure 3: accuracy of each target label, their mean, and of all labels; a panel for each number of targets N.

    Bars are means over seeds and over the choices of target labels that include the label.
    """
    found = TargetRuns("xormixfl-mnist")
    figure = blank_figure(7.5, 5.6)
    grid = figure.add_gridspec(2, 2)
    for number, cell in {1: grid[0, :], 2: grid[1, 0], 4: grid[1, 1]}.items():
        axes = figure.add_subplot(cell)
        _draw_bars(axes, found, number)
        axes.set_title(f"N = {number}", loc="left", fontsize=9.5, color=MUTED)
    handles, names = figure.axes[0].get_legend_handles_labels()
    add_legend(figure, handles, names, ncols=len(names))
    save_svg(figure, "xormixfl-figure-3", "MixFL, which hides nothing, is most accurate on every target label")


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
        axes.bar(
            x, means, 0.9 * width, yerr=errors, color=look.colour, label=method, ecolor=INK, error_kw={"linewidth": 0.8}
        )
    style_axes(axes, "target label", "accuracy (%)")
    axes.set_ylim(0, 100)
    axes.set_xticks(range(len(heads)), heads)


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
    return {p: [numbers[paper_row(method, p)][width * m :][:width] for m in range(len(DUMMIES))] for p in (1, 5)}


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
