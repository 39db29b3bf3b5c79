"""Tables and figures of Fed-AugMix's studies and of gradient inversion."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from fedblend.analysis.plotting import COLOURS, DASHES, INK, MUTED, style_axes
from tables.common import (
    Row,
    command_of,
    figure_of,
    final_accuracy,
    last_accuracy,
    paper_numbers,
    save_png,
    study_result,
    table,
)

AUGMIX_PAPER_ROWS = {
    "fedavg": "fedavg",
    "fed-augmix 2": "fedavg-augmix",
    "fedprox": "fedprox",
    "fedprox+fed-augmix 2": "fedprox-augmix",
}
"""Rows of Table III by our methods; the paper does not state at which severity."""


def augmix_accuracy() -> str:
    """Table III's MNIST block: accuracy on the global test set and over clients' own tests, with the paper's."""
    result, paper = study_result("augmix-mnist"), paper_numbers("fed-augmix/table-3", "clients")
    rows = []
    for run in sorted(result["runs"], key=_severity_order):
        clients = run["clients"]
        own = f"{100 * clients['mean']:.1f} ± {100 * clients['std']:.1f}"
        theirs = f"{paper[AUGMIX_PAPER_ROWS[run['method']]][0]:.2f}" if run["method"] in AUGMIX_PAPER_ROWS else ""
        rows.append([run["method"], f"{final_accuracy(run):.1f}", f"{last_accuracy(run, 3):.1f}", own, theirs])
    head = ["method, severity", "test %", "mean of last 3 %", "own tests %", "the paper %"]
    return table(head, rows, command_of(result))


def _severity_order(run: Row) -> tuple[bool, int]:
    """Runs without a proximal term first, then by severity."""
    name, _, severity = run["method"].partition(" ")
    return name.startswith("fedprox"), int(severity or 0)


def augmix_attacks() -> str:
    """Table II's MNIST block: what InvGrad rebuilt, by stage, severity and attacker."""
    result = study_result("augmix-mnist")
    attack = result["attack"]
    rows = []
    for row in result["rows"]:
        attacker = row["attacker"] if row["loss_scaling"] else f"{row['attacker']}, no loss scaling"
        numbers = [_with_error(row, "mse", 3), _with_error(row, "psnr", 2), _with_error(row, "ssim", 1, 100)]
        attacker += f" ({len(row['clients'])} client)" if len(row["clients"]) == 1 else ""
        rows.append([row["stage"], f"{row['severity']}", attacker, *numbers])
    above = f"InvGrad, {attack['images']} images, {attack['steps']} steps, {attack['iterations']} iterations"
    return table(["model", "severity", "attacker", "MSE", "PSNR dB", "SSIM %"], rows, above)


def _with_error(row: Row, measure: str, digits: int, factor: int = 1) -> str:
    """A mean, with its standard error if it is of several clients."""
    error = row.get(f"{measure}_error")
    mean = f"{factor * row[measure]:.{digits}f}"
    return mean if error is None else f"{mean} ± {factor * error:.{digits}f}"


def invgrad_table() -> str:
    """PSNR (SSIM) of what InvGrad rebuilt from untrained models: a row for each target, a column a protection."""
    result = study_result("invgrad")
    names = ["none", "augmix 2", "augmix 6", "augmix 10", "gaussian noise", "pruned to 10 %"]
    cells: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in result["rows"]:
        target = row["network"], row["data"], f"{row['images']} x {row['steps']}", f"{row['iterations']}"
        cells[target][row["protection"]] = f"{row['psnr']:.1f} ({100 * row['ssim']:.0f})"
    above = f"{command_of(result)}; each cell: PSNR in dB (SSIM in %), mean over images and clients attacked"
    rows = ([*target, *(row.get(name, "") for name in names)] for target, row in cells.items())
    return table(["network", "data", "images x steps", "it.", *names], rows, above)


def draw_augmix_trade_off() -> None:
    """Figures 4 and 5: accuracy against each measure of the rebuilt images, a line for each stage."""
    result = study_result("augmix-mnist")
    runs = {_severity_order(run): final_accuracy(run) for run in result["runs"]}
    accuracy = {severity: value for (proximal, severity), value in runs.items() if not proximal}
    rows = [row for row in result["rows"] if row["attacker"] == "plain" and row["loss_scaling"]]
    measures = {"mse": ("MSE of what is rebuilt", 1), "ssim": ("SSIM (%)", 100), "psnr": ("PSNR (dB)", 1)}
    figure = figure_of(10.5, 3.9)
    for axes, (measure, (label, factor)) in zip(figure.subplots(1, 3, sharey=True), measures.items(), strict=True):
        for number, stage in enumerate(("untrained", "trained")):
            chosen = sorted((row["severity"], factor * row[measure]) for row in rows if row["stage"] == stage)
            x, y = [value for _, value in chosen], [accuracy[severity] for severity, _ in chosen]
            stroke = DASHES[number]
            axes.plot(x, y, "o", color=COLOURS[number], linestyle=stroke, markersize=6, label=f"{stage} model")
        style_axes(axes, label, "test accuracy (%)" if measure == "mse" else "")
        axes.margins(0.08)
    style: dict[str, Any] = {"fontsize": 8, "color": MUTED, "va": "center", "annotation_clip": False}
    for severity, value in accuracy.items():
        word = "no Fed-AugMix" if severity == 0 else f"s = {severity}"
        axes.annotate(word, (1.03, value), None, axes.get_yaxis_transform(), **style)
    handles, words = axes.get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower left", fontsize=8.5, frameon=False, labelcolor=INK, ncols=2)
    save_png(figure, "augmix-trade-off")


def draw_augmix_accuracy() -> None:
    """Figure 7: test accuracy by round of FedAvg and FedProx, without Fed-AugMix and with it."""
    figure = figure_of(8.2, 4.2)
    axes = figure.subplots()
    for number, run in enumerate(sorted(study_result("augmix-mnist")["runs"], key=_severity_order)):
        stroke = DASHES[1] if run["method"].startswith("fedprox") else "-"
        accuracy = [100 * value for value in run["accuracy"]]
        axes.plot(run["rounds"], accuracy, color=COLOURS[number], linestyle=stroke, linewidth=1.8, label=run["method"])
    style_axes(axes, "round", "test accuracy (%)")
    figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, labelcolor=INK)
    save_png(figure, "augmix-accuracy")
