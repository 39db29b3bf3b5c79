"""What "Which blend, when?" recommends, on options made by hand."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
from script_helpers import script

from fedblend.analysis.advice import Option
from fedblend.runs.differences import Difference


def option(name: str, gain: float, half: float, megabytes: float = 1.0, seeds: int = 3, **more: Any) -> Option:
    """An option with this difference to FedAvg; where zero is outside, p is 0.013 for half of the gain."""
    scores = {seed: 0.5 + gain for seed in range(seeds)}
    fields = {"leaves": (), "to_clients": False, **more}
    difference = Difference((0, 1, 2), gain, half) if name != "fedavg" else None
    return Option(name, scores, megabytes, membership={}, recognised=math.nan, difference=difference, **fields)


def test_the_best_of_each_price_is_recommended_if_a_gain_is_certain(monkeypatch: pytest.MonkeyPatch) -> None:
    script("evidence/pages.py")
    blends = sys.modules["tables.blends"]
    means = {"leaves": ("means",)}
    few = [
        option("fedavg", 0, 0),
        option("server", 0.1, 0.001, 1.08, **means),
        option("server-worse", 0.09, 0.045, **means),
        option("clients", 0.2, 0.1, to_clients=True, **means),
        option("raw", 0.3, 0.15, leaves=("raw",), fault="raw may not leave a client"),
        option("free", 0.02, 0.01),
        option("loud", 0.01, 0.005, 3.0),
    ]
    options = {
        "few-1": [*few, option("diverges", 0.25, 0.125), option("tried-once", 0.25, 0.125)],
        "few-2": [*few, option("diverges", 0.25, 0.125, seeds=2)],
        "level": [option("fedavg", 0, 0), option("free", 0.02, 0.03)],
    }
    by_name = {setting: {one.method: one for one in found} for setting, found in options.items()}
    monkeypatch.setattr(blends, "_options", lambda: by_name)
    splits = {"few": {"few-1": "Fashion-MNIST", "few-2": "CIFAR10"}, "level": {"level": "HAR"}}
    monkeypatch.setattr(blends, "SPLITS", splits)

    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in blends.blend_table().splitlines()[2:]]

    sure, free, loud = "**+10.0 [+9.9,\u00a0+10.1]**\u00a0†", "**+2.0 [+1.0,\u00a0+3.0]**", "**+1.0 [+0.5,\u00a0+1.5]**"
    assert rows == [
        ["few", "`server`", sure, sure, "1.08", "means, to the server alone"],
        ["", "`free`", free, free, "1.00", "nothing"],
        ["", "`loud`", loud, loud, "3.00", "nothing"],
        ["level", "`fedavg`", "no gain is certain", "", "1.00", "nothing"],
    ]
