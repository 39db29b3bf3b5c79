"""What a run may claim of differential privacy, and why not where it may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.analysis.privacy.accountant import Release, epsilon
from fedblend.core.protection import Mechanism
from fedblend.experiment.config import Experiment

MOST_ROUNDS = 12
"""Rounds at which epsilon is worked out, at most: for a curve."""

SCOPE = (
    "A guarantee covers what it names, when all data of one client (or one sample) are replaced by others. It counts "
    "as known to all: how many samples each client holds, the scale of inputs, and the test accuracy. It does not "
    "cover the training loss and the list of who took part that a simulation writes into its log. A simulation draws "
    "noise and cohorts from keyed streams, so that a run can be repeated: who knows the seed can take its noise off "
    "again, and knows who was drawn."
)
"""What every (epsilon, delta) here rests on."""


@dataclass(frozen=True)
class Statement:
    """(epsilon, delta) of what left the clients up to each of some rounds, or why none can be stated.

    ``what`` left ("weights", or "means" and "weights and means") and what is protected, ``unit`` ("a client" or
    "a sample").
    """

    what: str
    unit: str
    delta: float
    by_round: tuple[tuple[int, float], ...] = ()
    reason: str = ""

    @property
    def epsilon(self) -> float | None:
        """Epsilon after the last round, or ``None``."""
        return self.by_round[-1][1] if self.by_round else None


def is_private(experiment: Experiment) -> bool:
    """Whether an experiment adds noise anywhere, so that there is something to state."""
    sharing = experiment.method.sharing
    return isinstance(experiment.protection.mechanism(), Mechanism) or isinstance(sharing.mechanism(), Mechanism)


def statements(
    experiment: Experiment, clients: int, records: Sequence[Mapping[str, Any]], secret_cohorts: bool
) -> list[Statement]:
    """What a run may claim, from its settings, the number of clients that hold samples, and its metrics.

    ``secret_cohorts`` says that nobody who sees the models knows who took part. The last statement is of all that left
    the clients. Raises :class:`FedblendError` if dp-accounting is needed and not installed.
    """
    rounds = [r for r in records if r.get("round", 0) > 0]
    population = clients if secret_cohorts else None
    weights, means = weights_noise(experiment), means_noise(experiment)
    if means == "":
        return [_stated("weights", "a client", experiment, population, rounds, {"weights": weights})]
    # None of the weights alone: other clients train on the means, so that all weights depend on a sample through the
    # means as well, and noise on weights is sized for what its own client does with it.
    both = {"weights": weights, "means": means}
    return [
        _stated("means", "a sample", experiment, population, rounds, {"means": means}),
        _stated("weights and means", "a sample", experiment, population, rounds, both),
    ]


def weights_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on uploads, or why it earns nothing."""
    noise, method = experiment.protection.mechanism(), experiment.method
    if isinstance(noise, str):
        return noise
    if method.server_step.breaks_privacy:
        return f"the server step '{method.server_step.name}' uses raw samples"
    if method.sharing.server is not None:
        return f"the server trains on the samples of client {method.sharing.server} without noise (method.sharing)"
    shared = means_noise(experiment)
    if isinstance(shared, str) and shared:
        return f"clients train on what others shared, and {shared}"
    if noise.at_server and not method.aggregator.is_plain_mean:
        return (
            "noise at the server is sized for a plain mean of uploads; "
            'method.aggregator = {name = "mean", by = "clients"} is one'
        )
    if noise.at_server and method.server_step.looks_at_uploads:
        return f"the server step '{method.server_step.name}' looks at uploads before there is noise on them"
    return noise


def means_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on what is shared, or why it earns nothing; "" where nothing is."""
    sharing = experiment.method.sharing
    return sharing.mechanism() if sharing.active and sharing.leaves_client else ""


def _stated(
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
    taken = _taken(rounds)
    found = []
    for i in _told(rounds):
        releases = [_release(kind, noise, taken[i], population, experiment.train.cohort) for kind, noise in parts]
        found.append((int(rounds[i]["round"]), epsilon(releases, experiment.delta)))
    return Statement(what, unit, experiment.delta, tuple(found))


def _told(rounds: Sequence[Mapping[str, Any]]) -> list[int]:
    """Places of the rounds that epsilon is worked out for: some of those that were evaluated, and the last."""
    evaluated = [i for i, record in enumerate(rounds) if "loss" in record] or list(range(len(rounds)))
    step = -(-len(evaluated) // MOST_ROUNDS) or 1
    return sorted({*evaluated[::-step], *([len(rounds) - 1] if rounds else [])})


def _taken(rounds: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    """After each round: rounds made, rounds that the most frequent client took part in, and sharings."""
    part: Counter[int] = Counter()
    most, shared, taken = 0, 0, []
    for number, record in enumerate(rounds, 1):
        part.update(record.get("cohort", ()))
        most = max([most, *(part[c] for c in record.get("cohort", ()))])
        shared += "shared" in record
        taken.append({"rounds": number, "most": most, "shared": shared})
    return taken


def _release(kind: str, noise: Mechanism, taken: Mapping[str, int], population: int | None, cohort: int) -> Release:
    """What was given away so far: a sum of clients drawn in secret from a ``population``, or each client's own.

    Whoever knows the cohorts (no ``population``) knows which sums a client is in: those of its own rounds, in full.
    """
    if kind == "means":
        return Release(noise.distribution, noise.multiplier, taken["shared"])
    if noise.at_server and population is not None:
        return Release(noise.distribution, noise.multiplier, taken["rounds"], (population, cohort))
    return Release(noise.distribution, noise.multiplier, taken["most"])
