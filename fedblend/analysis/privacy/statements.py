"""Differential privacy statements of a run: (epsilon, delta) by round, or the reason why none holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.analysis.privacy.accountant import Release, epsilon
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
    """(round, epsilon) pairs."""
    reason: str = ""
    """Why no epsilon can be stated."""

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
    population = clients if secret_cohorts else None
    honest = bool(config.get("adversary", {}).get("share"))
    client = "an honest client" if honest else "a client"
    sample = "a sample of an honest client" if honest else "a sample"
    protected = ("samples", max(clients, samples or 0)) if "means" in noise else ("clients", clients)
    delta = config["delta"]
    if not isinstance(noise["means" if "means" in noise else "weights"], str) and delta * protected[1] >= 1:
        reason = (
            f"delta: {delta:g} is not below 1 / {protected[1]} {protected[0]}, so that it permits to "
            f"publish all data of one of them; valid: well below {1 / protected[1]:.2g}"
        )
        units = {"means": "a sample", "weights and means": sample} if "means" in noise else {"weights": client}
        return [Statement(what, unit, delta, reason=reason) for what, unit in units.items()]
    if "means" not in noise:
        return [_statement("weights", client, config, population, rounds, noise)]
    # There is no statement of the weights alone: all clients train on the means, so that all weights depend on each
    # sample, but the noise on weights is sized for the influence of a client's own samples only.
    return [
        _statement("means", "a sample", config, population, rounds, {"means": noise["means"]}),
        _statement("weights and means", sample, config, population, rounds, noise),
    ]


def _statement(
    what: str,
    unit: str,
    config: Mapping[str, Any],
    population: int | None,
    rounds: Sequence[RoundRecord],
    noises: Mapping[str, Noise],
) -> Statement:
    delta, cohort = config["delta"], config["train"]["cohort"]
    reason = next((n for n in noises.values() if isinstance(n, str)), "")
    if reason:
        return Statement(what, unit, delta, reason=reason)
    parts = [(kind, n) for kind, n in noises.items() if not isinstance(n, str)]
    counts = _participation(rounds)
    by_round = []
    for i in _selected_rounds(rounds):
        releases = [_release(kind, noise, counts[i], population, cohort) for kind, noise in parts]
        by_round.append((rounds[i].round, epsilon(releases, delta)))
    return Statement(what, unit, delta, tuple(by_round))


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
