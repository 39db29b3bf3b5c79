"""Differences between methods over the same seeds, with an interval: runs of one seed have equal splits and cohorts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

from fedblend.core.errors import FedblendError, or_valid
from fedblend.runs.groups import Group

LEVEL = 0.95  # Level of confidence of every interval

ROUNDING = 1e-9
"""Differences are equal whose deviation is at most this share of their mean: the rest is rounding of floats."""

PLAIN = "fedavg"  # The baseline where none is chosen

Key = TypeVar("Key")


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of one method's value minus another's with the same seed."""

    seeds: tuple[int, ...]
    mean: float
    half: float
    """Half the width of the interval at :data:`LEVEL`, by Student's t."""

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    @property
    def p_value(self) -> float:
        """The probability of a mean at least as far from 0 if the methods did not differ (two-sided t test)."""
        if not self.half:
            return float(not self.mean)
        degrees = len(self.seeds) - 1
        return 1 - _within(abs(self.mean) / self.half * student_t(degrees), degrees)


def paired_difference(
    values: Mapping[int, float], others: Mapping[int, float], exact: bool = False
) -> Difference | None:
    """The difference of two methods, whose values are given by seed; ``None`` for fewer than two common seeds.

    A seed with which the difference is not a finite number, as after a divergence, does not count. For ``exact`` see
    :func:`half_width`.

    >>> one = paired_difference({0: 3.0, 1: 5.0, 7: 9.0}, {0: 1.0, 1: 2.0})
    >>> one.seeds, one.mean, round(one.half, 3)  # 12.706 * 0.707 / sqrt(2)
    ((0, 1), 2.5, 6.353)
    """
    pairs = {seed: values[seed] - others[seed] for seed in sorted(values) if seed in others}
    found = {seed: value for seed, value in pairs.items() if math.isfinite(value)}
    if len(found) < 2:
        return None
    return Difference(tuple(found), fmean(found.values()), half_width(list(found.values()), exact))


def half_width(differences: Sequence[float], exact: bool = False) -> float:
    """Half the width of the interval of the mean of at least two differences, by Student's t.

    Measured values move in steps, such as one test sample or one evaluation, so equal differences do not show that
    nothing varies. Their deviation is taken as that of rounding two numbers to a step, step / sqrt(6). The step is not
    known; it is at most the difference itself, which is taken for it. So two or three equal differences are never
    certain. ``exact`` values, such as bytes, are counted or computed: equal differences have width 0.

    >>> round(half_width([3.0, 3.0, 3.0]), 2), half_width([3.0, 3.0, 3.0], exact=True)
    (3.04, 0.0)
    """
    n, deviation, mean = len(differences), stdev(differences), fmean(differences)
    if not exact and deviation <= ROUNDING * abs(mean):
        deviation = abs(mean) / math.sqrt(6)
    return student_t(n - 1) * deviation / math.sqrt(n)


def certain_together(p_values: Mapping[Key, float]) -> set[Key]:
    """The names of differences that are not 0 where all are tested at once, by Holm's correction.

    The probability that any of them is in truth 0 is at most 5 %: of k differences the smallest p-value must be at most
    0.05 / k, the next 0.05 / (k - 1), and so on to the first that is larger.
    """
    order = sorted(p_values, key=lambda name: p_values[name])
    for place, name in enumerate(order):
        if p_values[name] * (len(order) - place) > 1 - LEVEL:
            return set(order[:place])
    return set(order)


@functools.cache
def student_t(degrees: int, level: float = LEVEL) -> float:
    """The number t for which Student's t lies in [-t, t] with probability ``level``, to eight digits.

    The probability is a finite sum for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(student_t(1), 3), round(student_t(4), 3)
    (12.706, 2.776)
    """
    low, high = 0.0, 1.0
    while _within(high, degrees) < level:
        high *= 2
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _within(middle, degrees) < level else (low, middle)
    return high


def _within(t: float, degrees: int) -> float:
    """The probability that Student's t lies in [-t, t]."""
    angle = math.atan(t / math.sqrt(degrees))
    odd = degrees % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, degrees, 2):
        term *= math.cos(angle) ** 2 * (k - 1) / k
        total += term
    if not odd:
        return math.sin(angle) * total
    return 2 / math.pi * (angle + (math.sin(angle) * total if degrees > 1 else 0.0))


def baselines(sets: Mapping[str, Sequence[Group]], wanted: str | None) -> dict[str, str | None]:
    """The baseline of each data set: ``wanted`` where it has that method, or by default FedAvg or the first method."""
    names = {data: [g.name for g in groups] for data, groups in sets.items()}
    if wanted is None:
        return {data: PLAIN if PLAIN in of_data else of_data[0] for data, of_data in names.items()}
    if not any(wanted in of_data for of_data in names.values()):
        known = dict.fromkeys(name for of_data in names.values() for name in of_data)
        raise FedblendError(f"baseline: '{wanted}' is none of these runs' methods{or_valid(wanted, known)}")
    return {data: wanted if wanted in of_data else None for data, of_data in names.items()}
