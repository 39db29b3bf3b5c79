"""Fed-AugMix's tables of docs/results.md: accuracy, what InvGrad rebuilt, and how fast the attack is."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from mdtable import table

RESULTS = Path(__file__).resolve().parent / "results"


def small() -> str:
    """What InvGrad rebuilt of digits of mnist5k, by stage, severity and what the attacker knows."""
    results = _read("augmix-attack")
    rows = []
    for row in results["rows"]:
        numbers = f"{row['mse']:.3f}", f"{row['psnr']:.2f}", f"{100 * row['ssim']:.1f}"
        rows.append([row["stage"], f"{row['severity']}", row["attacker"], *numbers])
    return f"`{results['command']}`\n\n" + table(["model", "severity", "attacker", "MSE", "PSNR dB", "SSIM %"], rows)


def accuracy() -> str:
    """Table III's MNIST block: accuracy on the global test set and over clients' own tests, beside the paper's."""
    results = _read("augmix-mnist")
    rows = []
    for run in sorted(results["runs"], key=by_method):
        over, paper = run["clients"], results["paper"].get(run["method"])
        last, three = run["accuracy"][-1], statistics.mean(run["accuracy"][-3:])
        own = f"{100 * over['mean']:.1f} ± {100 * over['std']:.1f}"
        rows.append([run["method"], f"{100 * last:.1f}", f"{100 * three:.1f}", own, f"{paper:.2f}" if paper else ""])
    head = ["method, severity", "test %", "mean of last 3 %", "own tests %", "the paper %"]
    return f"`{results['command']}`\n\n" + table(head, rows)


def by_method(run: dict[str, Any]) -> tuple[bool, int]:
    """Runs without a proximal term first, then by severity."""
    name, _, severity = run["method"].partition(" ")
    return name.startswith("fedprox"), int(severity or 0)


def attacks() -> str:
    """Table II's MNIST block: what InvGrad rebuilt, by stage, severity and what the attacker knows."""
    results = _read("augmix-mnist")
    attack = results["attack"]
    rows = []
    for row in results["rows"]:
        attacker = row["attacker"] if row["loss_scaling"] else f"{row['attacker']}, no loss scaling"
        numbers = [_with_error(row, "mse", 3), _with_error(row, "psnr", 2), _with_error(row, "ssim", 1, 100)]
        told = [row["stage"], f"{row['severity']}", attacker, f"{len(row['clients'])}"]
        rows.append([*told, *numbers, f"{row['cost']:.3f}"])
    about = f"InvGrad, {attack['images']} images, {attack['steps']} steps, {attack['iterations']} iterations"
    head = ["model", "severity", "attacker", "clients", "MSE", "PSNR dB", "SSIM %", "cost"]
    return f"{about}\n\n" + table(head, rows)


def _with_error(row: dict[str, Any], measure: str, digits: int, factor: int = 1) -> str:
    """A mean, and where there are several its standard error."""
    error = row.get(f"{measure}_error")
    mean = f"{factor * row[measure]:.{digits}f}"
    return mean if error is None else f"{mean} ± {factor * error:.{digits}f}"


def inverted() -> str:
    """PSNR (SSIM) of what InvGrad rebuilt from untrained models: a row for what is attacked, a column a protection."""
    results = _read("invgrad")
    names = list(dict.fromkeys(row["protection"] for row in results["rows"]))
    cells: dict[tuple[str, ...], dict[str, str]] = defaultdict(dict)
    for row in results["rows"]:
        attacked = row["network"], row["data"], f"{row['images']} x {row['steps']}", f"{row['iterations']}"
        cells[attacked][row["protection"]] = f"{row['psnr']:.1f} ({100 * row['ssim']:.0f})"
    about = f"`{results['command']}`; each cell: PSNR in dB (SSIM in %), mean over images and clients attacked"
    rows = ([*attacked, *(row.get(name, "") for name in names)] for attacked, row in cells.items())
    return f"{about}\n\n" + table(["network", "data", "images x steps", "it.", *names], rows)


def speed() -> str:
    """Iterations of the attack in a second of one processor, beside the bare double backward."""
    rows = []
    for row in _read("invgrad")["speeds"]:
        paces = f"{row['a_second']:.0f}", f"{row['bare_a_second']:.0f}", f"{row['ratio']:.2f}"
        rows.append([f"{row['images']}", f"{row['steps'] or 'gradient'}", *paces])
    return table(["images", "steps", "iterations a second", "bare double backward", "times the bare"], rows)


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


TABLES = {
    "augmix-attack": small,
    "augmix-mnist accuracy": accuracy,
    "augmix-mnist attacks": attacks,
    "invgrad": inverted,
    "invgrad speed": speed,
}
