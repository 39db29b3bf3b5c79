"""Tables and figures of Fed-AugMix's studies and of gradient inversion."""

from __future__ import annotations

from collections import defaultdict

from fedblend.analysis.plotting import COLOURS, DASHES, INK, MUTED, blank_figure, style_axes
from tables.common import (
    Row,
    command_of,
    final_accuracy,
    last_accuracy,
    paper_numbers,
    save_svg,
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


def augmix_small() -> str:
    """What InvGrad rebuilt of digits of mnist5k, by stage, severity and attacker."""
    result = study_result("augmix-attack")
    rows = []
    for row in result["rows"]:
        numbers = f"{row['mse']:.3f}", f"{row['psnr']:.2f}", f"{100 * row['ssim']:.1f}"
        rows.append([row["stage"], f"{row['severity']}", row["attacker"], *numbers])
    return table(["model", "severity", "attacker", "MSE", "PSNR dB", "SSIM %"], rows, command_of(result))


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
        cells = [row["stage"], f"{row['severity']}", attacker, f"{len(row['clients'])}"]
        rows.append([*cells, *numbers, f"{row['cost']:.3f}"])
    above = f"InvGrad, {attack['images']} images, {attack['steps']} steps, {attack['iterations']} iterations"
    return table(["model", "severity", "attacker", "clients", "MSE", "PSNR dB", "SSIM %", "cost"], rows, above)


def _with_error(row: Row, measure: str, digits: int, factor: int = 1) -> str:
    """A mean, with its standard error if it is of several clients."""
    error = row.get(f"{measure}_error")
    mean = f"{factor * row[measure]:.{digits}f}"
    return mean if error is None else f"{mean} ± {factor * error:.{digits}f}"


def invgrad_table() -> str:
    """PSNR (SSIM) of what InvGrad rebuilt from untrained models: a row for each target, a column a protection."""
    result = study_result("invgrad")
    names = list(dict.fromkeys(row["protection"] for row in result["rows"]))
    cells: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in result["rows"]:
        target = row["network"], row["data"], f"{row['images']} x {row['steps']}", f"{row['iterations']}"
        cells[target][row["protection"]] = f"{row['psnr']:.1f} ({100 * row['ssim']:.0f})"
    above = f"{command_of(result)}; each cell: PSNR in dB (SSIM in %), mean over images and clients attacked"
    rows = ([*target, *(row.get(name, "") for name in names)] for target, row in cells.items())
    return table(["network", "data", "images x steps", "it.", *names], rows, above)


def invgrad_speed() -> str:
    """Iterations of the attack in a second of one processor, and of the bare double backward."""
    rows = []
    for row in study_result("invgrad")["speeds"]:
        speeds = f"{row['a_second']:.0f}", f"{row['bare_a_second']:.0f}", f"{row['ratio']:.2f}"
        rows.append([f"{row['images']}", f"{row['steps'] or 'gradient'}", *speeds])
    return table(["images", "steps", "iterations a second", "bare double backward", "times the bare"], rows)


def draw_augmix() -> None:
    """Figures 4, 5 and 7 in one: test accuracy by round, and how well images are rebuilt, by severity."""
    result = study_result("augmix-mnist")
    figure = blank_figure(7.5, 3.6)
    accuracy, rebuilt = figure.subplots(1, 2, width_ratios=(1.6, 1))
    for number, run in enumerate(sorted(result["runs"], key=_severity_order)):
        stroke = DASHES[1] if run["method"].startswith("fedprox") else "-"
        percent = [100 * value for value in run["accuracy"]]
        accuracy.plot(run["rounds"], percent, color=COLOURS[number], linestyle=stroke, label=run["method"])
    style_axes(accuracy, "round", "test accuracy (%)")
    for stage, colour in zip(("untrained", "trained"), COLOURS[4:], strict=False):
        rows = [r for r in result["rows"] if (r["stage"], r["attacker"]) == (stage, "plain") and r["loss_scaling"]]
        rows.sort(key=lambda row: row["severity"])
        values, errors = ([row[name] for row in rows] for name in ("psnr", "psnr_error"))
        look = {"color": colour, "marker": "o", "capsize": 2, "elinewidth": 1, "label": f"{stage} model"}
        rebuilt.errorbar(range(len(rows)), values, errors, **look)
    style_axes(rebuilt, "severity", "PSNR of rebuilt images (dB)")
    rebuilt.set_xticks(range(4), ["none", "2", "6", "10"])
    rebuilt.margins(x=0.08)
    rebuilt.set_title("bars: standard error over four clients", loc="left", fontsize=8, color=MUTED)
    look = {"loc": "upper left", "fontsize": 8, "frameon": False, "labelcolor": INK}
    for axes, columns in ((accuracy, 2), (rebuilt, 1)):
        axes.legend(bbox_to_anchor=(0, -0.16), ncols=columns, **look)
    title = "Fed-AugMix costs accuracy; only images of the untrained model get worse at every severity"
    save_svg(figure, "augmix-accuracy", title)
