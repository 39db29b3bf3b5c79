"""``fedblend attack``: run an attack on a client, print the measures, write the images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedblend.analysis.attacks.inversion import ATTACKS
from fedblend.analysis.attacks.outcome import DEFINITIONS, PICTURE, TABLE, AttackResult, attack_run, make_folder
from fedblend.cli.console import Console, table
from fedblend.cli.interrupts import interrupted_once
from fedblend.cli.progress import Steps, steps_shown
from fedblend.core.errors import Stopped
from fedblend.runs.runner import one_thread

ROWS = 16  # Largest number of images in the terminal's table; the file has all
COST_EVERY = 10  # Iterations between two readings of the cost: each reading waits for the device

ATTACKERS = {
    "guesses": "has the objective, and draws its random numbers itself",
    "plain": "assumes plain cross-entropy as the loss",
    "knows": "has the objective and all of its random numbers (a control)",
}


class CostProgress:
    """Shows an attack's iterations with the current cost and the least cost so far."""

    def __init__(self, steps: Steps, attack: str, total: int) -> None:
        self.steps, self.attack, self.total = steps, attack, total
        self.least = math.inf

    def __call__(self, restart: int, number: int, cost: torch.Tensor) -> None:
        if number % COST_EVERY and number != self.total:
            return
        now = float(cost)
        self.least = min(self.least, now)  # NaN is not less
        what = self.attack if restart == 0 else f"{self.attack}, start {restart + 1}"
        self.steps(what, number, self.total, f"cost {now:.4g}, least {self.least:.4g}")


def show_attack(run: Path, round: int, client: int, attack: str, out: Path | None = None, **options: Any) -> None:
    """Attack a client, print the measures, write images and numbers; ``options`` are those of :func:`.attack_run`."""
    if out is not None:
        make_folder(out)  # an unusable folder is refused before the attack
    with interrupted_once():
        result = _attack(run, round, client, attack, options)
        folder = result.write(out)
    console = Console()
    _print(console, result)
    console.tell(f"Images and numbers: {folder / PICTURE}, {folder / TABLE}")
    if result.rebuilt.stopped:
        raise Stopped(f"stopped after {len(result.rebuilt.curve) - 1} iterations; the best images so far are kept")


def _attack(run: Path, round: int, client: int, attack: str, options: Mapping[str, Any]) -> AttackResult:
    usual = ATTACKS[attack]().iterations if attack in ATTACKS else 0  # `attack_run` refuses an unknown attack
    with steps_shown() as display, one_thread():
        try:
            return attack_run(
                run,
                round,
                client,
                attack,
                watch=lambda done, total: display("rounds", done, total),
                progress=CostProgress(display, attack, options.get("iterations", usual)),
                **options,
            )
        except KeyboardInterrupt:
            raise Stopped("stopped before the attack began; nothing was written") from None


def _print(console: Console, result: AttackResult) -> None:
    attack_setup, found = result.attack_setup, result.table()
    classes = attack_setup.snapshot.setup.data.classes
    measures = table(["image"], ["MSE", "PSNR dB", "SSIM"], ruled=True)
    for row in found["each"][:ROWS]:
        measures.add_row(str(classes[row["label"]]), *_measures(row))
    measures.add_section()
    measures.add_row("mean", *_measures(found))
    console.print(measures)
    simulated = "; the client was not in the run's cohort of this round, so its update is simulated"
    drawn = "" if attack_setup.drawn else simulated
    for line in (
        f"{result.title()}, of {found['method']} on {found['data']}{drawn}",
        f"the attacker {ATTACKERS[attack_setup.attacker]}; labels: {result.labels}; cost "
        f"{result.rebuilt.cost:.4g} after {found['iterations']} iterations",
        DEFINITIONS,
    ):
        console.tell(line, style="dim")


def _measures(row: Mapping[str, Any]) -> tuple[str, str, str]:
    psnr = "∞" if row["psnr"] is None else f"{row['psnr']:.2f}"
    return f"{row['mse']:.4f}", psnr, f"{row['ssim']:.4f}"
