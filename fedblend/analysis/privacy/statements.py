"""Differential privacy statements of a run: (epsilon, delta) by round, or the reason why none holds."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.core.errors import missing_package
from fedblend.core.record import RoundRecord

Noise = Mapping[str, Any] | str
"""The noise on a payload's kind, or why it gives no epsilon (:func:`fedblend.experiment.privacy_facts.noise_facts`)."""

MOST_ROUNDS = 12  # Most rounds at which epsilon is computed, for a curve

SCOPE = (
    "A guarantee covers the payloads that it names, when all data of one client (or one sample) are replaced by "
    "others. Weights include batch norm's running statistics, which are clipped and noised alike; its counters of "
    "batches do not leave. The number of samples of each client, the scale of inputs, and the test accuracy count as "
    "public. The guarantee holds for one run. Runs on the same data add up: other seeds, points of a grid, "
    "repetitions, and the run whose model this one starts from. The guarantee does not cover the training loss and "
    "the list of participants that a simulation writes into its log, nor scores on samples that clients hold out or "
    "keep for validation: these leave without noise. It does not cover what the scores decide either, such as the "
    "best round, or the end of a run at a target. A simulation draws noise and cohorts from streams keyed by the "
    "seed, so that a run can be repeated. Whoever knows the seed can remove the noise, and knows the cohorts."
)
"""The assumptions of every (epsilon, delta)."""


@dataclass(frozen=True)
class Statement:
    """(epsilon, delta) of the payloads that left the clients up to each of some rounds, or why none can be stated."""

    what: str
    """The payloads: "weights", "means", or "weights and means"."""
    unit: str
    """The protected unit: "a client" or "a sample"; "an honest client" or "a sample of an honest client" where some
    clients are adversaries, whose uploads have no noise."""
    delta: float
    by_round: tuple[tuple[int, float], ...] = ()
    reason: str = ""

    @property
    def epsilon(self) -> float | None:
        """Epsilon after the last round, or ``None``."""
        return self.by_round[-1][1] if self.by_round else None


def statements(
    config: Mapping[str, Any],
    noise: Mapping[str, Noise],
    clients: int,
    records: Sequence[RoundRecord],
    secret_cohorts: bool,
    samples: int | None = None,
) -> list[Statement]:
    """The statements of a run, from its resolved settings, noise, number of clients that hold samples, and metrics.

    ``samples`` is the number of all clients' samples (default: as many as clients, which is the least). No epsilon is
    stated at a delta of 1 / clients (1 / samples) or more, because releasing one client's (sample's) data has that
    delta (Dwork and Roth 2014, section 2.3).
    ``secret_cohorts`` is true where no recipient of the models knows the participants of a round. The last statement
    covers all payloads that left the clients. Raises :class:`FedblendError` if dp-accounting is needed and not
    installed.
    """
    rounds = [record for record in records if record.round > 0]
    counts, delta, cohort = _participation(rounds), config["delta"], config["train"]["cohort"]
    population = clients if secret_cohorts else None
    honest = " of an honest client" if config.get("adversary", {}).get("share") else ""
    if "means" in noise:
        # There is no statement of the weights alone: all clients train on the means, so that all weights depend on each
        # sample, but the noise on weights is sized for the influence of a client's own samples only.
        units = {"means": "a sample", "weights and means": f"a sample{honest}"}
        number, protected, first = max(clients, samples or 0), "samples", noise["means"]
    else:
        units = {"weights": "an honest client" if honest else "a client"}
        number, protected, first = clients, "clients", noise["weights"]
    too_large = ""
    if not isinstance(first, str) and delta * number >= 1:
        too_large = (
            f"delta: {delta:g} is not below 1 / {number} {protected}, so that it permits to publish all data of one of "
            f"them; valid: well below {1 / number:.2g}"
        )
    found = []
    for what, unit in units.items():
        noises: Mapping[str, Any] = {"means": first} if what == "means" else noise
        reason = too_large or next((one for one in noises.values() if isinstance(one, str)), "")
        by_round = []
        for i in [] if reason else _selected_rounds(rounds):
            releases = [_release(kind, one, counts[i], population, cohort) for kind, one in noises.items()]
            by_round.append((rounds[i].round, epsilon(releases, delta)))
        found.append(Statement(what, unit, delta, tuple(by_round), reason))
    return found


def _selected_rounds(rounds: Sequence[RoundRecord]) -> list[int]:
    """Indices of the rounds for which epsilon is computed: some of the evaluated rounds, and the last round."""
    evaluated = [i for i, record in enumerate(rounds) if record.loss is not None] or list(range(len(rounds)))
    step = -(-len(evaluated) // MOST_ROUNDS) or 1
    return sorted({*evaluated[::-step], *([len(rounds) - 1] if rounds else [])})


def _participation(rounds: Sequence[RoundRecord]) -> list[dict[str, int]]:
    """Counts after each round: rounds, rounds of the most frequent participant, and sharings."""
    by_client: Counter[int] = Counter()
    most, shared, counts = 0, 0, []
    for number, record in enumerate(rounds, 1):
        by_client.update(record.cohort or ())
        most = max([most, *(by_client[c] for c in record.cohort or ())])
        shared += record.shared is not None
        counts.append({"rounds": number, "most": most, "shared": shared})
    return counts


def _release(
    kind: str, noise: Mapping[str, Any], counts: Mapping[str, int], population: int | None, cohort: int
) -> Release:
    """The releases so far: sums of clients drawn in secret from a ``population``, or those of one client's rounds.

    Where cohorts are public (``population`` is ``None``), the sums that a client is in are known: those of its rounds.
    So they count where clients keep something on which their later uploads depend, or are not drawn uniformly.
    """
    given = noise["distribution"], noise["multiplier"]
    if kind == "means":
        return Release(*given, counts["shared"])
    if noise["at_server"] and population is not None and not noise.get("keeps"):
        return Release(*given, counts["rounds"], (population, cohort))
    return Release(*given, counts["most"])


# Accounting: the epsilon of noisy releases at a given delta ----------------------------------------------------


@dataclass(frozen=True)
class Release:
    """Noisy numbers that were released ``times`` times."""

    distribution: str
    """Distribution of the noise: "gaussian" or "laplace"."""
    multiplier: float
    """Standard deviation (or scale) of the noise, over the largest L2 (or L1) change that one record can cause."""
    times: int
    sampled: tuple[int, int] | None = None
    """(n, m) where each release uses m of n records, drawn in secret and without replacement."""


GRID = 50_000  # Most steps of a privacy-loss distribution, from 0 to the sum of all losses: tens of megabytes
MIN_STEP = 1e-4  # Smallest step of the grid, as in dp-accounting
MAX_LOSS = 500.0  # Largest loss of one Laplace release on a grid, so that its exponential does not overflow
MIN_MU = 1e-6  # Smallest mu of Gaussian releases; for a smaller one delta would have rounding errors

ERFCX_BY_FRACTION, ERFCX_TERMS = 5.0, 60
"""From where on erfcx is a continued fraction, and its number of terms: enough for a double at this value."""


def epsilon(releases: Sequence[Release], delta: float) -> float:
    """The least proven epsilon of all releases together at ``delta``, when one record is replaced.

    Gaussian releases of all records have a closed form (Balle and Wang 2018, Theorem 8). With Laplace noise, epsilon is
    the smaller of two bounds: the sum of the epsilons of the releases, and a bound by privacy-loss distributions. For
    sampled records, it is the smaller of the above without sampling, and a bound by Renyi differential privacy (Wang,
    Balle and Kasiviswanathan 2019, Theorem 27); Laplace noise gains nothing by sampling. Distributions and the Renyi
    bound are of Google's dp-accounting. Raises :class:`FedblendError` where it is needed and not installed.
    """
    given = tuple(r for r in releases if r.times)
    unsampled = _unsampled(given, delta)
    return min(unsampled, _sampled(given, delta)) if any(_gains(r) for r in given) else unsampled


def _gains(release: Release) -> bool:
    """Whether sampling is proven to make a release more private."""
    return (
        release.distribution == "gaussian" and release.sampled is not None and release.sampled[1] < release.sampled[0]
    )


def _unsampled(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon if every record is in every release."""
    # Gaussian releases compose exactly to one release: the inverse squares of their multipliers add up.
    mu = math.hypot(*(math.sqrt(r.times) / r.multiplier for r in releases if r.distribution == "gaussian"))
    laplace = tuple((1 / r.multiplier, r.times) for r in releases if r.distribution == "laplace")
    total = _gaussian_epsilon(mu, delta) + sum(loss * times for loss, times in laplace)
    # A grid improves nothing if the sum is infinite, and does not work if one release has too large a loss.
    if not laplace or not math.isfinite(total) or max(loss for loss, _ in laplace) > MAX_LOSS:
        return total
    return min(total, _on_a_grid(mu, laplace, total, delta))


def _gaussian_epsilon(mu: float, delta: float) -> float:
    """The least epsilon of a Gaussian release with the multiplier 1 / ``mu``; 0 for ``mu`` = 0, no release."""
    if mu == 0:
        return 0.0
    mu = max(mu, MIN_MU)
    # delta is below Phi(mu / 2 - epsilon / mu), and the normal distribution's tail below exp(-x^2 / 2).
    low, high = 0.0, mu * (mu / 2 + math.sqrt(-2 * math.log(delta)))
    if math.isinf(high):
        return high
    if delta_of_gaussian(low, mu) <= delta:
        return low
    # Bisection until no float lies between; the upper end is returned.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if delta_of_gaussian(middle, mu) > delta else (low, middle)
    return high


def delta_of_gaussian(epsilon: float, mu: float) -> float:
    """Phi(mu / 2 - epsilon / mu) - e^epsilon Phi(-mu / 2 - epsilon / mu), for one Gaussian release of 1 / ``mu``."""
    near, far = mu / 2 - epsilon / mu, mu / 2 + epsilon / mu
    # e^epsilon Phi(-far) without a large factor, by epsilon - far^2 / 2 = -near^2 / 2.
    return (math.erfc(-near / math.sqrt(2)) - math.exp(-near * near / 2) * _erfcx(far / math.sqrt(2))) / 2


def _erfcx(x: float) -> float:
    """e^(x^2) erfc(x) for ``x`` >= 0, to about 4e-15 of the value."""
    if x < ERFCX_BY_FRACTION:
        return math.exp(x * x) * math.erfc(x)
    # The continued fraction (Abramowitz and Stegun 7.1.14), from its last term to its first.
    below = x
    for k in range(ERFCX_TERMS, 0, -1):
        below = x + k / 2 / below
    return 1 / (math.sqrt(math.pi) * below)


@functools.lru_cache(maxsize=512)
def _on_a_grid(mu: float, laplace: tuple[tuple[float, int], ...], total: float, delta: float) -> float:
    """Epsilon by privacy-loss distributions, of a Gaussian release and Laplace releases (loss, times).

    ``total`` is the sum of all losses. The result is an upper bound on any grid, and is larger on a coarser grid. The
    sensitivity is 1, which is "add or remove" in dp-accounting.
    """
    dp = _library()
    accountant = dp.pld.PLDAccountant(dp.NeighboringRelation.ADD_OR_REMOVE_ONE, max(MIN_STEP, total / GRID))
    if mu:
        accountant.compose(dp.GaussianDpEvent(1 / mu))
    for loss, times in laplace:
        accountant.compose(dp.LaplaceDpEvent(1 / loss), times)
    return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=512)
def _sampled(releases: tuple[Release, ...], delta: float) -> float:
    """Epsilon by Renyi differential privacy, if some releases are of sampled records.

    Multipliers are relative to the change by a replacement, as dp-accounting expects for "replace one".
    """
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
        raise missing_package("epsilon of this noise", "dp-accounting", "dp") from None
    return dp_accounting
