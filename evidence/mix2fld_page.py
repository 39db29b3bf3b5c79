"""Figures 2 and 3 of Mix2FLD as docs/results.md shows them: a picture of four panels, tables, and the paper's claims.

python evidence/mix2fld_page.py [NAME] [PNG]     draws Figure 2 or 3 from evidence/results/NAME.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mdtable import table

from fedblend.analysis.plotting import BAND, INK, METHODS, MUTED, LineStyle, dress, line_styles

HERE = Path(__file__).resolve().parent
FIGURES = HERE.parent / "docs" / "figures"

PANELS = {
    "power_up=23.0 form=iid": "asymmetric channel, even labels",
    "power_up=40.0 form=iid": "symmetric channel, even labels",
    "power_up=23.0 form=non-iid": "asymmetric channel, uneven labels",
    "power_up=40.0 form=non-iid": "symmetric channel, uneven labels",
}
"""Figure 2's panels a, b, c and d: how runs are labelled, and the panel's title."""

BEST = "Mix2FLD 50, 100"
LAST = 3
"""Rounds at the end of a run whose mean accuracy is told."""

NEAR = 0.01
"""A run has converged in the first round that comes this near to the mean of its last rounds."""

CHANGE = 0.05
"""The paper's epsilon: it ends a run where the model, or the mean outputs of each label, change by less."""

Row = dict[str, Any]
Panel = dict[str, list[Row]]


def results(name: str) -> Row:
    """The results of a study."""
    told: Row = json.loads((HERE / "results" / f"{name}.json").read_text())
    return told


def panels(name: str) -> dict[str, Panel]:
    """A study's runs by panel and method, a list of seeds each."""
    told: dict[str, dict[str, list[Row]]] = {panel: defaultdict(list) for panel in PANELS}
    for run in results(name)["runs"]:
        for panel, methods in told.items():
            if run["method"].endswith(" " + panel) and "t_max" not in run["method"]:
                methods[run["method"].removesuffix(" " + panel)].append(run)
    order = list(told[next(iter(PANELS))])
    return {panel: {name: methods[name] for name in order if name in methods} for panel, methods in told.items()}


# What is measured of a run ----------------------------------------------------------------------------------


def final(run: Row) -> float:
    """Mean accuracy of the last rounds."""
    return statistics.mean(run["accuracy"][-LAST:])


def converged(run: Row) -> int:
    """The place, among evaluated rounds, of the first after any training that comes near to the final accuracy."""
    return next(k for k, accuracy in enumerate(run["accuracy"]) if k and accuracy >= final(run) - NEAR)


def seconds(run: Row, kind: str = "clock") -> float:
    """Seconds until a run has converged: in all ("clock"), or on the air alone ("air")."""
    return float(run[kind][converged(run)])


def settled(run: Row) -> int | None:
    """The first round in which the paper's rule would have ended a run, if any."""
    changes = enumerate(run.get("change", []), 1)
    return next((k for k, change in changes if k > 1 and change is not None and 0 < change < CHANGE), None)


def mean(runs: Sequence[Row], measure: Any) -> float:
    """A measure's mean over seeds."""
    return statistics.mean(measure(run) for run in runs)


# The picture ------------------------------------------------------------------------------------------------


def draw(name: str, path: Path) -> None:
    """Figure 2: accuracy over seconds, a panel a channel and split; bands span the seeds, at the mean time of each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    told = panels(name)
    methods = list(dict.fromkeys(method for panel in told.values() for method in panel))
    chosen = line_styles(methods)
    figure = Figure(figsize=(11, 8.4), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2, sharey=True)
    for (panel, title), one in zip(PANELS.items(), axes.flat, strict=True):
        for method, runs in told[panel].items():
            _draw_line(one, runs, chosen[method])
        one.set_title(title, loc="left", fontsize=9.5, color=MUTED)
    for place, one in enumerate(axes.flat):
        dress(one, "seconds, on the air and computing" if place > 1 else "", "" if place % 2 else "test accuracy (%)")
    handles = [
        Line2D([], [], color=look.colour, linestyle=look.matplotlib_dash, linewidth=2) for look in chosen.values()
    ]
    lowest = min(min(run["accuracy"][1:]) for panel in told.values() for runs in panel.values() for run in runs)
    axes.flat[0].set_ylim(bottom=100 * lowest - 3)  # untrained models would take most of the picture
    words = [
        m.replace("Mix2FLD ", "Mix2FLD, seeds sent and made: ").replace("MixFLD ", "MixFLD, seeds sent: ")
        for m in chosen
    ]
    figure.legend(handles, words, loc="outside lower left", ncols=3, fontsize=9, frameon=False, labelcolor=INK)
    figure.savefig(path)


def _draw_line(axes: Any, runs: Sequence[Row], look: LineStyle) -> None:
    x = [statistics.mean(times) for times in zip(*(run["clock"] for run in runs), strict=True)]
    values = [[100 * a for a in seeds] for seeds in zip(*(run["accuracy"] for run in runs), strict=True)]
    middle = [statistics.mean(v) for v in values]
    axes.plot(x, middle, color=look.colour, linestyle=look.matplotlib_dash, marker=".", linewidth=1.6)
    if len(runs) > 1:
        axes.fill_between(x, list(map(min, values)), list(map(max, values)), color=look.colour, alpha=BAND, linewidth=0)


def draw_devices(name: str, path: Path) -> None:
    """Figure 3: each device's accuracy by the number of devices, and their mean; a panel a split."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), dpi=150, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    forms = {"iid": "even labels", "non-iid": "uneven labels"}
    for (form, title), axes, colour in zip(forms.items(), figure.subplots(1, 2, sharey=True), METHODS, strict=False):
        runs = sorted((r for r in results(name)["runs"] if r["method"].endswith(f" form={form}")), key=_devices)
        for run in runs:
            axes.plot([_devices(run)] * _devices(run), [100 * a for a in run["devices"]], "o", color=colour, alpha=0.3)
        means = [100 * run["mean"] for run in runs]
        axes.plot([_devices(run) for run in runs], means, color=colour, marker="D", linewidth=1.6, label="mean")
        axes.set_title(title, loc="left", fontsize=9.5, color=MUTED)
        axes.set_xticks([_devices(run) for run in runs])
        axes.margins(x=0.06)
        axes.legend(fontsize=9, frameon=False, labelcolor=INK, loc="lower right")
        dress(axes, "devices", "" if form == "non-iid" else "test accuracy of each device (%)")
    figure.savefig(path)


def _devices(run: Row) -> int:
    return len(run["devices"])


# Tables -----------------------------------------------------------------------------------------------------


def figure_2(name: str = "mix2fld-figure-2") -> str:
    """A row a method in each panel: accuracy, time to converge, bits sent up by a device, and uploads lost."""
    told = results(name)
    devices = told["clients"]["number"]
    rows = []
    for panel, title in PANELS.items():
        for method, runs in panels(name)[panel].items():
            rounds, settles = [str(runs[0]["rounds"][converged(run)]) for run in runs], map(settled, runs)
            asked = sum(devices * run["rounds"][-1] for run in runs)
            rows.append(
                [
                    title.replace(" channel, ", ", ").replace(" labels", ""),
                    method,
                    f"{100 * mean(runs, final):.1f}",
                    ", ".join(rounds),
                    f"{mean(runs, lambda run: seconds(run, 'air')):.2f}",
                    f"{mean(runs, seconds):.1f}",
                    ", ".join("-" if one is None else str(one) for one in settles),
                    f"{mean(runs, lambda run: 8 * run['costs']['bytes_up']) / devices / 1000:,.0f}",
                    f"{sum(run.get('lost', 0) for run in runs)} of {asked}",
                ]
            )
    head = ("channel, labels", "method", f"mean of last {LAST} %", "converged in round", "s on the air until then",
            "s in all", "round of the paper's rule", "kbit up a device", "uploads lost")  # fmt: skip
    return f"`{told['command']}`\n\n{table(head, rows)}"


def literal(name: str = "mix2fld-figure-2") -> str:
    """FL at the paper's own T_max: accuracy by round, and uploads lost."""
    rows = []
    for run in results(name)["runs"]:
        if "t_max=0.1" in run["method"]:
            curve = ", ".join(f"{100 * accuracy:.1f}" for accuracy in run["accuracy"][1:])
            rows.append([run["method"], curve, f"{run['lost']} of {10 * run['rounds'][-1]}"])
    return table(("method", "accuracy % by round", "uploads lost"), rows)


def figure_3(name: str = "mix2fld-figure-3") -> str:
    """A row a number of devices: mean and variance of their accuracies, for both splits."""
    told = results(name)
    rows: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for run in told["runs"]:
        method, _, form = run["method"].rpartition(" form=")
        rows[method, form].append(run)
    first = {form: runs for (_, form), runs in reversed(rows.items())}
    cells = [
        [
            form,
            method,
            f"{100 * mean(runs, lambda run: run['mean']):.2f}",
            f"{100 * (mean(runs, lambda run: run['mean']) - mean(first[form], lambda run: run['mean'])):+.2f}",
            f"{1e4 * mean(runs, lambda run: run['variance']):.3f}",
            f"{mean(runs, lambda run: run['variance']) / mean(first[form], lambda run: run['variance']):.2f}",
            f"{100 * mean(runs, lambda run: run['server']):.2f}",
        ]
        for (method, form), runs in sorted(rows.items(), key=lambda item: item[0][1])
    ]
    head = ("labels", "devices", "mean accuracy %", "beside 10", "variance, points^2", "x 10's", "server's model %")
    return f"`{told['command']}`\n\n{table(head, cells)}"


def sample_privacy() -> str:
    """Tables II and III: a row a data set, of the paper, of the smallest distances here, and of the mean of all."""
    told = results("mix2fld-privacy")
    rows = []
    for which, name in (("mixup", "II, Mixup"), ("mix2up", "III, Mix2up")):
        for one in told["sets"]:
            note = ", labels coordinated" if one["coordinated"] else ""
            rows.append([name, f"{one['data']}, the paper", *(f"{v:.3f}" for v in one["paper"][which]), "", ""])
            for kind in ("smallest", "mean"):
                values = [f"{row[f'{which}_{kind}']:.3f}" for row in one["rows"]]
                rows.append(["", f"{kind}{note}", *values, f"{one['apart'][which][kind]:+.3f}", ""])
            rows[-1][-1] = ", ".join(f"{100 * row[f'{which}_recognised']:.0f}" for row in one["rows"])
    head = ("table", "data", *(f"{lam:g}" for lam in told["lambdas"]), "largest difference", "recognised %, by lambda")
    return f"`{told['command']}`\n\n{table(head, rows)}"


# The paper's claims -----------------------------------------------------------------------------------------


def claims(name: str = "mix2fld-figure-2") -> str:
    """Each claim of Figure 2: what the paper tells, what is measured here, even and uneven labels, and a verdict."""
    told = panels(name)
    made = [*_over(told, "asymmetric"), *_over(told, "symmetric"), *_seeds(told), _payload(told)]
    return table(("claim", "the paper", "here: even labels; uneven", "verdict"), made)


class Compared:
    """Two methods in the two panels of a channel, even labels first."""

    def __init__(self, told: Mapping[str, Panel], channel: str, a: str, b: str) -> None:
        power = {"asymmetric": "power_up=23.0", "symmetric": "power_up=40.0"}[channel]
        self.pairs = [(told[f"{power} form={form}"][a], told[f"{power} form={form}"][b]) for form in ("iid", "non-iid")]

    def above(self, claim: str, paper: str, uneven: bool = False) -> list[str]:
        """How many points of accuracy a is above b, as a row; judged by the uneven labels alone where so said."""
        by = [100 * (mean(a, final) - mean(b, final)) for a, b in self.pairs]
        return [claim, paper, "; ".join(f"{one:+.1f}" for one in by), verdict(by[uneven:], 0.0)]

    def faster(self, claim: str, paper: str, kind: str = "clock") -> list[str]:
        """How many times as soon as b a converges, as a row."""
        by = [mean(b, lambda run: seconds(run, kind)) / mean(a, lambda run: seconds(run, kind)) for a, b in self.pairs]
        return [claim, paper, "; ".join(f"{one:.2f}x" for one in by), verdict(by, 1.0)]


def _over(told: Mapping[str, Panel], channel: str) -> list[list[str]]:
    """The claims about a channel."""
    fl, fd = Compared(told, channel, BEST, "FL"), Compared(told, channel, BEST, "FD")
    asymmetric = channel == "asymmetric"
    made = [
        fl.faster(f"{channel}: Mix2FLD converges sooner than FL", "1.2x" if asymmetric else "1.9x"),
        fl.faster(f"{channel}: the same, counting the air alone", "", "air"),
    ]
    if not asymmetric:
        back = Compared(told, channel, "FL", BEST)
        return [back.above("symmetric: FL is more accurate than Mix2FLD", "highest; as high, if uneven"), *made]
    return [
        fl.above("asymmetric: Mix2FLD is more accurate than FL", "up to +16.7"),
        *made,
        fd.above("Mix2FLD is more accurate than FD", "up to +17.3"),
        Compared(told, channel, "FD", BEST).faster("FD converges sooner than Mix2FLD", "1.025x"),
    ]


def _seeds(told: Mapping[str, Panel]) -> list[list[str]]:
    """The claims about seeds; the channel is of no account to them."""
    few, many = "Mix2FLD 10, 10", "Mix2FLD 50, 50"
    beside = [(BEST, "MixFLD 50"), ("FD", "MixFLD 50"), ("Mix2FLD 10, 20", few), (BEST, many), (many, few), (few, many)]
    pairs = {names: Compared(told, "asymmetric", *names) for names in beside}
    return [
        pairs[BEST, "MixFLD 50"].above("inversely mixed seeds beat mixed ones", "most, if uneven"),
        pairs["FD", "MixFLD 50"].above("MixFLD falls behind FD, labels uneven", "fails", uneven=True),
        pairs["Mix2FLD 10, 20", few].above("making 20 of 10 seeds beats making 10", "up to +1.7"),
        pairs[BEST, many].above("making 100 of 50 seeds beats making 50", "up to +1.7"),
        pairs[many, few].above("50 seeds are more accurate than 10", "more"),
        pairs[few, many].faster("10 seeds converge sooner than 50", "sooner"),
    ]


def _payload(told: Mapping[str, Panel]) -> list[str]:
    fl, few = (told["power_up=23.0 form=iid"][name][0] for name in ("FL", "Mix2FLD 10, 10"))
    quotient = fl["costs"]["bytes_up"] / few["costs"]["bytes_up"]
    claim = f"bits up, beside FL's: 10 seeds, {fl['rounds'][-1]} rounds"
    return [claim, "42.4x fewer", f"{quotient:.1f}x fewer", verdict([quotient], 1.0)]


def verdict(values: Sequence[float], bound: float) -> str:
    """Whether numbers lie above a bound: all of them, some, or none."""
    above = [value > bound for value in values]
    return "comes out" if all(above) else "does not come out" if not any(above) else "comes out in one of two"


if __name__ == "__main__":
    study = sys.argv[1] if len(sys.argv) > 1 else "mix2fld-figure-2"
    path = Path(sys.argv[2]) if len(sys.argv) > 2 else FIGURES / f"{study}.png"
    (draw_devices if study == "mix2fld-figure-3" else draw)(study, path)
