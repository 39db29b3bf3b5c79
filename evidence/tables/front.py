"""The figure of the front page: a gain, whether it lasts, and its price."""

from __future__ import annotations

import statistics

from fedblend.analysis.plotting import BAND, INK, MUTED, blank_figure, line_styles, style_axes
from tables.common import by_method, save_svg, study_result

SHOWN = ("fedavg", "server-means")

PRICES = {
    "map-cifar10-classes": "CIFAR10",
    "map-fashion-classes": "Fashion-MNIST",
    "map-femnist": "FEMNIST",
    "map-shakespeare": "Shakespeare",
}
"""Data sets by how well an attacker tells members from what was shared; on Shakespeare many means hold few samples."""


def draw_front() -> None:
    """Accuracy by round on CIFAR10, and an attacker's advantage from what `virtual-means` shares."""
    figure, styles = blank_figure(6.6, 3.5), line_styles(SHOWN)
    gain, price = figure.subplots(1, 2, width_ratios=(1.15, 1))
    groups = by_method(study_result("long-cifar10-classes")["runs"])
    for method, style in styles.items():
        seeds = [[100 * accuracy for accuracy in run["accuracy"]] for run in groups[method]]
        mean, low, high = (list(map(pick, zip(*seeds, strict=True))) for pick in (statistics.mean, min, max))
        rounds = groups[method][0]["rounds"]
        gain.plot(rounds, mean, color=style.colour, linestyle=style.dash, linewidth=2.2, label=method)
        gain.fill_between(rounds, low, high, color=style.colour, alpha=BAND, linewidth=0)
    style_axes(gain, "round", "test accuracy (%)", 10)
    gain.set_title("Gain: rounds", fontsize=10, color=INK, loc="left")
    gain.set_ylim(bottom=0)
    gain.legend(loc="lower right", frameon=False, fontsize=10, labelcolor=INK)
    for place, study in enumerate(PRICES):
        (option,) = (o for o in study_result(study)["advice"]["options"] if o["method"] == "virtual-means")
        for kind, label, below in (("means", "class means", -0.2), ("weights", "the model", 0.2)):
            value = max(0.0, option["membership"][kind])
            colour = styles["server-means"].colour if kind == "means" else MUTED
            price.barh(place + below, value, 0.36, color=colour, label=label if not place else None)
            price.text(value + 0.02, place + below, f"{value:.2f}", va="center", fontsize=10, color=INK)
    style_axes(price, "0: guessing, 1: certain", "", 10)
    price.set_yticks(range(len(PRICES)), list(PRICES.values()), fontsize=10)
    price.set_xlim(0, 1.12)
    price.invert_yaxis()
    price.grid(False, axis="y")
    price.set_title("Price: who was a member?", fontsize=10, color=INK, loc="left")
    price.legend(loc="upper right", frameon=False, fontsize=10, labelcolor=INK)
    save_svg(figure, "front", "server-means saves rounds; means of few samples tell who was a member")
