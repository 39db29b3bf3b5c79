"""What a run may claim of differential privacy, and why not where it may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.config import Experiment
from fedblend.privacy.accountant import Release, epsilon
from fedblend.protection import Mechanism

MOST_ROUNDS = 12
"""Rounds at which epsilon is worked out, at most: for a curve."""

SCOPE = (
    "A guarantee covers what it names, when all data of one client (or one sample) are replaced by others. It counts "
    "as known to all: how many samples each client holds, the scale of inputs, and the test accuracy. It does not "
    "cover the training loss and the list of who took part that a simulation writes into its log. Noise here comes "
    "from keyed streams, so that a run can be repeated: who knows the seed can take it off again."
)
"""What every (epsilon, delta) here rests on."""


@dataclass(frozen=True)
class Statement:
    """(epsilon, delta) of what left the clients up to each of some rounds, or why none can be stated.

    ``what`` left ("weights", "means", "weights and means") and what is protected, ``unit`` ("a client" or "a sample").
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


def statements(experiment: Experiment, clients: int, records: Sequence[Mapping[str, Any]]) -> list[Statement]:
    """What a run may claim, from its settings, the number of clients that hold samples, and its metrics.

    Raises :class:`FedblendError` if dp-accounting is not installed.
    """
    rounds = [r for r in records if r.get("round", 0) > 0]
    weights, means = weights_noise(experiment), means_noise(experiment)
    travels = means != ""
    unit = "a sample" if travels else "a client"
    made = [_stated("weights", unit, experiment, clients, rounds, [weights])]
    if travels:
        made.append(_stated("means", "a sample", experiment, clients, rounds, [means]))
        made.append(_stated("weights and means", "a sample", experiment, clients, rounds, [weights, means]))
    return made


def weights_noise(experiment: Experiment) -> Mechanism | str:
    """The noise on uploads, or why it earns nothing."""
    noise, method = experiment.protection.mechanism(), experiment.method
    if isinstance(noise, str):
        return noise
    if method.server_step.breaks_privacy:
        return f"the server step '{method.server_step.name}' uses raw samples"
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
    return sharing.mechanism() if sharing.active and sharing.travels else ""


def _stated(
    what: str,
    unit: str,
    experiment: Experiment,
    clients: int,
    rounds: Sequence[Mapping[str, Any]],
    noises: Sequence[Mechanism | str],
) -> Statement:
    reason = next((n for n in noises if isinstance(n, str)), "")
    if reason:
        return Statement(what, unit, experiment.delta, reason=reason)
    kinds = ["weights", "means"] if len(noises) == 2 else [what]
    parts = [(kind, n) for kind, n in zip(kinds, noises, strict=True) if isinstance(n, Mechanism)]
    taken = _taken(rounds)
    found = []
    for i in _told(rounds):
        releases = [_release(kind, noise, taken[i], clients, experiment.train.cohort) for kind, noise in parts]
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


def _release(kind: str, noise: Mechanism, taken: Mapping[str, int], clients: int, cohort: int) -> Release:
    """What was given away so far: at the server a sum of sampled clients, else each client's own, time after time."""
    if kind == "means":
        return Release(noise.distribution, noise.multiplier, taken["shared"])
    if noise.at_server:
        return Release(noise.distribution, noise.multiplier, taken["rounds"], (clients, cohort))
    return Release(noise.distribution, noise.multiplier, taken["most"])
