"""Verdicts that take noise into account: by hand, and as SciPy computes the interval."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from helpers import each
from reproduce_helpers import result_of

from fedblend.papers.formatting import verdict_text
from fedblend.papers.verdicts import ClaimVerdict, LineVerdict, judge, judge_result

INF = math.inf


@each(
    ("margins", "word"),
    [
        ((), "undecided"),
        ((5.0,), "one seed"),
        ((-5.0,), "one seed"),
        ((1.0, 1.1, 1.2), "holds"),
        ((-1.0, -1.1, -1.2), "does not hold"),
        ((1.0, 2.0, 9.0), "within noise"),  # all above 0, mean 4, interval -6.8 to 14.8
        ((0.0, 0.0, 0.0), "within noise"),
        ((2.0, 2.0), "within noise"),  # the step may be 2: deviation 2 / sqrt(6), interval -5.3 to 9.3
        ((2.0, 2.0, 2.0), "within noise"),  # -0.03 to 4.03
        ((-2.0, -2.0, -2.0, -2.0), "does not hold"),  # -3.3 to -0.7
        ((1.333333 - 0.3, 1.033333, 1.033334), "within noise"),  # equal to the sixth digit of a written result
        ((INF, INF, 3.0), "holds"),
        ((INF, 3.0), "within noise"),  # two seeds agree by chance in one case of two
        ((INF, -INF, 3.0), "within noise"),
    ],
)
def test_a_line_is_judged_by_its_interval(margins: tuple[float, ...], word: str) -> None:
    assert LineVerdict(margins).word == word


def test_equal_margins_of_what_is_counted_are_certain() -> None:
    result = result_of({("fl", "x"): (900.0, 900.0), ("fd", "x"): (25.0, 25.0)})
    claim = {"holds": "fl > fd", "of": "q", "places": {"x": [True, 875.0]}}

    assert judge_result(result, claim).word == "within noise"
    result["quantities"]["q"]["exact"] = True
    assert judge_result(result, claim).word == "holds"
    assert judge_result(result, claim).lines["x"].interval == (875, 875)


def test_the_interval_and_the_p_value_are_students() -> None:
    stats = pytest.importorskip("scipy.stats")
    test, line = stats.ttest_1samp((1.0, 2.5, -0.5, 4.0), 0), LineVerdict((1.0, 2.5, -0.5, 4.0))

    assert line.interval == pytest.approx(test.confidence_interval(0.95), rel=1e-3)
    assert line.p_value == pytest.approx(test.pvalue, rel=1e-6)
    assert LineVerdict((1.0, INF)).interval is None
    assert math.isnan(LineVerdict((1.0, INF)).p_value)


@pytest.mark.parametrize(
    ("claim", "deciding", "times"),
    [
        ("a > b", (2.0, 2.5, 3.0), 1),  # holds in x and y: the less certain one
        ("a > b > c", (2.0, 2.5, 3.0), 1),  # b - c has the smallest mean of the chain, and is more certain
        ("b > a", (-3.5, -4.5, -5.0), 2),  # fails in x and y: the more certain one of two
        ("b > a > c", (-3.5, -4.5, -5.0), 4),  # of four differences two are below 0
    ],
)
def test_a_claim_has_the_p_value_that_decides_it(claim: str, deciding: tuple[float, ...], times: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    a_minus_b = {"x": (2.0, 2.5, 3.0), "y": (3.5, 4.5, 5.0)}
    by_seed = {
        seed: {
            (row, line): value
            for line in "xy"
            for row, value in zip("abc", (a_minus_b[line][seed], 0.0, -c), strict=True)
        }
        for seed, c in enumerate((1.0, 1.1, 0.9))
    }

    p_value = judge(claim, by_seed, ["x", "y"]).p_value

    assert p_value == pytest.approx(times * stats.ttest_1samp(deciding, 0).pvalue, rel=1e-5)


def test_a_claim_without_an_interval_in_a_line_has_no_p_value() -> None:
    by_seed = {s: {("a", "x"): 1.0 + s, ("b", "x"): 0.0, ("a", "y"): INF, ("b", "y"): 1.0 + s} for s in range(3)}

    assert judge("a > b", by_seed, ["x"]).p_value is not None
    assert judge("a > b", by_seed, ["x", "y"]).p_value is None
    assert judge("a > b", by_seed, []).p_value is None


HOLDING, FAILING, NOISY, SINGLE = (1.0, 1.1), (-1.0, -1.1), (-1.0, 1.0), (2.0,)


@each(
    ("lines", "word"),
    [
        ([HOLDING, HOLDING], "holds"),
        ([HOLDING, NOISY], "holds in part"),
        ([HOLDING, FAILING], "holds in part"),
        ([HOLDING, SINGLE], "holds in part"),
        ([FAILING, NOISY], "does not hold"),
        ([NOISY, SINGLE], "within noise"),
        ([SINGLE, ()], "one seed"),
        ([], "no verdict"),
    ],
)
def test_a_claim_is_judged_over_its_lines(lines: Sequence[tuple[float, ...]], word: str) -> None:
    verdict = ClaimVerdict({str(k): LineVerdict(margins) for k, margins in enumerate(lines)})

    assert verdict.word == word


def test_a_line_of_which_either_side_never_reached_its_target_is_the_weakest() -> None:
    lines = {"x": LineVerdict((-5.0, -6.0)), "y": LineVerdict((INF, -INF)), "z": LineVerdict((-8.0, -9.0))}

    assert math.isnan(lines["y"].mean)
    for order in ("xyz", "yzx", "zxy"):
        assert ClaimVerdict({name: lines[name] for name in order}).weakest is lines["y"]


def test_margins_are_paired_by_seed() -> None:
    # Seeds differ by 10 points, the two rows of one seed by 1: unpaired, the difference would be within noise.
    by_seed = {s: {("a", "x"): 50.0 + 10 * s + 1 + 0.01 * s, ("b", "x"): 50.0 + 10 * s} for s in range(3)}

    verdict = judge("a > b", by_seed, ["x"])

    assert verdict.lines["x"].margins == pytest.approx((1.0, 1.01, 1.02))
    assert verdict.word == "holds"


def test_a_seed_with_one_side_alone_does_not_count() -> None:
    by_seed = {0: {("a", "x"): 1.0, ("b", "x"): 0.0}, 1: {("a", "x"): 5.0}}

    assert judge("a > b", by_seed, ["x"]).lines["x"].margins == (1.0,)


def rows_of(*values: tuple[float, ...]) -> dict[int, dict[tuple[str, str], float]]:
    """Numbers of the rows a, b, c by seed, in the column x."""
    return {
        seed: {(row, "x"): number for row, number in zip("abc", one, strict=True)} for seed, one in enumerate(values)
    }


def test_each_difference_of_a_chain_has_its_own_interval() -> None:
    # The smaller difference is 1 in each seed, but a - b is 1, 9, 1 and b - c is 9, 1, 9: both means are uncertain.
    verdict = judge("a > b > c", rows_of((10.0, 9.0, 0.0), (10.0, 1.0, 0.0), (10.0, 9.0, 0.0)), ["x"])

    assert verdict.lines["x"].margins == (1.0, 9.0, 1.0)
    assert verdict.word == "within noise"


def test_a_chain_fails_only_if_one_of_its_differences_does() -> None:
    # In each seed one of the two is below 0, but neither is so on average.
    torn = judge("a > b > c", rows_of((4.0, 5.0, 0.0), (9.0, 4.0, 5.0)), ["x"])
    assert torn.word == "within noise"
    # a > b fails by about 1 in each seed, while b > c holds.
    failed = judge("a > b > c", rows_of((4.0, 5.0, 0.0), (4.0, 5.1, 0.0)), ["x"])
    assert failed.word == "does not hold"
    assert failed.lines["x"].mean == pytest.approx(-1.05)


def test_a_chain_is_undecided_where_a_difference_is_and_no_other_is_below_0() -> None:
    assert judge("a < b < c", rows_of((3.0, INF, INF)), ["x"]).word == "undecided"
    below = judge("a < b < c", rows_of((INF, 3.0, 2.0)), ["x"])
    assert (below.word, below.lines["x"].margins) == ("one seed", (-INF,))


@pytest.mark.parametrize(("claim", "word"), [("a >= b", "holds"), ("a > b", "within noise"), ("a@x >= max:b", "holds")])
def test_level_sides_fulfil_at_least_and_not_more_than(claim: str, word: str) -> None:
    by_seed = rows_of((5.0, 5.0, 1.0), (6.0, 6.0, 1.0))

    assert judge(claim, by_seed, ["x"]).word == word


def test_a_seed_without_all_cells_of_a_mean_does_not_count() -> None:
    by_seed = {0: {("a", "x"): 1.0, ("a", "y"): 5.0, ("b", "x"): 2.0}, 1: {("a", "x"): 1.0, ("b", "x"): 2.0}}

    verdict = judge("mean:a > b@x", by_seed, ["all"])

    assert verdict.lines["all"].margins == (1.0,)  # seed 1 alone would have a mean of 1, which is below 2


def test_a_spread_over_a_part_of_the_table_is_undecided() -> None:
    result = result_of({("a", "x"): (0.1, 0.11, 0.12), ("a", "y"): (0.2, 0.22, 0.24), ("a", "z"): ()})
    claim = {"holds": "spread:a <= 1", "of": "q", "places": {"all": [True, 1.0]}}

    assert judge_result(result, claim).word == "undecided"
    result["quantities"]["q"]["cells"].pop()
    assert judge_result(result, claim).word == "holds"


@pytest.mark.parametrize("column", ["", "x"])
def test_a_written_result_is_judged_by_its_numbers(column: str) -> None:
    result = result_of({("a", column): (3, 4, 5), ("b", column): (7, 8.5, "never")})

    verdict = judge_result(result, {"holds": "a < b", "of": "q", "places": {column or "all": [True, 4.0]}})

    assert verdict.lines[column].margins == (4.0, 4.5, INF)
    assert verdict.word == "holds"
    assert verdict.weakest is verdict.lines[column]


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([3.0], "holds (by +2), one seed"),
        ([3.0, 3.2], "holds (by +2), 2 of 2 seeds and places, +2.1 over seeds, 95 % interval +0.829 to +3.37"),
        ([3.0, 3.0], "holds (by +2), 2 of 2 seeds and places, 95 % interval -5.34 to +9.34: within noise"),
        ([4.0, 2.0], "holds (by +2), 2 of 2 seeds and places, 95 % interval -10.7 to +14.7: within noise"),
    ],
)
def test_the_verdict_in_words_names_the_interval(ours: list[float], words: str) -> None:
    result = result_of({("a", "x"): ours, ("b", "x"): [1.0] * len(ours)})
    claim = {"holds": "a > b", "of": "q", "places": {"x": [True, 2.0]}, "verdict": "holds", "paper": "holds"}

    assert verdict_text(claim | {"seeds": [len(ours), len(ours)]}, result) == words


def test_the_verdict_on_spreads_has_the_mean_over_seeds_beside_the_margin_of_means() -> None:
    # The spread of the means is 1; those of the seeds are 2 and 4.
    result = result_of({("a", "x"): (1.0, 5.0), ("a", "y"): (3.0, 1.0)})
    claim = {"holds": "spread:a > 0", "of": "q", "places": {"all": [True, 1.0]}, "verdict": "holds", "paper": "holds"}

    words = verdict_text(claim | {"seeds": [2, 2]}, result)

    assert words.startswith("holds (by +1), 2 of 2 seeds and places, +3 over seeds, 95 % interval ")
