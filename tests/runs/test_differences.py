"""Paired differences: numbers worked out by hand, and Student's t against scipy."""

import math

import pytest
import scipy
from helpers import each

from fedblend.core.errors import FedblendError
from fedblend.runs.differences import Difference, baselines, certain_together, paired_difference, student_t
from fedblend.runs.groups import Group


def test_the_difference_is_that_of_equal_seeds():
    one = paired_difference({4: 0.9, 0: 0.5, 1: 0.7, 9: 0.0}, {0: 0.4, 1: 0.5, 4: 0.6, 7: 0.9})
    assert one.seeds == (0, 1, 4)
    assert one.mean == pytest.approx(0.2)  # 0.1, 0.2 and 0.3, with deviation 0.1
    assert (one.low, one.high) == pytest.approx(
        (0.2 - 4.302653 * 0.1 / math.sqrt(3), 0.2 + 4.302653 * 0.1 / math.sqrt(3))
    )


@each("others", [{}, {1: 0.5}, {0: 0.4}, {0: 0.4, 1: math.nan}, {0: 0.4, 1: math.inf}])
def test_one_common_seed_gives_no_difference(others):
    assert paired_difference({0: 0.5, 1: 0.6}, others) is None


def test_a_seed_that_diverged_has_no_difference():
    one = paired_difference({0: 3.0, 1: 5.0, 2: math.inf, 3: math.inf}, {0: 1.0, 1: 2.0, 2: 1.0, 3: math.inf})
    assert (one.seeds, one.mean) == ((0, 1), 2.5)


def test_equal_differences_of_counted_values_have_an_interval_without_width():
    one = paired_difference({0: 3.0, 1: 4.0}, {0: 1.0, 1: 2.0}, exact=True)
    assert (one.low, one.mean, one.high) == (2, 2, 2)


@pytest.mark.parametrize(("seeds", "certain"), [(2, False), (3, False), (4, True), (10, True)])
def test_equal_differences_of_measured_values_may_be_one_step(seeds, certain):
    values, others = ({seed: (first + 60 * seed) / 100 for seed in range(seeds)} for first in (12, 10))
    assert len({values[seed] - others[seed] for seed in values}) > 1  # rounding of floats alone
    one = paired_difference(values, others)
    assert one.mean == pytest.approx(0.02)
    assert one.half == pytest.approx(scipy.stats.t.ppf(0.975, seeds - 1) * 0.02 / math.sqrt(6 * seeds))
    assert (one.low > 0) == certain


def test_seeds_without_any_difference_have_none():
    one = paired_difference({0: 0.5, 1: 0.6}, {0: 0.5, 1: 0.6})
    assert (one.low, one.high) == (0, 0)


@pytest.mark.parametrize("level", [0.5, 0.95, 0.999])
def test_quantiles_are_those_of_scipy(level):
    for degrees in [*range(1, 12), 29, 30, 200]:
        assert student_t(degrees, level) == pytest.approx(scipy.stats.t.ppf((1 + level) / 2, degrees), rel=1e-6)


def test_p_values_are_those_of_scipy():
    values, others = (0.7, 0.9, 0.8, 0.85), (0.6, 0.75, 0.78, 0.7)
    for count in (2, 3, 4):
        pair = [dict(enumerate(one[:count])) for one in (values, others)]
        expected = scipy.stats.ttest_rel(values[:count], others[:count]).pvalue
        assert paired_difference(*pair).p_value == pytest.approx(expected, rel=1e-6)
        assert paired_difference(*pair[::-1]).p_value == pytest.approx(expected, rel=1e-6)
    assert (Difference((0, 1), 2.0, 0.0).p_value, Difference((0, 1), 0.0, 0.0).p_value) == (0, 1)


@each(
    ("p_values", "certain"),
    [
        ((0.04,), "a"),
        ((0.06,), ""),
        ((0.02, 0.04), "ab"),  # 0.05 / 2 and 0.05; each by 0.05 / 2 would leave b out
        ((0.03, 0.04), ""),  # b is not reached
        ((0.9, 0.01, 0.02), "bc"),
        ((0.03, 0.01, 0.9), "b"),  # 0.03 is above 0.05 / 2
        ((), ""),
    ],
)
def test_differences_are_certain_together_by_holms_steps(p_values, certain):
    assert certain_together(dict(zip("abc", p_values, strict=False))) == set(certain)


def test_the_baseline_is_fedavg_or_the_first_unless_one_is_chosen():
    sets = {"a": [Group("fedmix", []), Group("fedavg", [])], "b": [Group("fedmix", []), Group("fedavg (lr=0.1)", [])]}
    assert baselines(sets, None) == {"a": "fedavg", "b": "fedmix"}
    assert baselines(sets, "fedavg (lr=0.1)") == {"a": None, "b": "fedavg (lr=0.1)"}
    with pytest.raises(FedblendError, match=r"baseline: 'fedprox' .* valid: fedmix, fedavg, fedavg \(lr=0.1\)$"):
        baselines(sets, "fedprox")
