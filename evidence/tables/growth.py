"""The figure of docs/scaling.md: how a round grows."""

from __future__ import annotations

import json

from fedblend.analysis.plotting import COLOURS, DASHES, MARKERS, add_legend, blank_figure, style_axes
from tables.common import ROOT, save_svg

VARIED = {"clients": "clients", "cohort": "clients of a round", "model": "parameters of the model"}
"""What varies, and its name; the number of processes changes neither time nor memory."""


def draw_growth() -> None:
    """Processor seconds and memory of a round against each number that varies, from benchmarks/growth.py's results."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "growth.json").read_text())["rows"]
    figure = blank_figure(7.5, 3.6)
    both = figure.subplots(1, 2)
    shown = {"round_s": "processor seconds", "mb": "MB beyond libraries"}
    for axes, (field, label) in zip(both, shown.items(), strict=True):
        for number, (kind, name) in enumerate(VARIED.items()):
            found = [row for row in rows if row["kind"] == kind]
            x = [row["parameters" if kind == "model" else "value"] for row in found]
            look = {"color": COLOURS[number], "linestyle": DASHES[number], "marker": MARKERS[number], "markersize": 4}
            axes.plot(x, [row[field] for row in found], label=name, **look)
        style_axes(axes, "the number that varies", label)
        axes.set(xscale="log", yscale="log")
        axes.set_xticks([10, 10**3, 10**5, 10**7], ["10", "1,000", "100,000", "10 million"])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        axes.minorticks_off()
    add_legend(figure, *both[0].get_legend_handles_labels(), ncols=3)
    save_svg(figure, "growth", "Time grows with cohort and model, memory with population and model")
