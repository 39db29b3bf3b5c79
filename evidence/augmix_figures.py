"""Figures 3 to 7 of Fed-AugMix, of what evidence/augmix-mnist.py has made: docs/figures/augmix-*.png."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from augmix_page import by_method
from kept import is_kept, pictures

from fedblend.analysis.plotting import DASHES, DPI, INK, METHODS, MUTED, dress

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
STAGES = ("untrained", "trained")
SIDE = 0.9
"""Inches of a picture's side."""
SAID: dict[str, Any] = {"fontsize": 8, "color": MUTED, "va": "center", "annotation_clip": False}
"""How words beside the last panel look."""
MEASURES = {"mse": ("MSE of what is rebuilt", 1), "ssim": ("SSIM (%)", 100), "psnr": ("PSNR (dB)", 1)}

FolderOf = Callable[..., Path]


def draw_all(result: Mapping[str, Any], folder_of: FolderOf) -> None:
    """Draw all figures of which there is anything."""
    FIGURES.mkdir(exist_ok=True)
    rows = [row for row in result["rows"] if row["attacker"] == "plain" and row["loss_scaling"]]
    if rows:
        rebuilt(rows, folder_of)
    if any(row["stage"] == "trained" for row in rows) and len(accuracies(result)) > 1:
        trade_off(rows, accuracies(result))
    off = [row for row in result["rows"] if not row["loss_scaling"]]
    if off:
        scaling([*(row for row in rows if row["stage"] == "untrained" and row["severity"] in (0, 6)), *off], folder_of)
    if result["runs"]:
        curves(result["runs"])


def accuracies(result: Mapping[str, Any]) -> dict[int, float]:
    """Final test accuracy in percent by severity, of the runs without a proximal term."""
    found = {}
    for run in result["runs"]:
        name, _, severity = run["method"].partition(" ")
        if name in ("fedavg", "fed-augmix"):
            found[int(severity or 0)] = 100 * run["accuracy"][-1]
    return found


# Figure 3 --------------------------------------------------------------------------------------------------


def rebuilt(rows: Sequence[Mapping[str, Any]], folder_of: FolderOf) -> None:
    """The first client's images, and below them what was rebuilt of them at each severity: untrained, trained."""
    severities = sorted({row["severity"] for row in rows})
    stages = [stage for stage in STAGES if any(row["stage"] == stage for row in rows)]
    there = {(s, t): folder_of(s, "plain", t, True, 0) for s in stages for t in severities}
    images = len(pictures(there[stages[0], severities[0]])[0])
    figure = _figure((SIDE * len(stages) * images + 1.0, SIDE * (len(severities) + 1) + 0.8))
    halves = figure.subfigures(1, len(stages), squeeze=False)[0]
    for half, stage in zip(halves, stages, strict=True):
        half.suptitle(f"{stage} model", fontsize=9.5, color=INK)
        axes = half.subplots(len(severities) + 1, images, squeeze=False)
        for line, severity in enumerate([None, *severities]):
            if severity is not None and not is_kept(there[stage, severity]):
                continue
            original, made = pictures(there[stage, severity or severities[0]])
            for k in range(images):
                _show(axes[line, k], original[k] if severity is None else made[k])
            word = "original" if severity is None else "none" if severity == 0 else f"s = {severity}"
            axes[line, 0].set_ylabel(word, fontsize=8.5, color=INK)
    _save(figure, "augmix-rebuilt")


# Figures 4 and 5 -------------------------------------------------------------------------------------------


def trade_off(rows: Sequence[Mapping[str, Any]], accuracy: Mapping[int, float]) -> None:
    """Test accuracy against each measure of what was rebuilt, a line a stage and a point a severity."""
    figure = _figure((10.5, 3.9))
    for axes, (measure, (label, factor)) in zip(figure.subplots(1, 3, sharey=True), MEASURES.items(), strict=True):
        for number, stage in enumerate(STAGES):
            points = sorted(
                (row["severity"], factor * row[measure], accuracy[row["severity"]])
                for row in rows
                if row["stage"] == stage and row["severity"] in accuracy
            )
            _, x, y = zip(*points, strict=True)
            axes.plot(
                x, y, "o", color=METHODS[number], linestyle=DASHES[number][1], markersize=6, label=f"{stage} model"
            )
        dress(axes, label, "test accuracy (%)" if measure == "mse" else "")
        axes.margins(0.08)
    for severity, high in accuracy.items():
        word = "no Fed-AugMix" if severity == 0 else f"s = {severity}"
        axes.annotate(word, (1.03, high), None, axes.get_yaxis_transform(), **SAID)
    handles, words = axes.get_legend_handles_labels()
    figure.legend(handles, words, loc="outside lower left", fontsize=8.5, frameon=False, labelcolor=INK, ncols=2)
    _save(figure, "augmix-trade-off")


# Figure 6 --------------------------------------------------------------------------------------------------


def scaling(rows: Sequence[Mapping[str, Any]], folder_of: FolderOf) -> None:
    """The attack's cost by iteration on an untrained model, and what it rebuilt: with loss scaling and without."""
    figure = _figure((9.6, 4.2))
    left, right = figure.subfigures(1, 2, width_ratios=(1.1, 1))
    axes = left.subplots()
    grid = right.subplots(len(rows) + 1, 4)
    for number, row in enumerate(rows):
        plain = row["severity"] == 0
        word = (
            "no Fed-AugMix"
            if plain
            else f"s = {row['severity']}, loss scaling {'on' if row['loss_scaling'] else 'off'}"
        )
        x, y = zip(*row["curve"], strict=True)
        axes.plot(x, y, color=METHODS[number], linestyle=DASHES[number][1], linewidth=1.8, label=word)
        there = folder_of("untrained", "plain", row["severity"], row["loss_scaling"], 0)
        original, made = pictures(there)
        for k in range(4):
            _show(grid[0, k], original[k])
            _show(grid[number + 1, k], made[k])
        grid[number + 1, 0].set_ylabel(word.replace(", ", "\n"), fontsize=8, color=METHODS[number])
    grid[0, 0].set_ylabel("original", fontsize=8, color=INK)
    dress(axes, "iteration", "cost: 1 - cosine, and total variation")
    axes.set_yscale("log")
    axes.legend(fontsize=8.5, frameon=False, labelcolor=INK)
    _save(figure, "augmix-loss-scaling")


# Figure 7 --------------------------------------------------------------------------------------------------


def curves(runs: Sequence[Mapping[str, Any]]) -> None:
    """Test accuracy by round of FedAvg and FedProx, without Fed-AugMix and with it."""
    figure = _figure((8.2, 4.2))
    axes = figure.subplots()
    for number, run in enumerate(sorted(runs, key=by_method)):
        stroke = DASHES[1][1] if run["method"].startswith("fedprox") else "-"
        accuracy = [100 * value for value in run["accuracy"]]
        axes.plot(run["rounds"], accuracy, color=METHODS[number], linestyle=stroke, linewidth=1.8, label=run["method"])
    dress(axes, "round", "test accuracy (%)")
    figure.legend(loc="outside right upper", fontsize=8.5, frameon=False, labelcolor=INK)
    _save(figure, "augmix-accuracy")


# What InvGrad rebuilds of single images ----------------------------------------------------------------------


def single_images(
    columns: Sequence[tuple[str, str]], rows: Sequence[str], folder_of: Callable[[str, str, str], Path]
) -> None:
    """One image for each (network, data), and below it what was rebuilt of it under each protection."""
    figure = _figure((SIDE * 1.35 * len(columns), SIDE * 1.12 * (len(rows) + 1)))
    grid = figure.subplots(len(rows) + 1, len(columns), squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for column, (network, data) in enumerate(columns):
        for row, protection in enumerate(rows):
            there = folder_of(network, data, protection)
            if is_kept(there):
                original, made = pictures(there)
                _show(grid[0, column], original[0])
                _show(grid[row + 1, column], made[0])
        grid[0, column].set_title(f"{network}\n{data}", fontsize=8, color=INK)
    for row, word in enumerate(("original", *rows)):
        grid[row, 0].set_axis_on()
        grid[row, 0].set_ylabel(word, fontsize=8, color=INK)
    _save(figure, "invgrad-single-images")


def _figure(size: tuple[float, float]) -> Figure:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def _show(axes: Axes, image: np.ndarray) -> None:
    shown = image[0] if len(image) == 1 else np.moveaxis(image, 0, -1).clip(0, 1)
    axes.imshow(shown, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)


def _save(figure: Figure | SubFigure, name: str) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")  # type: ignore[union-attr]
    (FIGURES / f"{name}.png").write_bytes(buffer.getvalue())
