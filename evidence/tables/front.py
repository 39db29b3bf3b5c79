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
"""Data sets by how well an attacker tells members from what was shared. On Shakespeare many means are of few samples."""


def draw_front() -> None:
    """Accuracy by round on two data sets, and an attacker's advantage from class means on four."""
    figure, styles = figure_of(9.0, 3.3), line_styles(SHOWN)
    axes = figure.subplots(1, 3, width_ratios=(1, 1, 0.95))
    for panel, (study, data) in zip(axes, CURVES.items(), strict=False):
        groups = by_method(study_result(study)["runs"])
        for method in SHOWN:
            seeds = [[100 * accuracy for accuracy in run["accuracy"]] for run in groups[method]]
            mean, low, high = (list(map(pick, zip(*seeds, strict=True))) for pick in (statistics.mean, min, max))
            rounds, colour = groups[method][0]["rounds"], styles[method].colour
            panel.plot(rounds, mean, color=colour, linestyle=styles[method].dash, linewidth=1.8)
            panel.fill_between(rounds, low, high, color=colour, alpha=BAND, linewidth=0)
            above = method == "server-means"
            panel.annotate(
                method, (rounds[5], (high if above else low)[5]), (0, 8 if above else -14), textcoords="offset points",
                color=colour, fontsize=9, ha="center",
            )  # fmt: skip
        style_axes(panel, "round", "test accuracy (%)" if panel is axes[0] else "")
        panel.set_title(f"{data}, two classes a client", fontsize=9.5, color=INK, loc="left")
        panel.set_ylim(bottom=0)
    price = axes[2]
    options = [next(o for o in study_result(study)["advice"]["options"] if o["method"] == "virtual-means") for study in PRICES]
    for place, option in enumerate(options):
        model, means = (max(0.0, option["membership"][kind]) for kind in ("weights", "means"))
        price.barh(place + 0.18, means, 0.32, color=styles["server-means"].colour)
        price.barh(place - 0.18, model, 0.32, color=MUTED)
        price.text(means + 0.02, place + 0.18, f"{means:.2f}", va="center", fontsize=8.5, color=INK)
        price.text(model + 0.02, place - 0.18, f"{model:.2f}", va="center", fontsize=8.5, color=MUTED)
    style_axes(price, "attacker's advantage (0 guesses, 1 certain)", "")
    price.set_yticks(range(len(PRICES)), list(PRICES.values()), fontsize=8.5)
    price.set_xlim(0, 1.08)
    price.invert_yaxis()
    price.grid(False, axis="y")
    price.set_title("what class means (model) reveal", fontsize=9.5, color=INK, loc="left")
    save_png(figure, "front")
