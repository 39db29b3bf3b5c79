"""Differential privacy: from noise that was added to the (epsilon, delta) that it earned."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.errors import FedblendError


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


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """The least epsilon that all releases together are known to have at ``delta``, when one record is replaced.

    Privacy-loss distributions where every record goes into every release (exact for Gaussian noise), Renyi
    differential privacy where records are sampled (Wang, Balle and Kasiviswanathan 2019, Theorem 27); both are
    Google's dp-accounting. For Laplace noise on sampled records nothing is gained by the sampling. Raises
    :class:`FedblendError` if that library is not installed.
    """
    given = tuple(r for r in releases if r.times)
    if not given:
        return 0.0
    return _sampled(given, delta) if any(_gains(r) for r in given) else _whole(given, delta)


def _gains(release: Release) -> bool:
    """Whether sampling makes a release more private, as far as is proved."""
    return (
        release.distribution == "gaussian" and release.sampled is not None and release.sampled[1] < release.sampled[0]
    )


@functools.lru_cache(maxsize=512)
def _whole(releases: tuple[Release, ...], delta: float) -> float:
    """Every record is in every release. Sensitivity is 1 here, which dp-accounting says by "add or remove"."""
    dp = _library()
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    # Gaussian releases together are one, whose multiplier's inverse squares add up: exact, and quick.
    inverse = sum(r.times / r.multiplier**2 for r in releases if r.distribution == "gaussian")
    if inverse:
        accountant.compose(dp.GaussianDpEvent(1 / math.sqrt(inverse)))
    for r in releases:
        if r.distribution == "laplace":
            accountant.compose(dp.LaplaceDpEvent(r.multiplier), r.times)
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
