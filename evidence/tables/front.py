"""The figure of the front page: a gain, whether it lasts, and its price."""

from __future__ import annotations

import statistics

from fedblend.analysis.plotting import BAND, INK, MUTED, line_styles, style_axes
from tables.common import by_method, figure_of, save_png, study_result

SHOWN = ("fedavg", "server-means")
CURVES = {"long-fashion-classes": "Fashion-MNIST", "long-cifar10-classes": "CIFAR10"}
"""Two classes a client, 100 clients, 120 rounds, three seeds."""

PRICES = {
    "map-cifar10-classes": "CIFAR10",
    "map-fashion-classes": "Fashion-MNIST",
    "map-femnist": "FEMNIST",
    "map-shakespeare": "Shakespeare",
}
"""Data sets by how well an attacker tells members from what was shared; on Shakespeare many means hold few samples."""


def draw_front() -> None:
    """Accuracy by round on two data sets, and an attacker's advantage from class means on four."""
    figure, styles = figure_of(9.0, 3.3), line_styles(SHOWN)
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 0.95))
    for panel, (study, data) in zip(axes, CURVES.items(), strict=False):
        groups = by_method(study_result(study)["runs"])
        for method in SHOWN:
            seeds = [[100 * accuracy for accuracy in run["accuracy"]] for run in groups[method]]
            mean, low, high = (list(map(pick, zip(*seeds, strict=True))) for pick in (statistics.mean, min, max))
            rounds, style = groups[method][0]["rounds"], styles[method]
            panel.plot(rounds, mean, color=style.colour, linestyle=style.dash, linewidth=1.8, label=method)
            panel.fill_between(rounds, low, high, color=style.colour, alpha=BAND, linewidth=0)
        style_axes(panel, "round", "test accuracy (%)" if panel is axes[0] else "")
        panel.set_title(f"{data}, two classes a client", fontsize=9.5, color=INK, loc="left")
        panel.set_ylim(bottom=0)
        panel.legend(loc="lower right", frameon=False, fontsize=9)
    price = axes[2]
    for place, study in enumerate(PRICES):
        (option,) = (o for o in study_result(study)["advice"]["options"] if o["method"] == "virtual-means")
        for kind, label, below in (("means", "class means", -0.18), ("weights", "the model", 0.18)):
            value = max(0.0, option["membership"][kind])
            colour = styles["server-means"].colour if kind == "means" else MUTED
            price.barh(place + below, value, 0.32, color=colour, label=label if not place else None)
            price.text(value + 0.02, place + below, f"{value:.2f}", va="center", fontsize=8.5, color=INK)
    style_axes(price, "0: guessing, 1: certain", "")
    price.set_yticks(range(len(PRICES)), list(PRICES.values()), fontsize=8.5)
    price.set_xlim(0, 1.08)
    price.invert_yaxis()
    price.legend(loc="upper right", frameon=False, fontsize=9)
    price.grid(False, axis="y")
    price.set_title("Price: who was a member?", fontsize=9.5, color=INK, loc="left")
    save_png(figure, "front")
