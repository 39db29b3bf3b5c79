"""The tables of studies, on results made by hand: XorMixFL's, and what "Which blend, when?" recommends."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from script_helpers import script

from fedblend.analysis.advice import Option
from fedblend.runs.differences import Difference

pytestmark = pytest.mark.slow


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """evidence/pages.py, which reads results from an empty folder and draws figures into it."""
    module = script("evidence/pages.py")
    monkeypatch.setattr(sys.modules["tables.common"], "RESULTS", tmp_path)
    monkeypatch.setattr(sys.modules["tables.common"], "FIGURES", tmp_path)
    (tmp_path / "studies").mkdir()
    return module


def write(folder: Path, name: str, runs: list[tuple[str, int, float, dict[int, float]]]) -> None:
    rows = [
        {"method": m, "seed": s, "accuracy": [0.1, a], "per_class": [of.get(k, 0.9) for k in range(10)]}
        for m, s, a, of in runs
    ]
    (folder / "studies" / f"{name}.json").write_text(json.dumps({"command": "fedblend run it", "runs": rows}))


def row_of(page: str, first: str) -> list[str]:
    """The cells of the row that begins so."""
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {first} |")]
    return [cell.strip() for cell in line.strip("|").split("|")[1:]]


def test_table_2_and_figure_3_by_hand(pages: ModuleType, tmp_path: Path) -> None:
    runs = [
        ("xormixfl targets=[0]", 0, 0.93, {0: 0.5}),
        ("xormixfl targets=[0]", 1, 0.95, {0: 0.7}),
        ("xormixfl targets=[1]", 0, 0.90, {1: 0.1}),
        ("xormixfl targets=[1]", 1, 0.90, {1: 0.3}),
        ("xormixfl targets=[0, 2]", 0, 0.80, {0: 0.2, 2: 0.4}),
        ("xormixfl, 1 dummy targets=[0]", 0, 0.96, {0: 0.8}),
        ("standalone targets=[0]", 0, 0.85, {0: 0.2}),
        ("standalone targets=[1]", 0, 0.95, {1: 0.2}),
    ]
    write(tmp_path, "xormixfl-mnist", runs)

    # Means over targets by seed: 91.5 and 92.5; the paper's over its ten targets is 94.26.
    assert row_of(pages.xor_table_2(), "1")[0] == "92.0 ± 0.7 (94.3)"
    claims = sys.modules["tables.xormixfl"].xor_target_claims(["xormixfl-mnist"])
    above = row_of(claims, "XorMixFL above standalone, points: mean (least to most)")
    assert above == ["+4.7 (+2.9 to +7.2)", "+2.0 (-5.0 to +9.0)"]
    assert row_of(claims, "the largest gain over standalone, relative %") == ["8.1", "10.6"]
    assert row_of(claims, "the same as a multiple of standalone's") == ["1.87", "2.00"]
    pages.draw_xor_figure_3()
    assert (tmp_path / "xormixfl-figure-3.svg").read_text().startswith("<svg")


def test_the_offset_by_hand(pages: ModuleType, tmp_path: Path) -> None:
    levels = [(f"xormixfl targets=[{t}] offset={o}", 0, 0.9 - o / 1000, {t: 0.5}) for t in (0, 4) for o in (0, 100)]
    write(tmp_path, "xormixfl-offset", levels)
    (tmp_path / "studies" / "xormixfl-offset-leaks.json").write_text(json.dumps({"command": "", "rows": []}))
    assert row_of(pages.xor_offset(), "100")[:3] == ["80.0", "50.0", ""]
    shares = {"clear": 0.25, "clear_ink": 0.5, "bits": 0.75, "blind": 0.5, "sent_recognised": 1, "made_recognised": 0}
    rows = [{"method": "xormixfl targets=[0] offset=100", "p": 1, **shares}]
    (tmp_path / "studies" / "xormixfl-offset-leaks.json").write_text(json.dumps({"command": "", "rows": rows}))
    assert row_of(pages.xor_offset(), "100")[2:] == ["25.0", "50.0", "75.0", "50.0", "100.0", "0.0"]
    assert row_of(pages.xor_offset(), "0")[2:] == [""] * 6


def test_what_leaks_and_the_warm_start_by_hand(pages: ModuleType, tmp_path: Path) -> None:
    shares = {"clear": 0.25, "clear_ink": 0.5, "bits": 0.75, "blind": 0.5, "sent_recognised": 1, "made_recognised": 0}
    nothing = dict.fromkeys(("clear", "clear_ink", "bits", "blind"))
    rows = [{"method": "xormixfl dummies=[3]", "p": p, **shares} for p in range(1, 6)]
    rows += [{"method": "mixfl dummies=[3]", "p": p, **shares, **nothing} for p in range(1, 6)]
    (tmp_path / "studies" / "xormixfl-distance.json").write_text(json.dumps({"command": "it", "rows": rows}))
    assert row_of(pages.xor_leaks(), "xormixfl | 2")[1:] == ["25", "50", "75", "50", "100", "0"]
    assert row_of(pages.xor_leaks(), "mixfl | 5")[1:] == ["", "", "", "", "100", "0"]
    rows = [{"method": f"xormixfl targets=[{t}] offset=15", "p": 1, **shares, "clear": 0.1 * t} for t in (1, 3)]
    (tmp_path / "studies" / "xormixfl-offset-leaks.json").write_text(json.dumps({"command": "it", "rows": rows}))
    assert row_of(pages.xor_offset_leaks(), "15")[0] == "20.0"

    run = {"method": "fedavg", "seed": 0, "rounds": [0, 1, 5], "accuracy": [0.1, 0.55, 0.9]}
    costs = {"costs": {"bytes_up": 1_000_000, "bytes_down": 500_000}}
    (tmp_path / "studies" / "warm-start.json").write_text(json.dumps({"command": "it", "runs": [{**run, **costs}]}))
    assert row_of(pages.warm_start(), "fedavg")[1:] == ["10.0", "55.0", "", "90.0", "", "1.5"]


def test_the_claims_of_table_3_by_hand(pages: ModuleType, tmp_path: Path) -> None:
    rows = [
        {
            "method": f"{method} dummies={d}",
            "p": p,
            "mds": [base + 10 * p + len(d), 1.0],
            "distance": [base - 10 * p - len(d), 2.0],
        }
        for method, base in (("xormixfl", 2000), ("mixfl", 1500), ("mixfl, equal parts", 1950))
        for d in ([3], [3, 4], [3, 4, 5])
        for p in range(1, 6)
    ]
    (tmp_path / "studies" / "xormixfl-distance.json").write_text(json.dumps({"command": "it", "rows": rows}))

    claims = pages.xor_distance_claims()
    assert row_of(claims, "XorMixFL's lowest, MixFL's highest: is the first above?") == [
        "2117 and 2096: yes",
        "2011 and 2003: yes",
        "1947 and 1939: yes",
    ]
    assert row_of(claims, "XorMixFL, from p = 1 to 5")[1:] == ["+40, rising in 3 of 3", "-40, rising in 0 of 3"]
    assert row_of(claims, "MixFL, from M = 1 to 3")[1] == "+2, rising in 5 of 5"


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
