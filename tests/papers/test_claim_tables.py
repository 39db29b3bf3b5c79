"""The tables of claims, choices and deciding runs, on results made by hand."""

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
from helpers import each
from script_helpers import script

from fedblend.papers.items import all_papers
from fedblend.papers.result import paper_numbers
from fedblend.papers.verdicts import ClaimVerdict, LineVerdict

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
    """Write a result with these numbers, one a seed, and the verdicts on means that the first claims have."""
    paper, _, item = name.partition("/")
    claims = all_papers()[paper].items[item].claims
    whole = all_papers()[paper].items[item]
    numbers = paper_numbers(whole, "accuracy") if "accuracy" in whole.quantities else {}
    cells = [
        {"row": row, "column": column, "ours": dict(enumerate(values)), "paper": numbers.get((row, column))}
        for (row, column), values in ours.items()
    ]
    result = {
        "item": name,
        "scale": "laptop",
        "smaller": ["rounds: 1, not 2"],
        "other_data": [],
        "facts": {"data": {"mnist": {}}},
        "seeds": list(range(max(map(len, ours.values()), default=0))),
        "rows": {row: row for row, _ in ours},
        "columns": {column: column for _, column in ours},
        "quantities": {"accuracy": {"cells": cells}},
        "claims": [
            {
                "says": claim.says,
                "choice": claim.choice,
                "holds": claim.holds,
                "of": "accuracy",
                "verdict": "holds",
                # "Up to" is judged where all columns have numbers, which is nowhere here.
                "places": {place: [True, 1.0] for place in claim.where or dict.fromkeys(column for _, column in ours)}
                if not claim.up_to
                else {},
            }
            for claim in claims
            if claim.of in (None, "accuracy")
        ],
        **changes,
    }
    (folder / paper).mkdir(exist_ok=True)
    (folder / paper / f"{item}-{result['scale']}.json").write_text(json.dumps(result))


def claims_of(paper: str) -> str:
    """The tables of claims on a paper's page, choices left out."""
    tables = sys.modules["tables.item_pages"]
    judged = sys.modules["tables.claims"].judged_claims()
    mine = [one for one in judged if one.result["item"].startswith(f"{paper}/") and not one.claim.get("choice")]
    return str(tables.claim_table(mine))


def rows_with(page: str, words: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if words in line]


def test_a_choice_has_its_margin_interval_and_verdict(pages: ModuleType, tmp_path: Path) -> None:
    ours = {
        ("xormixfl", "authors"): [93.0, 94.0, 95.0],
        ("standalone", "authors"): [88.0, 90.0, 89.0],
        ("standalone-10", "authors"): [92.0, 95.0, 92.0],
    }
    write(tmp_path, "xormixfl/choice-network", ours)

    sensitivity = sys.modules["tables.claims"].sensitivity

    (two,) = rows_with(sensitivity("xormixfl"), "the authors' network, [0, 1]; n = 2")
    # Differences 5, 4 and 6: deviation 1, half 4.303 / sqrt(3) = 2.48.
    assert two[3:] == ["", "holds † (+5, +2.52 to +7.48, 3 seeds)"]
    # Differences 1, -1 and 3: mean 1, deviation 2, half 4.303 * 2 / sqrt(3) = 4.97.
    (ten,) = rows_with(sensitivity("xormixfl"), "the authors' network, [0, 1]; n = 10")
    assert ten[3:] == ["", "within noise (+1, -3.97 to +5.97, 3 seeds)"]
    assert rows_with(sensitivity("mix2fld"), "T_max = 104 ms")[0][3:] == ["", "not run"]


def test_a_claim_stands_beside_the_papers_margin(pages: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "xormixfl/table-2", TABLE_2)

    (row,) = rows_with(claims_of("xormixfl"), "XorMixFL above standalone learning (section 4.1)")

    # The paper: 92.61 and 87.19.
    assert row[1:] == ["+5.42", "+9.5, +3.15 to +15.9", "holds †"]


def test_a_claim_that_a_partial_result_lacks_stands_once_where_no_other_result_has_it(
    pages: ModuleType, tmp_path: Path
) -> None:
    first, second, *_ = (claim.says for claim in all_papers()["xormixfl"].items["table-2"].claims)
    claim = {"of": "accuracy", "holds": "xormixfl > standalone", "verdict": "holds", "places": {"2,4": [True, 1.0]}}
    lacking = {"places": {}, "verdict": "not measured"}
    claims = [claim | {"says": first}, claim | {"says": second} | lacking]
    write(tmp_path, "xormixfl/table-2", TABLE_2, scale="paper", claims=claims)
    write(tmp_path, "xormixfl/table-2", TABLE_2, claims=[claim | {"says": one} | lacking for one in (first, second)])

    judged = sys.modules["tables.claims"].judged_claims()

    assert [(one.result["scale"], one.claim["says"]) for one in judged] == [("paper", first), ("paper", second)]


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


@each(
    ("margins", "text"),
    [
        ((math.inf, -math.inf, 3.0), "either never"),
        ((math.inf, math.inf), "the other never"),
        ((math.inf, 3.0, 2.0), "the other never in 1 of 3"),
        ((-math.inf,), "never reached"),
        ((-math.inf, 3.0), "never reached in 1 of 2"),
        ((2.0, 3.0), "+2.5"),
        ((1.0, -1.0), "0"),
    ],
)
def test_a_margin_tells_in_how_many_seeds_a_target_was_never_reached(
    pages: ModuleType, margins: tuple[float, ...], text: str
) -> None:
    assert sys.modules["tables.claims"].our_margin(ClaimVerdict({"x": LineVerdict(margins)}))[0] == text


def test_claims_are_counted_by_paper(pages: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "xormixfl/table-2", TABLE_2)
    write(tmp_path, "fedmix/table-16", {})

    head, _, *rows = rows_with(pages.counts_by_paper(), "|")

    small = [row for row in rows if row[0] == "smaller"]
    assert [row[1:] for row in rows[: len(small)]] == [[row[1], *("0" for _ in head[2:])] for row in small]  # first
    counts = {row[1].partition("]")[0].strip("["): dict(zip(head[2:], row[2:], strict=True)) for row in small}
    table_2 = [claim for claim in all_papers()["xormixfl"].items["table-2"].claims if claim.of is None]
    assert counts["XorMixFL"]["holds"] == "1"
    assert counts["XorMixFL"]["claims"] == str(len(table_2))
    assert counts["FedMix"] == {word: "1" if word in ("not judged", "claims") else "0" for word in head[2:]}
    assert counts["all"]["claims"] == str(len(table_2) + 1)


def test_claims_of_the_first_version_stand_beside_todays(pages: ModuleType, tmp_path: Path) -> None:
    # Differences 1 and 9 for one claim: a mean of 5, and an interval of 51 to each side.
    write(tmp_path, "xormixfl/table-2", {("xormixfl", "2,4"): [81.0, 91.0], ("standalone", "2,4"): [80.0, 82.0]})

    (in_part,) = rows_with(pages.before_and_after(), "within noise")
    changed = rows_with(pages.changed_since_0_1(), "holds in part → within noise")

    assert in_part[0] == "holds in part"
    assert "1 within noise" in in_part[2].split("; ")
    assert changed[0][0].startswith("the authors' network, and for standalone learning the target samples nearest")
    assert changed[0][2:] == ["1", "XorMixFL [table-2](reproductions/xormixfl.md#table-2)"]


def test_every_claim_of_the_first_version_has_one_of_today() -> None:
    """A claim whose words change must be renamed in the list too, or it would count as left out."""
    script("evidence/pages.py")
    found = sys.modules["tables.claims"].claims_of_0_1()
    assert len(found) == 130
    assert Counter(old["verdict"] for old, _ in found)["holds"] == 51
    assert [old["says"] for old, new in found if new is None] == []


def test_runs_are_counted_once_by_experiment_and_seed(
    pages: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods of FedMix's Table 1 on CIFAR10 are in Table 4 too, with the same settings."""
    for item, column in (("table-1", "cifar10"), ("table-4", "1.0")):
        write(tmp_path, f"fedmix/{item}", {("fedavg", column): [1.0, 2.0]}, minutes=30.0)
    curves = [{"row": "fedavg", "column": "cifar10", "seed": seed, "seconds": 5400.0} for seed in (0, 1)]
    path = tmp_path / "fedmix" / "table-1-laptop.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"curves": curves}))
    (tmp_path / "studies").mkdir()
    run = {"method": "fedavg", "costs": {"seconds": 1800.0}}
    (tmp_path / "studies" / "a.json").write_text(json.dumps({"runs": [run | {"seed": seed} for seed in range(3)]}))
    monkeypatch.setattr(sys.modules["tables.summary"], "RESULTS", tmp_path)

    rows = rows_with(pages.runs_made(), "|")[2:]

    # Table 1's curves name three hours of computing, more than its half hour; Table 4 has half an hour of its own.
    assert rows == [
        ["FedMix", "laptop scale", "2", "2", "3.5"],
        ["our own", "studies", "3", "3", "1.5"],
        ["all", "", "5", "", "5"],
    ]


@pytest.mark.parametrize(
    ("standalone", "certain"),
    [
        ([89.0, 89.5, 90.0], 0),  # both claims have p-values of 0.035: one alone would be certain, of two it is not
        (
            [87.0, 88.1, 88.9],
            2,
        ),  # 4e-4 for one claim, beside the nearer baseline; then the other need only be below 0.05
    ],
)
def test_a_dagger_marks_what_is_certain_among_all_claims(
    pages: ModuleType, tmp_path: Path, standalone: list[float], certain: int
) -> None:
    ours = {"xormixfl": [90.0, 91.0, 92.0], "standalone": standalone, "standalone-10": [89.0, 89.5, 90.0]}
    write(tmp_path, "xormixfl/table-2", {(row, "2,4"): values for row, values in ours.items()})

    found = {row[0]: row[-1] for row in rows_with(claims_of("xormixfl"), "|")}
    holds, fails = rows_with(pages.certain_claims(), "|")[2:]

    word = "holds †" if certain else "holds"
    both = "XorMixFL above standalone learning (section 4.1)", "The same, with n = 10 for both"
    assert [found[says] for says in both] == [word, word]
    which = "[table-2](reproductions/xormixfl.md#table-2)" if certain else ""
    assert holds == ["holds", "2", str(certain), which]
    assert fails == ["does not hold", "0", "0", ""]


@pytest.mark.parametrize(
    ("without", "word"), [("never", "one seed: for"), (1.0, "one seed: both ways"), (5.0, "one seed: for")]
)
def test_one_seed_points_where_it_decided(pages: ModuleType, tmp_path: Path, without: object, word: str) -> None:
    # Of two networks the first needs 3 rounds with points and 4 without. The second is undecided if neither reaches it.
    rounds = {("fedavg", "cnn"): 4.0, ("enhanced", "cnn"): 3.0}
    rounds |= {("fedavg", "vgg16"): without, ("enhanced", "vgg16"): "never" if without == "never" else 2.0}
    write(tmp_path, "aggenhance/figure-7", {key: [value] for key, value in rounds.items()})
    path = tmp_path / "aggenhance" / "figure-7-laptop.json"
    result = json.loads(path.read_text())
    result["quantities"]["rounds"] = result["quantities"].pop("accuracy")
    for claim in result["claims"]:
        claim |= {"of": "rounds", "verdict": "holds in part"}
    path.write_text(json.dumps(result))

    (row,) = rows_with(claims_of("aggenhance"), "The enhanced needs fewer rounds with every network")

    assert row[-1] == word


def test_the_page_of_a_paper_has_the_claims_of_its_items_and_sends_for_those_of_choices() -> None:
    pages = script("evidence/pages.py")
    for paper in all_papers():
        for page in pages.item_pages(paper).split("\n## "):
            is_choice = page.removeprefix("## ").startswith("choice-")
            assert ("](results/choices.md#" in page) == is_choice
            assert not (is_choice and "| claim |" in page)


def test_the_second_result_of_an_item_has_its_scale_in_its_heading(pages: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "xormixfl/table-2", {("xormixfl", "2,4"): [90.0]})
    (first,) = sys.modules["tables.items"].item_results()
    assert sys.modules["tables.items"].link(first) == "[table-2](reproductions/xormixfl.md#table-2)"

    (tmp_path / "xormixfl" / "table-2-paper.json").write_text(json.dumps(first | {"scale": "paper"}))

    links = [
        sys.modules["tables.items"].link(result, here=True) for result in sys.modules["tables.items"].item_results()
    ]
    assert links == ["[table-2](#table-2)", "[table-2](#table-2-laptop)"]


def test_each_claim_has_a_table_of_its_choices(pages: ModuleType, tmp_path: Path) -> None:
    ours = {("fl", "0.104"): [75.0, 76.0], ("mix2fld", "0.104"): [85.0, 86.5]}
    write(tmp_path, "mix2fld/choice-t-max", ours)
    path = tmp_path / "mix2fld" / "choice-t-max-laptop.json"
    result = json.loads(path.read_text())
    for claim in result["claims"]:
        claim["verdict"] = "holds" if "104" in claim["choice"] else "not measured"
    path.write_text(json.dumps(result))

    rows = rows_with(pages.TABLES["choices: mix2fld"](), "T_max = ")

    assert len(rows) == 8  # two claims, four choices each
    assert [bool(row[0]) for row in rows] == [True, *[False] * 3] * 2
    asymmetric = {row[1]: row[2:] for row in rows[:4]}
    # Differences 10 and 10.5: mean 10.25, half 12.706 * 0.354 / sqrt(2) = 3.18.
    assert asymmetric["T_max = 104 ms"][0].startswith("ours: ")
    assert asymmetric["T_max = 104 ms"][1:] == ["", "holds † (+10.2, +7.07 to +13.4, 2 seeds)"]
    assert asymmetric["T_max = 100 ms"][1:] == ["", "not run"]
    assert "".join(row[2] for row in rows[4:]) == ""  # whose a choice is stands once
    assert "| 475 (12 on a GPU) |" in next(
        line for line in pages.deciding_table().splitlines() if "`fedmix-training`" in line
    )


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


def test_the_map_marks_what_is_certain_among_all_differences_of_a_row(
    pages: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = sys.modules["tables.comparisons"]
    base = {"method": "fedavg", "scores": {"0": 0.5, "1": 0.5, "2": 0.5}, "difference": None}
    # With two degrees of freedom the ratio t = 4.303 mean / half has p = 1 - t / sqrt(t^2 + 2).
    blends = [
        {"method": name, "difference": {"seeds": [0, 1, 2], "mean": 0.1, "half": 0.1 * 4.303 / t}}
        for name, t in (("sure", 12.0), ("alone", 5.0), ("level", 1.0))  # 0.007, 0.038 and 0.42
    ]
    result = {"advice": {"options": [base, *blends], "left_out": {}}}
    monkeypatch.setattr(tables, "of_map", lambda _: {"heart": result})

    (row,) = rows_with(tables.map_table(), "heart disease")

    # A method without a gain that its own interval leaves above 0 has no column.
    assert [(cell.startswith("**"), cell.endswith("†")) for cell in row[2:]] == [(True, True), (True, False)]


def test_committed_advice_has_the_verdicts_and_the_answer_of_todays_rule(pages: ModuleType) -> None:
    tables = sys.modules["tables.comparisons"]
    found = [json.loads(path.read_text()).get("advice") for path in sorted(tables.RESULTS.glob("studies/*.json"))]
    advised = [advice for advice in found if advice]
    assert len(advised) >= 28
    for advice in advised:
        assert json.loads(json.dumps(tables.advice_of(advice).table())) == advice
    assert tables._cell({"difference": None, "verdict": "failed with a seed"}) == "diverged with all seeds but one"
    assert tables._cell({"difference": None, "verdict": "one seed"}) == "one seed"


def test_a_long_run_is_compared_at_every_fortieth_round(pages: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = sys.modules["tables.comparisons"]
    rounds = [0, 10, 20, 30, 40, 50]
    accuracy = {"fedavg": ([0.1, 0.2, 0.3, 0.4, 0.5, 0.9], 0.0), "server-means": ([0.1, 0.2, 0.4, 0.5, 0.6, 0.0], 0.02)}
    runs = [
        {"method": name, "seed": seed, "rounds": rounds, "accuracy": [one + seed * more for one in values]}
        for name, (values, more) in accuracy.items()
        for seed in (0, 1)
    ]
    monkeypatch.setattr(tables, "committed", lambda kind, _: {"heart": {"runs": runs}} if kind == "long" else {})

    fedavg, means = rows_with(tables.long_table(), "heart disease")

    # Means of rounds 20 to 40: 40 with both seeds; 50 and 52, differences 10 and 12, half 12.706 * 1.414 / sqrt(2).
    assert fedavg[1:] == ["fedavg", "40.0"]
    assert means[1:] == ["server-means", "51.0, +11.0 [-1.7,\u00a0+23.7]"]


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


@pytest.mark.parametrize(
    ("ours", "says"),
    [
        # Differences to 90: a deviation of 1, so a half of 4.303 / sqrt(3) = 2.5.
        ([94.0, 95.0, 96.0], "is more accurate than a device alone: +5.0 points (+2.5 to +7.5), verdict *holds*"),
        (
            [84.0, 85.0, 86.0],
            "is less accurate than a device alone: -5.0 points (-7.5 to -2.5), verdict *does not hold*",
        ),
        (
            [90.0, 91.0, 92.0],
            "is not clearly more accurate than a device alone: +1.0 points (-1.5 to +3.5), verdict *within noise*",
        ),
        ([94.0], "is not clearly more accurate than a device alone: +4, verdict *one seed: for*"),
    ],
)
def test_a_headline_says_what_its_verdict_says_and_that_a_run_is_smaller(
    screen: ModuleType, tmp_path: Path, ours: list[float], says: str
) -> None:
    alone = {("standalone", "authors"): [90.0] * len(ours), ("standalone-10", "authors"): [100.0] * len(ours)}
    write(tmp_path, "xormixfl/choice-network", {("xormixfl", "authors"): ours} | alone, smaller=[])

    line = screen.headline_sentences()

    second = "does not hold" if len(ours) > 1 else "one seed: against"
    ten = f"With ten target samples for that device, as in the paper's text: *{second}*."
    assert line == f"- [XorMixFL](results/xormixfl.md) {says}. {ten}"
    assert says.replace("*", "") in screen.forest_figure()
    write(tmp_path, "xormixfl/choice-network", {("xormixfl", "authors"): ours} | alone)
    assert "than a device alone (smaller run):" in screen.headline_sentences()
    assert screen.headline_sentences().endswith(f"*{second}* (smaller run).")


def test_verdicts_at_the_papers_settings_are_counted_apart(screen: ModuleType, tmp_path: Path) -> None:
    write(tmp_path, "xormixfl/table-2", TABLE_2, scale="paper", smaller=[])
    write(tmp_path, "xormixfl/table-2", {key: values[:1] for key, values in TABLE_2.items()})
    write(
        tmp_path,
        "xormixfl/choice-network",
        {("xormixfl", "authors"): [94.0, 95.0], ("standalone", "authors"): [90.0] * 2},
    )

    shown = screen.verdict_figure()
    (holding, *_, total), (*_, others) = (row[1:] for row in rows_with(screen.tally(), "|")[2:])

    full, small = re.findall(r"XorMixFL: ([^;.\]]*)", shown)
    assert full.startswith("holds 1, undecided ")
    assert re.fullmatch(r"undecided \d+", small)  # one seed decides nothing; choices are not counted
    assert int(total) == sum(map(int, re.findall(r"\d+", full)))
    assert int(others) == sum(map(int, re.findall(r"\d+", small)))
    assert holding == "1"


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


def test_what_helps_is_the_first_row_of_each_split(pages: ModuleType) -> None:
    screen, blends = sys.modules["tables.screen"], sys.modules["tables.blends"]

    rows = rows_with(screen.what_helps(), "|")[2:]

    assert [row[0] for row in rows] == list(blends.SPLITS)
    assert rows_with(blends.blend_table(), rows[0][0])[0] == rows[0]
