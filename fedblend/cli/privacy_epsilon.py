"""``fedblend privacy epsilon``: print the epsilon of a file's runs before they are made."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedblend.analysis.privacy.noise_plan import least_noise, planned
from fedblend.cli.arguments import Change
from fedblend.cli.console import Console
from fedblend.cli.progress import steps_shown
from fedblend.core.errors import FedblendError
from fedblend.core.setup import Setup
from fedblend.experiment.make_setup import make_setup
from fedblend.report.guarantees import strength, weakest
from fedblend.runs import api

SCOPE = (
    "Epsilon is that of one whole run, all rounds made; runs on the same data (seeds, grids, repetitions) add up. "
    "Above 10 it protects nothing."
)


def show_epsilon(
    file: Path, changes: Sequence[Change] = (), target: float | None = None, over_flower: bool = False
) -> None:
    """Print the guarantees of each method of a file, the weakest over its seeds, and the least noise for ``target``."""
    if target is not None and not 0 < target < math.inf:
        raise FedblendError(f"--target: {target:g} is no epsilon to reach; valid: a number above 0, such as 3")
    by_label: dict[str, list[Setup]] = {}
    for name, experiment in api.expand_file(file, changes, None).experiments.items():
        by_label.setdefault(name.removesuffix(f"-seed{experiment.seed}"), []).append(make_setup(experiment))
    table = Table(box=None, pad_edge=False, collapse_padding=True, header_style="bold")
    for column in ("run", "payloads", "protected", "epsilon", "delta", "protection"):
        table.add_column(column, justify="right" if column in ("epsilon", "delta") else "left", overflow="fold")
    lines = []
    with steps_shown() as steps:
        for number, (label, setups) in enumerate(by_label.items()):
            steps("methods", number, len(by_label))
            over_seeds = [planned(setup, not over_flower) for setup in setups]
            for statements in zip(*over_seeds, strict=True):
                found = weakest(label, statements)
                word = "none" if found.epsilon is None else strength(found.epsilon)
                table.add_row(label, found.what, found.unit, found.short, f"{found.delta:g}", word)
                if found.reason:
                    lines.append(f"{label}, {found.what}: {found.reason}")
            if target is not None:
                lines.append(f"{label}: {_needed(setups, target, over_flower)}")
    console = Console()
    console.print(table)
    for line in [*lines, SCOPE]:
        console.print(line)


def _needed(setups: Sequence[Setup], target: float, over_flower: bool) -> str:
    """The noise that reaches ``target`` with every seed, or why none does."""
    try:
        needed = [least_noise(setup, target, not over_flower) for setup in setups]
    except FedblendError as error:
        return str(error)
    values, statement = max(needed, key=lambda one: [*one[0].values()])
    fields = ", ".join(f"{field} = {value:g}" for field, value in values.items())
    return f"epsilon {statement.epsilon:.4g} (of the {statement.what}) with {fields}"
