"""What XorMixFL's reproduction is read from: our runs, our measurements, and the paper's numbers."""

from __future__ import annotations

import ast
import json
import re
import statistics
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parent / "results"

NOT_YET = "Not run yet."
PAPERS = {"xormixfl, 1 dummy": "xormixfl", "mixfl, 1 dummy": "mixfl", "mixfl, equal parts": "mixfl"}
"""Which of the paper's methods one of ours is compared with, where it has another name."""


class Run(NamedTuple):
    """One run: its method, the settings that its label tells, its seed, and accuracies in per cent at the end."""

    method: str
    settings: dict[str, Any]
    seed: int
    accuracy: float
    of_label: list[float]

    def target(self, targets: Iterable[int]) -> float:
        """Mean accuracy of the target labels."""
        return statistics.mean(self.of_label[label] for label in targets)


def paper() -> dict[str, Any]:
    """The paper's numbers."""
    return tomllib.loads((HERE / "paper.toml").read_text())


def runs_of(name: str) -> list[Run]:
    """The runs of a study; none where it was not run yet."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    return [
        Run(*settings_of(run["method"]), run["seed"], 100 * run["accuracy"][-1], [100 * a for a in run["per_class"]])
        for run in json.loads(path.read_text())["runs"]
    ]


def rows_of(name: str) -> list[dict[str, Any]]:
    """What ``fedblend privacy xor`` measured; nothing where it was not run yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text())["rows"] if path.exists() else []


def settings_of(label: str) -> tuple[str, dict[str, Any]]:
    """A method's name and its settings, of a label such as ``xormixfl, 1 dummy targets=[0, 2]``."""
    found = re.findall(r" (\w+)=(\[[^]]*\]|\S+)", label)
    return re.split(r" \w+=", label)[0], {name: ast.literal_eval(value) for name, value in found}


def command(name: str) -> str:
    """How a study was run."""
    return f"`{json.loads((RESULTS / f'{name}.json').read_text())['command']}`"


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation; nothing of nothing."""
    if not values:
        return ""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else mean


def beside(values: Sequence[float], theirs: float | None, digits: int = 1) -> str:
    """Ours, and in brackets the paper's with the difference: ``93.1 ± 0.4 (94.4, -1.3)``."""
    if not values or theirs is None:
        return spread(values, digits)
    apart = statistics.mean(values) - theirs
    return f"{spread(values, digits)} ({theirs:.{digits}f}, {apart:+.{digits}f})"


def accuracy_of(run: Run) -> float:
    """Test accuracy."""
    return run.accuracy


def target_of(run: Run) -> float:
    """Mean accuracy of the run's own target labels."""
    return run.target(run.settings["targets"])
