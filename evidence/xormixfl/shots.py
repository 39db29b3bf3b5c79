"""Table 2 and Figure 3: four methods by choice of target labels."""

from __future__ import annotations

import io
import statistics
from collections.abc import Callable, Sequence
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
    runs_of,
    spread,
    target_of,
)

METHODS = ("xormixfl", "xormixfl, 1 dummy", "mixfl", "mixfl, 1 dummy", "vanilla-fl", "standalone")
"""As the runs are called."""


class Shots:
    """The runs of Table 2 by method and target labels."""

    def __init__(self, name: str) -> None:
        self.runs = runs_of(name)
        self.targets: list[list[int]] = paper()["table_2"]["targets"]

    def of(self, method: str, targets: Sequence[int]) -> list[Run]:
        """The runs of a method with these target labels, one a seed."""
        return [r for r in self.runs if r.method == method and r.settings["targets"] == list(targets)]

    def over(self, method: str, number: int, of: Callable[[Run], float]) -> list[float]:
        """Of each seed the mean of a measure over all choices of ``number`` target labels."""
        runs = [r for r in self.runs if r.method == method and len(r.settings["targets"]) == number]
        seeds = sorted({r.seed for r in runs})
        return [statistics.mean(of(r) for r in runs if r.seed == seed) for seed in seeds]

    def columns(self, method: str) -> list[float | None]:
        """Mean accuracy over seeds by choice of target labels."""
        found = [[r.accuracy for r in self.of(method, targets)] for targets in self.targets]
        return [statistics.mean(values) if values else None for values in found]


def table_2(name: str = "xormixfl-mnist") -> str:
    """Final test accuracy, a row for each choice of target labels; then means over all choices of so many."""
    shots, theirs = Shots(name), paper()["table_2"]
    if not shots.runs:
        return NOT_YET
    methods = [m for m in METHODS if any(r.method == m for r in shots.runs)]
    rows = []
    for place, targets in enumerate(shots.targets):
        cells = [beside([r.accuracy for r in shots.of(m, targets)], theirs[PAPERS.get(m, m)][place]) for m in methods]
        rows.append([", ".join(map(str, targets)), *cells])
    for number in sorted({len(targets) for targets in shots.targets}):
        places = [place for place, targets in enumerate(shots.targets) if len(targets) == number]
        means = [statistics.mean(theirs[PAPERS.get(m, m)][place] for place in places) for m in methods]
        cells = [beside(shots.over(m, number, accuracy_of), mean) for m, mean in zip(methods, means, strict=True)]
        rows.append([f"**mean, N = {number}**", *cells])
    seeds = len({r.seed for r in shots.runs})
    head = f"{command(name)}; {seeds} seed{'s' if seeds > 1 else ''}; test accuracy in per cent: ours ± deviation over "
    return f"{head}seeds (the paper's, difference)\n\n" + table(["target labels", *methods], rows)


def figure_3_table(name: str = "xormixfl-mnist") -> str:
    """Accuracy of the target labels by their number."""
    shots = Shots(name)
    if not shots.runs:
        return NOT_YET
    numbers = sorted({len(targets) for targets in shots.targets})
    rows = [[m, *(spread(shots.over(m, n, target_of)) for n in numbers)] for m in METHODS]
    told = table(["target labels' accuracy %", *(f"N = {n}" for n in numbers)], rows)
    picture = f"figures/{name.removesuffix('-mnist')}-figure-3.png"
    return f"{told}\n\n![Accuracy of each target label, for N = 1, 2 and 4]({picture})"


def shot_claims(name: str = "xormixfl-mnist") -> str:
    """What the paper claims of Table 2 and Figure 3, and whether it came out."""
    shots, theirs = Shots(name), paper()["table_2"]
    if not shots.runs:
        return NOT_YET
    rows = []
    for ours, other in (("xormixfl", "standalone"), ("xormixfl", "vanilla-fl"), ("xormixfl", "mixfl")):
        own, its = shots.columns(ours), shots.columns(other)
        pairs = [(a, b) for a, b in zip(own, its, strict=True) if a is not None and b is not None]
        papers = list(zip(theirs[ours], theirs[other], strict=True))
        if pairs:
            rows.append(
                [
                    f"XorMixFL above {other}, points: mean (least to most)",
                    _gap(papers),
                    _gap(pairs),
                    _agree(papers, pairs),
                ]
            )
            if other != "mixfl":
                best = [max(100 * (a / b - 1) for a, b in both) for both in (papers, pairs)]
                rows.append(
                    [f"the largest gain over {other}, relative %", f"{best[0]:.1f}", f"{best[1]:.1f}", _reached(*best)]
                )
    one, alone = (shots.over(m, 1, target_of) for m in ("xormixfl", "standalone"))
    if one and alone:
        share, times = statistics.mean(one), statistics.mean(one) / max(statistics.mean(alone), 0.1)
        rows.append(["target's accuracy at N = 1, %", "65", f"{share:.1f}", _reached(65, share)])
        rows.append(["the same as a multiple of standalone's", "1.87", f"{times:.2f}", _reached(1.87, times)])
    falls = [statistics.mean(v) for n in (1, 2, 4) if (v := shots.over("xormixfl", n, target_of))]
    if len(falls) == 3:
        fell = "yes" if falls[0] > falls[1] > falls[2] else "no"
        rows.append(["target's accuracy falls with N", "yes", fell, "came out" if fell == "yes" else "did not"])
    return table(["claim", "the paper", "ours", ""], rows)


def _gap(pairs: Sequence[tuple[float, float]]) -> str:
    apart = [a - b for a, b in pairs]
    return f"{statistics.mean(apart):+.1f} ({min(apart):+.1f} to {max(apart):+.1f})"


def _agree(papers: Sequence[tuple[float, float]], ours: Sequence[tuple[float, float]]) -> str:
    """Whether the order is the paper's in every column of ours."""
    above = statistics.mean(a - b for a, b in papers) > 0
    same = sum((a > b) == above for a, b in ours)
    return f"the paper's order in {same} of {len(ours)}"


def _reached(theirs: float, ours: float) -> str:
    return "reached" if ours >= theirs else "not reached"


def figure_3(name: str = "xormixfl-mnist") -> bytes:
    """Figure 3 as a PNG: the accuracy of each target label, their mean, and of all labels; a panel for each N.

    Bars are means over seeds and over the choices of target labels that a label is in; nothing if there are no runs.
    """
    shots = Shots(name)
    if not shots.runs:
        return b""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from fedblend.analysis.plotting import DPI, INK, MUTED

    figure = Figure(figsize=(11.0, 7.2), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(
        "XorMixFL: accuracy of target labels", x=0.012, ha="left", fontsize=13, fontweight="bold", color=INK
    )
    grid = figure.add_gridspec(2, 2)
    places = {1: grid[0, :], 2: grid[1, 0], 4: grid[1, 1]}
    for number, place in places.items():
        axes = figure.add_subplot(place)
        _bars(axes, shots, number)
        axes.set_title(f"N = {number}", loc="left", fontsize=9.5, color=MUTED)
    handles, names = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", fontsize=9, frameon=False, labelcolor=INK, ncols=len(names))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


SHOWN = ("xormixfl", "mixfl", "vanilla-fl", "standalone")


def _bars(axes: Any, shots: Shots, number: int) -> None:
    from fedblend.analysis.plotting import dress, line_styles

    labels = sorted({label for targets in shots.targets if len(targets) == number for label in targets})
    heads = [*map(str, labels), "targets", "all labels"]
    width = 0.8 / len(SHOWN)
    for place, (method, look) in enumerate(line_styles(SHOWN).items()):
        runs = [r for r in shots.runs if r.method == method and len(r.settings["targets"]) == number]
        bars = [[r.of_label[label] for r in runs if label in r.settings["targets"]] for label in labels]
        bars += [shots.over(method, number, target_of), shots.over(method, number, accuracy_of)]
        x = [k + (place - (len(SHOWN) - 1) / 2) * width for k in range(len(bars))]
        means = [statistics.mean(values) if values else 0.0 for values in bars]
        errors = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in bars]
        axes.bar(x, means, 0.9 * width, yerr=errors, color=look.colour, label=method, error_kw={"linewidth": 0.8})
    dress(axes, "target label", "accuracy (%)")
    axes.set_ylim(0, 100)
    axes.set_xticks(range(len(heads)), heads)
