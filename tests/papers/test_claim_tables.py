"""Rules of the pages' tables that no committed result shows, on results made by hand."""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from reproduce_helpers import result_of
from script_helpers import script

from fedblend.analysis.advice import Option
from fedblend.papers.items import all_papers
from fedblend.papers.result import paper_numbers
from fedblend.runs.differences import Difference

pytestmark = pytest.mark.slow

TABLE_2 = {("xormixfl", "2,4"): [90.0, 91.0], ("standalone", "2,4"): [80.0, 82.0]}
"""XorMixFL's Table 2 in one column: differences 10 and 9, mean 9.5, half 12.706 * 0.707 / sqrt(2) = 6.35."""


@pytest.fixture
def pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """evidence/pages.py, which reads the results of items from an empty folder."""
    module = script("evidence/pages.py")
    monkeypatch.setattr(sys.modules["tables.items"], "RESULTS", tmp_path)
    return module


def write(folder: Path, name: str, ours: dict[tuple[str, str], list[float]], **changes: Any) -> None:
    """Write a result with these numbers, one a seed, and verdicts on means by which all claims hold."""
    paper, _, item = name.partition("/")
    whole = all_papers()[paper].items[item]
    result = result_of(ours, "accuracy") | {"item": name, "scale": "laptop", "smaller": ["rounds: 1, not 2"]} | changes
    numbers = paper_numbers(whole, "accuracy")
    for cell in result["quantities"]["accuracy"]["cells"]:
        cell["paper"] = numbers.get((cell["row"], cell["column"]))
    result["claims"] = [
        {
            "says": claim.says,
            "choice": claim.choice,
            "holds": claim.holds,
            "of": "accuracy",
            "verdict": "holds",
            "places": {place: [True, 1.0] for place in claim.where or result["columns"]},
        }
        for claim in whole.claims
        # "Up to" is judged where all columns have numbers, which is nowhere here.
        if claim.of in (None, "accuracy") and not claim.up_to
    ]
    (folder / paper).mkdir(exist_ok=True)
    (folder / paper / f"{item}-{result['scale']}.json").write_text(json.dumps(result))


def rows_with(page: str, words: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if words in line]


@pytest.mark.parametrize("seeds", [1, 3])
def test_a_main_claim_has_the_verdict_of_the_corrected_result_with_most_seeds(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: int
) -> None:
    summary = sys.modules["tables.summary"]
    main = {"xormixfl": (("table-2", "XorMixFL above standalone learning", "above a device alone"),)}
    monkeypatch.setattr(summary, "MAIN_CLAIMS", main)
    outdated = {"outdated": ["a network that was not the paper's"]} if seeds > 1 else {}
    ours = {("xormixfl", "2,4"): [70.0] * seeds, ("standalone", "2,4"): [80.0] * seeds}
    write(tmp_path, "xormixfl/table-2", ours, scale="paper", **outdated)
    write(tmp_path, "xormixfl/table-2", TABLE_2)

    (row,) = rows_with(pages.main_claims("xormixfl"), "above a device alone")

    assert row[1:] == [
        "holds †" if seeds == 1 else "holds",  # certain alone, not beside another claim
        "+9.5 points (+3.15 to +15.9, 2 seeds)",
        "+5.42",
        "smaller",
        "[table-2](reproductions/xormixfl.md#table-2-laptop)",
    ]


def test_every_claim_of_the_first_version_has_one_of_today() -> None:
    """A claim whose words change must be renamed in the list too, or it would count as left out."""
    script("evidence/pages.py")
    found = sys.modules["tables.claims"].claims_of_0_1()
    assert len(found) == 130
    assert Counter(old["verdict"] for old, _ in found)["holds"] == 51
    assert [old["says"] for old, new in found if new is None] == []


def test_every_result_that_is_shown_has_a_heading_that_its_links_name() -> None:
    pages = script("evidence/pages.py")
    for paper in all_papers():
        page = pages.item_pages(paper)
        anchors = re.findall(r"^## (.+)$", page, re.MULTILINE)
        assert len(set(anchors)) == len(anchors)
        links = re.findall(rf"\]\(reproductions/{paper}.md#(.+?)\)", pages.main_claims(paper))
        links += re.findall(r"\]\(#(.+?)\)", pages.overview(paper))
        assert {link.replace(", ", "-") for link in anchors} >= set(links)


def test_the_map_has_the_newest_runs_of_each_method_and_its_own_fedavg(pages: ModuleType) -> None:
    tables = sys.modules["tables.comparisons"]
    map_, checked, rest = ({s: options(r) for s, r in tables.committed(kind, tables.MAP).items()} for kind in KINDS)
    for setting, result in tables.of_map("map").items():
        for name, option in options(result).items():
            newest = next(kind[setting] for kind in (rest, checked, map_) if name in kind.get(setting, {}))
            assert option == (map_[setting]["fedavg"] if name == "fedavg" else newest[name])
    assert len(checked) >= 4
    assert len(rest) >= 2


KINDS = ("map", "checked", "rest")
"""The studies of the map, the newest last."""


def options(result: Any) -> dict[str, Any]:
    return {option["method"]: option for option in result["advice"]["options"]}


def test_committed_advice_has_the_verdicts_and_the_answer_of_todays_rule(pages: ModuleType) -> None:
    tables = sys.modules["tables.comparisons"]
    found = [json.loads(path.read_text()).get("advice") for path in sorted(tables.RESULTS.glob("studies/*.json"))]
    advised = [advice for advice in found if advice]
    assert len(advised) >= 28
    for advice in advised:
        assert json.loads(json.dumps(tables.advice_of(advice).table())) == advice
    assert tables._cell({"difference": None, "verdict": "failed with a seed"}) == "diverged with all seeds but one"
    assert tables._cell({"difference": None, "verdict": "one seed"}) == "one seed"


def test_the_best_rate_is_that_of_all_seeds_and_a_failed_one_does_not_count(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = sys.modules["tables.comparisons"]
    by_rate = {"0.01": [0.5, 0.52], "0.1": [0.6, 0.58], "0.2": [0.9]}
    runs = [
        {"method": f"fedavg lr={rate}", "seed": seed, "accuracy": [0.1, score, score, score]}
        for rate, scores in by_rate.items()
        for seed, score in enumerate(scores)
    ]
    options = [{"method": name, "scores": {"0": 0.63, "1": 0.62}} for name in tables.HINDSIGHT]
    monkeypatch.setattr(tables, "committed", lambda kind, _: {"heart": {"runs": runs}} if kind == "rates" else {})
    monkeypatch.setattr(tables, "of_map", lambda _: {"heart": {"advice": {"options": options}}})

    (row,) = rows_with(tables.rate_table(), "heart disease")

    # Differences 3 and 4 points: mean 3.5, half 12.706 * 0.707 / sqrt(2) = 6.35.
    assert row[1:3] == ["0.1", "59.0"]
    assert row[3:] == ["+3.5 [-2.9,\u00a0+9.9]"] * 2


ALONE_WITH_TEN = {("standalone-10", "authors"): [89.0, 89.0, 89.0]}


@pytest.fixture
def screen(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """evidence/tables/screen.py with XorMixFL's headline alone."""
    module = sys.modules["tables.screen"]
    monkeypatch.setattr(module, "HEADLINES", tuple(one for one in module.HEADLINES if one.paper == "xormixfl"))
    return module


def test_a_headline_of_one_seed_has_no_interval(screen: ModuleType, tmp_path: Path) -> None:
    ours = {("xormixfl", "authors"): [94.0], ("standalone", "authors"): [90.0], ("standalone-10", "authors"): [100.0]}
    write(tmp_path, "xormixfl/choice-network", ours, smaller=[])

    says = "is not clearly more accurate than a device alone: +4, verdict *one seed: for*"
    ten = "With ten target samples for that device, as in the paper's text: *one seed: against*."
    assert screen.headline_sentences() == f"- [XorMixFL](results/xormixfl.md) {says}. {ten}"
    assert says.replace("*", "") in screen.forest_figure()


def test_figures_are_drawn_with_and_without_an_interval(
    screen: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["tables.common"], "FIGURES", tmp_path)
    for seeds in (1, 2):
        ours = {("xormixfl", "authors"): [94.0] * seeds, ("standalone", "authors"): [90.0] * seeds} | ALONE_WITH_TEN
        write(tmp_path, "xormixfl/choice-network", ours)
        screen.draw_verdicts()
        screen.draw_headlines()
    drawn = [(tmp_path / f"{name}.svg").read_text() for name in ("verdicts", "headlines")]
    assert all(text.startswith("<svg") and "prefers-color-scheme: dark" in text for text in drawn)


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
