"""Differential privacy statements of a run: (epsilon, delta) by round, or the reason why none holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.analysis.privacy.accountant import Release, epsilon
from fedblend.core.protection import Mechanism
from fedblend.experiment.config import Experiment

MOST_ROUNDS = 12
"""Most rounds at which epsilon is computed, for a curve."""

SCOPE = (
    "A guarantee covers the payloads that it names, when all data of one client (or one sample) are replaced by "
    "others. The number of samples of each client, the scale of inputs, and the test accuracy count as public. The "
    "guarantee does not cover the training loss and the list of participants that a simulation writes into its log. A "
    "simulation draws noise and cohorts from streams keyed by the seed, so that a run can be repeated. Whoever knows "
    "the seed can remove the noise, and knows the cohorts."
)
"""The assumptions of every (epsilon, delta)."""


@dataclass(frozen=True)
class Statement:
    """(epsilon, delta) of the payloads that left the clients up to each of some rounds, or why none can be stated."""

    what: str
    """The payloads: "weights", "means", or "weights and means"."""
    unit: str
    """The protected unit: "a client" or "a sample"."""
    delta: float
    by_round: tuple[tuple[int, float], ...] = ()
    """(round, epsilon) pairs."""
    reason: str = ""
    """Why no epsilon can be stated."""

    @property
    def epsilon(self) -> float | None:
        """Epsilon after the last round, or ``None``."""
        return self.by_round[-1][1] if self.by_round else None


def is_private(experiment: Experiment) -> bool:
    """Whether an experiment adds noise to uploads or to shared data."""
    sharing = experiment.method.sharing
    return isinstance(experiment.protection.mechanism(), Mechanism) or isinstance(sharing.mechanism(), Mechanism)


def statements(
    experiment: Experiment, clients: int, records: Sequence[Mapping[str, Any]], secret_cohorts: bool
) -> list[Statement]:
    """The statements of a run, from its settings, the number of clients that hold samples, and its metrics.

    ``secret_cohorts`` is true where no recipient of the models knows the participants of a round. The last statement
    covers all payloads that left the clients. Raises :class:`FedblendError` if dp-accounting is needed and not
    installed.
    """
    rounds = [r for r in records if r.get("round", 0) > 0]
    population = clients if secret_cohorts else None
    weights, means = weights_noise(experiment), means_noise(experiment)
    if means == "":
        return [_statement("weights", "a client", experiment, population, rounds, {"weights": weights})]
    # There is no statement of the weights alone: all clients train on the means, so that all weights depend on each
    # sample, but the noise on weights is sized for the influence of a client's own samples only.
    both = {"weights": weights, "means": means}
    return [
        _statement("means", "a sample", experiment, population, rounds, {"means": means}),
        _statement("weights and means", "a sample", experiment, population, rounds, both),
    ]


def weights_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on uploads, or why it gives no (epsilon, delta)."""
    noise, method = experiment.protection.mechanism(), experiment.method
    if isinstance(noise, str):
        return noise
    if method.server_step.breaks_privacy:
        return f"the server step '{method.server_step.name}' uses raw samples"
    if method.sharing.server is not None:
        return f"the server trains on the samples of client {method.sharing.server} without noise (method.sharing)"
    shared = means_noise(experiment)
    if isinstance(shared, str) and shared:
        return f"clients train on shared data, and {shared}"
    if noise.at_server and not method.aggregator.is_plain_mean:
        return (
            "noise at the server is sized for a plain mean of uploads; "
            'method.aggregator = {name = "mean", by = "clients"} is one'
        )
    if noise.at_server and method.server_step.looks_at_uploads:
        return f"the server step '{method.server_step.name}' uses uploads before noise is added to them"
    return noise


def means_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on shared data, or why it gives no (epsilon, delta); "" where nothing is shared."""
    sharing = experiment.method.sharing
    return sharing.mechanism() if sharing.active and sharing.leaves_client else ""


def _statement(
    what: str,
    unit: str,
    experiment: Experiment,
    population: int | None,
    rounds: Sequence[Mapping[str, Any]],
    noises: Mapping[str, Mechanism | str],
) -> Statement:
    reason = next((n for n in noises.values() if isinstance(n, str)), "")
    if reason:
        return Statement(what, unit, experiment.delta, reason=reason)
    parts = [(kind, n) for kind, n in noises.items() if isinstance(n, Mechanism)]
    counts = _participation(rounds)
    by_round = []
    for i in _selected_rounds(rounds):
        releases = [_release(kind, noise, counts[i], population, experiment.train.cohort) for kind, noise in parts]
        by_round.append((int(rounds[i]["round"]), epsilon(releases, experiment.delta)))
    return Statement(what, unit, experiment.delta, tuple(by_round))


def _selected_rounds(rounds: Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the rounds for which epsilon is computed: some of the evaluated rounds, and the last round."""
    evaluated = [i for i, record in enumerate(rounds) if "loss" in record] or list(range(len(rounds)))
    step = -(-len(evaluated) // MOST_ROUNDS) or 1
    return sorted({*evaluated[::-step], *([len(rounds) - 1] if rounds else [])})


def _participation(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """Counts after each round: rounds, rounds of the most frequent participant, and sharings."""
    by_client: Counter[int] = Counter()
    most, shared, counts = 0, 0, []
    for number, record in enumerate(rounds, 1):
        by_client.update(record.get("cohort", ()))
        most = max([most, *(by_client[c] for c in record.get("cohort", ()))])
        shared += "shared" in record
        counts.append({"rounds": number, "most": most, "shared": shared})
    return counts


def _release(kind: str, noise: Mechanism, counts: Mapping[str, int], population: int | None, cohort: int) -> Release:
    """The releases so far: sums of clients drawn in secret from a ``population``, or those of one client's rounds.

    Where cohorts are public (``population`` is ``None``), the sums that a client is in are known: those of its rounds.
    """
    if kind == "means":
        return Release(noise.distribution, noise.multiplier, counts["shared"])
    if noise.at_server and population is not None:
        return Release(noise.distribution, noise.multiplier, counts["rounds"], (population, cohort))
    return Release(noise.distribution, noise.multiplier, counts["most"])
