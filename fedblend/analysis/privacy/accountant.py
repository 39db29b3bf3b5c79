"""Differential privacy: from noise that was added to the (epsilon, delta) that it earned."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.core.errors import FedblendError


@dataclass(frozen=True)
class Release:
    """Noisy numbers that were given away ``times`` times.

    ``distribution`` is "gaussian" or "laplace"; ``multiplier`` is the noise's standard deviation (or scale) over the
    L2 (or L1) distance that one record can make. ``sampled`` = (n, m) says that m of n records, drawn without
    replacement and kept secret, went into each.
    """

    distribution: str
    multiplier: float
    times: int
    sampled: tuple[int, int] | None = None


GRID = 50_000
"""Steps of a privacy-loss distribution from 0 to the sum of all losses, at most: tens of megabytes."""

FINEST = 1e-4
"""Smallest step between them, as in dp-accounting."""

WIDEST = 500.0
"""Largest loss of one Laplace release on a grid, which needs its exponential as a float."""

FAINTEST = 1e-6
"""Least mu of Gaussian releases that is told from a smaller one: below it rounding would show in delta."""


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """The least epsilon that all releases together are known to have at ``delta``, when one record is replaced.

    Gaussian releases of every record have a closed form (Balle and Wang 2018, Theorem 8). With Laplace noise among
    them it is the smaller of the sum of their epsilons and of what privacy-loss distributions say. Where records are
    sampled, it is the smaller of the above, which leaves the sampling out, and Renyi differential privacy (Wang, Balle
    and Kasiviswanathan 2019, Theorem 27); for Laplace noise nothing is gained by the sampling. Distributions and the
    Renyi bound are Google's dp-accounting; raises :class:`FedblendError` where it is needed and not installed.
    """
    given = tuple(r for r in releases if r.times)
    whole = _whole(given, delta)
    return min(whole, _sampled(given, delta)) if any(_gains(r) for r in given) else whole


def _gains(release: Release) -> bool:
    """Whether sampling makes a release more private, as far as is proved."""
    return (
        release.distribution == "gaussian" and release.sampled is not None and release.sampled[1] < release.sampled[0]
    )


def _whole(releases: tuple[Release, ...], delta: float) -> float:
    """Every record is in every release."""
    # Gaussian releases together are one, whose multiplier's inverse squares add up: exact.
    mu = math.hypot(*(math.sqrt(r.times) / r.multiplier for r in releases if r.distribution == "gaussian"))
    pure = tuple((1 / r.multiplier, r.times) for r in releases if r.distribution == "laplace")
    added = _of_gaussian(mu, delta) + sum(loss * times for loss, times in pure)
    # Where the sum is no number, or one release alone is no guarantee, there is nothing to be gained by more work.
    if not pure or not math.isfinite(added) or max(loss for loss, _ in pure) > WIDEST:
        return added
    return min(added, _on_a_grid(mu, pure, added, delta))


def _of_gaussian(mu: float, delta: float) -> float:
    """The least epsilon of a Gaussian release whose multiplier is 1 / ``mu``; 0 of none."""
    if mu == 0:
        return 0.0
    mu = max(mu, FAINTEST)
    # delta is below Phi(mu / 2 - epsilon / mu), and the normal distribution's tail below exp(-x^2 / 2).
    low, high = 0.0, mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))
    if math.isinf(high):
        return high
    if delta_of_gaussian(low, mu) <= delta:
        return low
    # Until no number lies between: what is given back is the upper end.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if delta_of_gaussian(middle, mu) > delta else (low, middle)
    return high


def delta_of_gaussian(epsilon: float, mu: float) -> float:
    """Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu), for one Gaussian release of 1 / ``mu``."""
    from scipy.special import erfcx, ndtr  # a second's import that trainings do without

    near, far = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
    # e^epsilon Phi(-far) without its large factor: epsilon - far^2 / 2 is -near^2 / 2.
    return float(ndtr(near) - math.exp(-near * near / 2) * erfcx(far / math.sqrt(2)) / 2)


@functools.lru_cache(maxsize=512)
def _on_a_grid(mu: float, pure: tuple[tuple[float, int], ...], most: float, delta: float) -> float:
    """By privacy-loss distributions, of a Gaussian release and Laplace ones, (loss, times), that lose ``most``.

    An upper bound on any grid, above the least epsilon by more on a coarser one. Sensitivity is 1 here, which
    dp-accounting says by "add or remove".
    """
    dp = _library()
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, max(FINEST, most / GRID))
    if mu:
        accountant.compose(dp.GaussianDpEvent(1 / mu))
    for loss, times in pure:
        accountant.compose(dp.LaplaceDpEvent(1 / loss), times)
    return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=512)
def _sampled(releases: tuple[Release, ...], delta: float) -> float:
    """Some releases are of sampled records. Here multipliers are over the distance of a replacement as they stand."""
    dp = _library()
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    for r in releases:
        event = dp.GaussianDpEvent(r.multiplier) if r.distribution == "gaussian" else dp.LaplaceDpEvent(r.multiplier)
        if _gains(r) and r.sampled is not None:
            event = dp.SampledWithoutReplacementDpEvent(*r.sampled, event)
        accountant.compose(event, r.times)
    return float(accountant.get_epsilon(delta))


def _library() -> Any:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError:
        raise FedblendError("epsilon needs Google's dp-accounting: pip install 'fedblend[dp]'") from None
    return dp_accounting
