"""Figures with a mark for each method, run or trial: advice, leak report cards, and searches."""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from statistics import stdev
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fedblend.analysis import plotting
from fedblend.analysis.advice import Advice, front
from fedblend.analysis.privacy.membership import standard_error
from fedblend.core.errors import counted
from fedblend.experiment.study import Interval
from fedblend.report.figures import plain_legend

if TYPE_CHECKING:
    from fedblend.analysis.privacy.leak_report import Leak
    from fedblend.runs.tuning import MethodSearch

# Advice ----------------------------------------------------------------------------------------------------------

SPAN = 3  # Ratio of the largest to the smallest number of megabytes above which their axis is logarithmic
LEAST_ADVANTAGE = 0.05  # Least end of the axis of membership advantages, which are measured to some hundredths


def draw_advice(advice: Advice, data: str, samples: int) -> Figure:
    """A figure with two panels: the score against the membership advantage, and against megabytes a client.

    A mark for each method, its standard deviation over seeds and the standard error of its membership advantage over
    ``samples`` members, and the Pareto front as a line: no method is better than one on the line in both. Hollow marks
    are methods that the limits exclude. The title has ``data``, the name of the data and their split, and the answer.
    """
    figure = plotting.blank_figure(8.5, 4.6)
    leak, sent = figure.subplots(1, 2, sharey=True)
    styles = plotting.line_styles([option.method for option in advice.options])
    costs = {
        leak: {option.method: option.exposure for option in advice.options},
        sent: {option.method: option.megabytes for option in advice.options},
    }
    percent = advice.metric == "accuracy"
    factor = 100 if percent else 1
    markers = {option.method: marker for option, marker in zip(advice.options, cycle(plotting.MARKERS), strict=False)}
    for axes, cost in costs.items():
        for option in advice.options:
            name, place = option.method, cost[option.method]
            if math.isnan(place):
                continue
            error = standard_error(place, samples) if axes is leak else 0.0
            spread = factor * stdev(option.scores.values()) if len(option.scores) > 1 else 0.0
            axes.errorbar(
                [place], [factor * option.score], xerr=[error], yerr=[spread], color=styles[name].colour, markersize=7,
                marker=markers[name], fillstyle="none" if option.fault else "full", capsize=2, elinewidth=1.0,
                clip_on=False,
            )  # fmt: skip
        line = front([o for o in advice.options if not o.fault], cost, advice.larger_is_better)
        x, y = [cost[o.method] for o in line], [factor * o.score for o in line]
        axes.plot(x, y, color=plotting.MUTED, linewidth=1.0, zorder=1)
    score = f"test {advice.metric}{' (%)' if percent else ''}"
    plotting.style_axes(leak, "membership advantage ± standard error  (← more private)", score)
    sizes = [option.megabytes for option in advice.options]
    log = min(sizes) > 0 and max(sizes) > SPAN * min(sizes)
    plotting.style_axes(sent, f"MB a client, up and down{', log scale' if log else ''}  (← cheaper)", "")
    if log:
        plotting.log_axis(sent, sizes)
    for axes in costs:
        axes.margins(0.08)
    leak.set_xlim(right=max(leak.get_xlim()[1], LEAST_ADVANTAGE))
    seen = f"Test {advice.metric} by what leaks and by megabytes sent: {data}"
    plotting.head_figure(figure, seen, 11.5)
    leak.set_title(advice.answer()[0], loc="left", fontsize=9.5, color=plotting.MUTED, parse_math=False)
    marks = [Line2D([], [], color=styles[name].colour, marker=mark, linestyle="") for name, mark in markers.items()]
    marks.append(Line2D([], [], color=plotting.MUTED))
    plain_legend(figure, marks, [*markers, "Pareto front"], 4)
    return figure


# Leak report cards -----------------------------------------------------------------------------------------------

MARKERS = {"weights": "o", "means": "s", "seeds": "^"}
OTHER_MARKER = "D"  # Markers by the kind of payload

NOTE = (
    "Weights: the strongest attack that was run, compared with the original. Means and seeds: compared with the "
    "nearest raw sample."
)
NOTE_WIDTH = 125  # Letters of a note that fit into a line below the figure
RAW_AT = 1.08  # Where raw samples, whose PSNR is infinite, are drawn: this times the largest finite PSNR


def draw_leaks(leaks: Sequence[Leak]) -> bytes:
    """A PNG of test accuracy against the PSNR of the rebuilt images: a mark for each run and kind of payload, in the
    colour of the run's method.

    Of several measures of one kind, the largest PSNR is drawn, which is the largest leak.
    """
    shown = strongest(leaks)
    figure = plotting.blank_figure(8.2, 5.0)
    title = "Test accuracy by how well images can be rebuilt from what left a client"
    figure.suptitle(title, fontsize=10, color=plotting.INK)
    axes = figure.add_subplot()
    styles = plotting.line_styles([leak.method for leak in leaks])
    finite = [leak.psnr for leak in shown if math.isfinite(leak.psnr)]
    edge = RAW_AT * max([*finite, 10.0])
    for run, method in dict.fromkeys((leak.run, leak.method) for leak in shown):  # a line joins the kinds of one run
        points = sorted((min(leak.psnr, edge), 100 * leak.accuracy) for leak in shown if leak.run == run)
        axes.plot(*zip(*points, strict=True), color=styles[method].colour, linewidth=1.0, alpha=0.5, zorder=1)
    for leak in shown:
        x = min(leak.psnr, edge)
        marker = MARKERS.get(leak.kind, OTHER_MARKER)
        axes.plot([x], [100 * leak.accuracy], marker, color=styles[leak.method].colour, markersize=8, alpha=0.9)
        if math.isinf(leak.psnr):
            axes.annotate(
                "raw: infinite", (x, 100 * leak.accuracy), xytext=(0, 7), textcoords="offset points", fontsize=8,
                ha="center",
            )  # fmt: skip
    plotting.style_axes(axes, "PSNR of the rebuilt images (dB)  (← more private)", "test accuracy (%)")
    axes.margins(0.06)
    methods = [Line2D([], [], color=style.colour, linewidth=4) for style in styles.values()]
    kinds = list(dict.fromkeys(leak.kind for leak in shown))
    marks = [
        Line2D([], [], color=plotting.MUTED, marker=MARKERS.get(kind, OTHER_MARKER), linestyle="") for kind in kinds
    ]
    texts = [*styles, *(f"from {kind}" for kind in kinds)]
    plotting.add_legend(figure, [*methods, *marks], texts, loc="outside right upper")
    measured = {(leak.run, leak.kind) for leak in shown}
    lacking = {(leak.run, leak.kind): leak.method for leak in leaks if (leak.run, leak.kind) not in measured}
    runs = Counter((method, kind) for (_, kind), method in lacking.items())
    missing = [f"{kind} of {method} ({counted(n, 'run')})" for (method, kind), n in runs.items()]
    notes = [NOTE] if shown else []
    notes += [f"Not measured: {', '.join(missing)}"] if missing else []
    wrapped = "\n".join(textwrap.fill(line, NOTE_WIDTH) for line in notes)
    figure.supxlabel(wrapped, fontsize=8, color=plotting.MUTED, x=0.01, ha="left").set_parse_math(False)
    return plotting.png_bytes(figure)


def strongest(leaks: Sequence[Leak]) -> list[Leak]:
    """The measure with the largest PSNR of each run and kind that was measured."""
    best: dict[tuple[str, str], Leak] = {}
    for leak in leaks:
        if leak.measured:
            kept = best.setdefault((leak.run, leak.kind), leak)
            best[leak.run, leak.kind] = leak if leak.psnr > kept.psnr else kept
    return list(best.values())


# Searches --------------------------------------------------------------------------------------------------------

PANEL = 3.4  # Width and height of a panel in inches


def draw_search(searches: Sequence[MethodSearch]) -> bytes:
    """A PNG with a panel for each field: a mark for each trial, in its method's style; large ones are the best trials.

    Hollow marks are trials that were ended early, at the score that they had then.
    """
    fields = list(dict.fromkeys(path for search in searches for path in search.fields))
    figure = plotting.blank_figure(max(2, len(fields)) * PANEL, PANEL)
    panels = figure.subplots(1, len(fields), sharey=True, squeeze=False)[0]
    metric = searches[0].metric
    percent = metric == "accuracy"
    styles = plotting.line_styles([search.label for search in searches])
    for axes, field in zip(panels, fields, strict=True):
        plotting.style_axes(axes, field, f"validation {metric}{' (%)' if percent else ''}" if axes is panels[0] else "")
        axes.margins(0.08)
        interval = next(search.fields[field] for search in searches if field in search.fields)
        ordered = interval if isinstance(interval, list) else []
        numeric = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in ordered)
        for search in searches:
            for trial in search.trials:
                if trial.score is None or field not in trial.values:
                    continue
                value = trial.values[field]
                x = value if numeric else ordered.index(value)
                y = 100 * trial.score if percent else trial.score
                colour, marker = styles[search.label].colour, styles[search.label].marker
                fill = "none" if trial.pruned else "full"
                axes.plot([x], [y], marker, color=colour, fillstyle=fill, alpha=0.75, clip_on=False)
                if trial is search.best:
                    axes.plot([x], [y], marker, color=colour, markersize=14, fillstyle="none", clip_on=False)
        if ordered and not numeric:
            names = [str(value.get("name", value)) if isinstance(value, dict) else str(value) for value in ordered]
            axes.set_xticks(range(len(ordered)), names)
        elif (isinstance(interval, Interval) and interval.log) or _spans(ordered):
            tried = [t.values[field] for search in searches for t in search.trials if field in t.values]
            plotting.log_axis(axes, tried)
    figure.suptitle(f"Validation {metric} of each trial, by its values", fontsize=10, color=plotting.INK)

    def mark(style: plotting.LineStyle, **options: Any) -> Line2D:
        return Line2D([], [], color=style.colour, marker=style.marker, linestyle="", **options)

    grey = plotting.LineStyle(plotting.INK, "", "o")
    marks = {name: mark(style) for name, style in styles.items()} if len(searches) > 1 else {}
    marks["best trial of a method"] = mark(grey, markersize=10, fillstyle="none")
    if any(trial.pruned for search in searches for trial in search.trials):
        marks["ended early"] = mark(grey, fillstyle="none")
    columns = len(marks) if len(marks) <= 6 else 4
    plotting.add_legend(figure, [*marks.values()], [*marks], loc="outside lower center", ncols=columns)
    return plotting.png_bytes(figure)


def _spans(values: Sequence[float]) -> bool:
    return len(values) > 1 and min(values) > 0 and max(values) >= 20 * min(values)
