"""The figure of advice: each method's score against what it gives away and what it sends."""

from __future__ import annotations

import math
from itertools import cycle
from statistics import stdev
from typing import TYPE_CHECKING

from fedblend.analysis import plotting
from fedblend.analysis.advice import Advice, front
from fedblend.analysis.privacy.membership import standard_error
from fedblend.report.figures import plain_legend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZE = (8.5, 4.6)  # Width and height in inches
SPAN = 3  # Ratio of the largest to the smallest number of megabytes above which their axis is logarithmic
LEAST_ADVANTAGE = 0.05  # Least end of the axis of membership advantages, which are measured to some hundredths


def draw_advice(advice: Advice, data: str, samples: int) -> Figure:
    """A figure with two panels: the score against the membership advantage, and against megabytes a client.

    A mark for each method, its standard deviation over seeds and the standard error of its membership advantage over
    ``samples`` members, and the Pareto front as a line: no method is better than one on the line in both. Hollow marks
    are methods that the limits exclude. The title has ``data``, the name of the data and their split, and the answer.
    """
    from matplotlib.lines import Line2D

    figure = plotting.blank_figure(*SIZE)
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
