"""What ``fedblend attack`` does: it makes the attack, prints the measures, and writes the images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedblend.analysis.attacks.outcome import DEFINITIONS, PICTURE, TABLE, Attacked, Labels, attack_run, make_folder
from fedblend.analysis.attacks.setup import Attacker
from fedblend.cli.interrupts import interrupted_once
from fedblend.cli.progress import Steps, steps_shown
from fedblend.core.errors import Stopped
from fedblend.runs.runner import one_thread

ROWS = 16
"""Images in the terminal's table; the file has all."""

TOLD_EVERY = 10
"""Iterations from one cost that is told to the next: reading it waits for the device."""

SUPPOSES = {
    "guesses": "knows the objective and guesses its random numbers",
    "plain": "takes the loss for plain cross-entropy",
    "knows": "knows the objective and all of its random numbers (a control)",
}


class Costs:
    """Tells of an attack's iterations, with the least cost that was told so far."""

    def __init__(self, steps: Steps, attack: str, total: int) -> None:
        self.steps, self.attack, self.total = steps, attack, total
        self.least = math.inf

    def __call__(self, restart: int, number: int, cost: torch.Tensor) -> None:
        """One iteration was made."""
        if number % TOLD_EVERY and number != self.total:
            return
        now = float(cost)
        self.least = min(self.least, now)  # NaN is not less
        what = self.attack if restart == 0 else f"{self.attack}, start {restart + 1}"
        self.steps(what, number, self.total, f"cost {now:.4g}, least {self.least:.4g}")


def show_attack(
    run: Path,
    where: tuple[int, int],
    attack: str,
    settings: tuple[int | None, int | None, str, str],
    options: Mapping[str, Any],
    out: Path | None,
) -> None:
    """Attack the client ``where`` = (round, client), print the measures, write images and numbers into a folder."""
    if out is not None:
        make_folder(out)  # before anything that takes long
    with interrupted_once():
        made = _attack(run, where, attack, settings, options)
        folder = made.write(out)
    console = Console()
    _print(console, made)
    console.print(f"Images and numbers: {folder / PICTURE}, {folder / TABLE}", highlight=False, soft_wrap=True)
    if made.rebuilt.stopped:
        raise Stopped(f"stopped after {len(made.rebuilt.curve) - 1} iterations; the best images so far are kept")


def _attack(
    run: Path,
    where: tuple[int, int],
    attack: str,
    settings: tuple[int | None, int | None, str, str],
    options: Mapping[str, Any],
) -> Attacked:
    """Make the attack, and show how far it is. Raises :class:`Stopped` where it is interrupted before it has begun."""
    images, steps, attacker, labels = settings
    with steps_shown() as shown, one_thread():
        try:
            return attack_run(
                run,
                *where,
                attack,
                images=images,
                steps=steps,
                attacker=cast(Attacker, attacker),
                labels=cast(Labels, labels),
                watch=lambda done, total: shown("rounds", done, total),
                progress=Costs(shown, attack, options.get("iterations", 0) or _iterations(attack)),
                **options,
            )
        except KeyboardInterrupt:
            raise Stopped("stopped before the attack had begun; nothing was written") from None


def _iterations(attack: str) -> int:
    """An attack's usual number of iterations; an unknown attack is refused elsewhere."""
    from fedblend.analysis.attacks.inversion import ATTACKS

    return ATTACKS[attack]().iterations if attack in ATTACKS else 0


def _print(console: Console, made: Attacked) -> None:
    """The measures of each image and their means, and what was attacked."""
    scene, table = made.scene, made.table()
    classes = scene.moment.setup.data.classes
    shown = Table(box=SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for heading in ("image", "MSE", "PSNR dB", "SSIM"):
        shown.add_column(heading, justify="left" if heading == "image" else "right")
    for row in table["each"][:ROWS]:
        shown.add_row(Text(str(classes[row["label"]])), *_words(row))
    shown.add_section()
    shown.add_row("mean", *_words(table))
    console.print(shown)
    drawn = "" if scene.drawn else "; the run did not draw it for this round: it is what it would have sent"
    for line in (
        f"{made.title()}, of {table['method']} on {table['data']}{drawn}",
        f"the attacker {SUPPOSES[scene.attacker]}; labels: {made.labels}; cost {made.rebuilt.cost:.4g} after "
        f"{table['iterations']} iterations",
        DEFINITIONS,
    ):
        console.print(Text(line), style="dim", soft_wrap=True)


def _words(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """MSE, PSNR and SSIM; an image rebuilt to the last bit has no PSNR."""
    psnr = "∞" if row["psnr"] is None else f"{row['psnr']:.2f}"
    return f"{row['mse']:.4f}", psnr, f"{row['ssim']:.4f}"
