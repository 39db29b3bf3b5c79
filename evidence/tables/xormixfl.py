"""Tables and figures of XorMixFL's studies on accuracy: Table 2, Figure 3, offset, warm start."""

from __future__ import annotations

import ast
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
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

LEAKS = {
    "clear": "sent in clear %",
    "clear_ink": "of the target's ink %",
    "bits": "bits right after a usual dummy %",
    "blind": "bits right unseen %",
    "sent_recognised": "seed known %",
    "made_recognised": "decoded known %",
}
"""Columns of ``fedblend paper xor`` by their names in its JSON."""


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


def ours_and_paper(ours: Sequence[float], paper: float) -> str:
    """Ours, and in brackets the paper's: ``93.1 ± 0.4 (94.4)``."""
    return f"{mean_std(ours)} ({paper:.1f})" if ours else ""


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
    """Final test accuracy: a row for each number of target labels, the mean over its choices of them."""
    found = TargetRuns(name)
    methods = [m for m in TARGET_METHODS if any(r.method == m for r in found.runs)]
    rows = []
    for number in sorted({len(targets) for targets in found.targets}):
        chosen = [k for k, targets in enumerate(found.targets) if len(targets) == number]
        means = [statistics.mean(found.paper[PAPER_ROWS[m]][k] for k in chosen) for m in methods]
        ours = [found.by_seed(m, number, all_accuracy) for m in methods]
        rows.append([str(number), *map(ours_and_paper, ours, means)])
    return table(
        ["target labels", *methods], rows, f"{command_of(found.result)}; test accuracy in %: ours (the paper's)"
    )


def xor_target_claims(names: Sequence[str] = ("xormixfl-mnist", "xormixfl-mnist5k")) -> str:
    """The paper's claims of Table 2 and Figure 3, with the numbers of our studies."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name in names:
        for claim, paper, ours in _target_claims(TargetRuns(name)):
            rows.setdefault((claim, paper), []).append(ours)
    head = ["claim", "the paper", "MNIST, 3 seeds", "5,000 digits, one seed"]
    return table(head[: 2 + len(names)], [[*claim, *cells] for claim, cells in rows.items()])


def _target_claims(found: TargetRuns) -> Iterator[tuple[str, str, str]]:
    """Each claim with the paper's number and ours."""
    for method in ("standalone", "vanilla-fl", "mixfl"):
        columns = [[found.accuracies(m, targets) for targets in found.targets] for m in ("xormixfl", method)]
        ours = [(statistics.mean(a), statistics.mean(b)) for a, b in zip(*columns, strict=True) if a and b]
        paper = list(zip(found.paper["xormixfl"], found.paper[PAPER_ROWS[method]], strict=True))
        if not ours:
            continue
        yield f"XorMixFL above {method}, points: mean (least to most)", _gap(paper), _gap(ours)
        if method != "mixfl":
            gains = [max(100 * (a / b - 1) for a, b in pairs) for pairs in (paper, ours)]
            yield f"the largest gain over {method}, relative %", f"{gains[0]:.1f}", f"{gains[1]:.1f}"
    one, alone = (found.by_seed(m, 1, target_accuracy) for m in ("xormixfl", "standalone"))
    if one and alone:
        share, times = statistics.mean(one), statistics.mean(one) / max(statistics.mean(alone), 0.1)
        yield "target's accuracy with one target label, %", "65", f"{share:.1f}"
        yield "the same as a multiple of standalone's", "1.87", f"{times:.2f}"


def _gap(pairs: Sequence[tuple[float, float]]) -> str:
    differences = [a - b for a, b in pairs]
    return f"{statistics.mean(differences):+.1f} ({min(differences):+.1f} to {max(differences):+.1f})"


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


# The offset, and the warm start.


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
