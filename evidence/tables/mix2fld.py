"""Tables and figures of Mix2FLD's studies."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from fedblend.analysis.plotting import (
    BAND,
    COLOURS,
    INK,
    MUTED,
    add_legend,
    blank_figure,
    line_styles,
    style_axes,
)
from fedblend.analysis.privacy.mixup_privacy import LAMBDAS
from fedblend.methods.channels import Wireless
from tables.common import (
    Row,
    command_of,
    paper_numbers,
    save_svg,
    study_result,
    table,
)
from tables.items import item_results

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


def mean(runs: Sequence[Row], measure: Callable[[Row], float]) -> float:
    """A measure's mean over seeds."""
    return statistics.mean(map(measure, runs))


def draw_mix2fld_figure_2() -> None:
    """Accuracy over seconds of FL on either channel, and of FD and Mix2FLD, which are alike on both."""
    found = panels()
    figure = blank_figure(7.5, 3.6)
    shown = {("FL", "symmetric"): "FL, symmetric channel", ("FL", "asymmetric"): "FL, asymmetric channel"}
    shown |= {(BEST, "asymmetric"): "Mix2FLD, either channel", ("FD", "asymmetric"): "FD, either channel"}
    both = figure.subplots(1, 2, sharey=True)
    for labels, axes in zip(("even labels", "uneven labels"), both, strict=True):
        ends = {title: panel for panel, title in PANELS.items() if title.endswith(f" {labels}")}
        for ((method, channel), name), look in zip(shown.items(), line_styles([*shown.values()]).values(), strict=True):
            (run,) = found[ends[f"{channel} channel, {labels}"]][method]
            accuracy = [100 * value for value in run["accuracy"][1:]]
            style = {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markersize": 4}
            axes.plot(run["clock"][1:], accuracy, linewidth=1.6, label=name, **style)
        axes.set_title(labels, loc="left", fontsize=9.5, color=MUTED)
        style_axes(axes, "seconds, on the air and computing", "" if axes is both[1] else "test accuracy (%)")
    add_legend(figure, *both[0].get_legend_handles_labels(), ncols=2)
    save_svg(figure, "mix2fld-figure-2", "FL is above Mix2FLD from eight seconds on, on either channel (one seed)")


def draw_mix2fld_figure_3() -> None:
    """Each device's accuracy by the number of devices, and their mean; a panel for each split."""
    figure = blank_figure(7.5, 3.4)
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
        axes.legend(fontsize=9, frameon=False, labelcolor=INK, loc="lower right")
        style_axes(axes, "devices", "" if form == "non-iid" else "test accuracy of each device (%)")
        axes.margins(x=0.06)
    save_svg(figure, "mix2fld-figure-3", "More devices are more accurate, most with uneven labels (one seed)")


def draw_mix2fld_t_max() -> None:
    """FL's and Mix2FLD's accuracy by T_max over both channels, and below it the exact chance that a model arrives."""
    (result,) = (one for one in item_results() if (one["item"], one["scale"]) == ("mix2fld/choice-t-max", "laptop"))
    cells = {(c["row"], float(c["column"])): c["ours"] for c in result["quantities"]["accuracy"]["cells"] if c["ours"]}
    figure = blank_figure(6.5, 5.2)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    lines = {"fl": "FL, asymmetric", "fl-symmetric": "FL, symmetric", "mix2fld": "Mix2FLD, either"}
    for (row, label), look in zip(lines.items(), line_styles(list(lines)).values(), strict=True):
        found = sorted((1000 * t_max, list(ours.values())) for (name, t_max), ours in cells.items() if name == row)
        x, values = [t_max for t_max, _ in found], [ours for _, ours in found]
        style = {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markersize": 4}
        above.plot(x, list(map(statistics.mean, values)), linewidth=1.6, label=label, **style)
        lowest, highest = (list(map(end, values)) for end in (min, max))
        above.fill_between(x, lowest, highest, color=look.colour, alpha=BAND, linewidth=0)
        if row != "mix2fld":
            power = 40.0 if row == "fl-symmetric" else 23.0
            links = [Wireless(t_max=t / 1000, power_up=power).link("up", 10) for t in range(100, 111)]
            chances = [1 - link.outage(32 * 12_544) for link in links]
            below.step(range(100, 111), chances, where="post", color=look.colour, linestyle=look.dash, linewidth=1.6)
    above.legend(fontsize=9, frameon=False, labelcolor=INK, loc="lower right")
    above.set_xticks(range(100, 111))
    style_axes(above, "", "test accuracy of one device (%)")
    style_axes(below, "T_max (ms)", "a model arrives (chance)")
    title = "FL passes Mix2FLD at a T_max of 101 ms on the symmetric channel, at 109 ms on the asymmetric one"
    save_svg(figure, "mix2fld-t-max", title)


def mix2fld_t_max() -> str:
    """FL at the paper's own T_max: accuracy by round, and uploads lost."""
    rows = []
    for run in study_result("mix2fld-figure-2")["runs"]:
        if "t_max=0.1" in run["method"]:
            curve = ", ".join(f"{100 * accuracy:.1f}" for accuracy in run["accuracy"][1:])
            rows.append([run["method"], curve, f"{run['lost']} of {10 * run['rounds'][-1]}"])
    return table(("method", "accuracy % by round", "uploads lost"), rows)


def mix2fld_outage() -> str:
    """Probability that a model of 12,544 weights is uploaded, exactly, by T_max and channel; ten devices transmit."""
    rows = []
    for milliseconds in range(100, 111):
        links = [Wireless(t_max=milliseconds / 1000, power_up=power).link("up", 10) for power in (23.0, 40.0)]
        rows.append([str(milliseconds), *(f"{1 - link.outage(32 * 12_544):.5f}" for link in links)])
    return table(["T_max, ms", "asymmetric channel", "symmetric channel"], rows)


def mix2fld_figure_3() -> str:
    """A row for each number of devices: mean and variance of their accuracies, and the server's, for both splits."""
    result = study_result("mix2fld-figure-3")
    cells: dict[str, list[str]] = defaultdict(list)
    forms = sorted({run["method"].rpartition(" form=")[2] for run in result["runs"]})
    for form in forms:
        for run in result["runs"]:
            method, _, of = run["method"].rpartition(" form=")
            if of == form:
                numbers = f"{100 * run['mean']:.1f}", f"{1e4 * run['variance']:.2f}", f"{100 * run['server']:.1f}"
                cells[method.removesuffix(" devices")] += numbers
    head = [f"{form}: {what}" for form in forms for what in ("mean %", "variance", "server %")]
    return table(["devices", *head], [[number, *row] for number, row in cells.items()], command_of(result))


def sample_privacy() -> str:
    """How far Mix2FLD's Tables II and III are from the paper's, and how many samples an attacker assigns."""
    result = study_result("mix2fld-privacy")
    rows = []
    for which, title, item in (("mixup", "II, Mixup", "table-2"), ("mix2up", "III, Mix2up", "table-3")):
        for one in result["sets"]:
            paper = paper_numbers(f"mix2fld/{item}", "privacy")[one["data"]]
            values = [row[f"{which}_smallest"] for row in one["rows"]]
            largest = max((ours - theirs for ours, theirs in zip(values, paper, strict=True)), key=abs)
            recognised = (f"{100 * row[f'{which}_recognised']:.0f}" for row in one["rows"])
            rows.append([title, one["data"], f"{largest:+.3f}", *recognised])
    lambdas = (f"{lam:g}" for lam in result["lambdas"])
    head = ("table", "data", "largest difference to the paper", *lambdas)
    return table(head, rows, f"{command_of(result)}; recognised samples in %, by lambda")


def closest_pairs() -> str:
    """The distance between raw samples that Mix2FLD's Table II implies, and that of the closest pair of two labels."""
    rows = []
    for one in study_result("mix2fld-privacy")["sets"]:
        paper = paper_numbers("mix2fld/table-2", "privacy")[one["data"]]
        implied = statistics.mean(v - math.log(lam) for v, lam in zip(paper, LAMBDAS, strict=True))
        found = [f"{statistics.mean(v):.2f} ± {statistics.stdev(v):.2f}" for v in one["closest"].values()]
        rows.append([one["data"], f"{implied:.2f}", *found])
    head = ["data", "the paper", *(f"of {int(number):,}" for number in one["closest"])]
    return table(head, rows)


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
        pair(BEST, "MixFLD 50").above("inversely mixed seed samples beat mixed ones", "most, if uneven"),
        pair("FD", "MixFLD 50").above("MixFLD falls behind FD, labels uneven", "fails", uneven=True),
        pair("Mix2FLD 10, 20", few).above("making 20 of 10 seed samples beats making 10", "up to +1.7"),
        pair(BEST, many).above("making 100 of 50 seed samples beats making 50", "up to +1.7"),
        pair(many, few).above("50 seed samples are more accurate than 10", "more"),
        pair(few, many).faster("10 seed samples converge sooner than 50", "sooner"),
    ]


def _payload_claim(found: Mapping[str, Panel]) -> list[str]:
    fl, few = (found["power_up=23.0 form=iid"][name][0] for name in ("FL", "Mix2FLD 10, 10"))
    quotient = fl["costs"]["bytes_up"] / few["costs"]["bytes_up"]
    claim = f"bits up, beside FL's: 10 seed samples, {fl['rounds'][-1]} rounds"
    return [claim, "42.4x fewer", f"{quotient:.1f}x fewer", verdict([quotient], 1.0)]


def verdict(values: Sequence[float], bound: float) -> str:
    """Whether all numbers of the one random seed lie above a bound, none of them, or some."""
    above = [value > bound for value in values]
    return f"one seed: {'for' if all(above) else 'both ways' if any(above) else 'against'}"
