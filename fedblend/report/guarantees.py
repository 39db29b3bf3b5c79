"""What runs may claim of differential privacy: a table of it, and accuracy against epsilon."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedblend.analysis.privacy.statements import Statement, is_private, statements
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import resolve
from fedblend.runs.groups import Group, Outcome


@dataclass(frozen=True)
class Guarantee:
    """What one method may claim of one kind of what left its clients: the weakest over its seeds."""

    method: str
    what: str
    unit: str
    epsilon: float | None
    delta: float
    reason: str
    by_round: Mapping[int, float]

    @property
    def short(self) -> str:
        """Epsilon, or that there is none."""
        return "none" if self.epsilon is None else short(self.epsilon)

    @property
    def text(self) -> str:
        """Epsilon and delta, or why there are none."""
        return f"none: {self.reason}" if self.epsilon is None else f"({self.short}, {self.delta:g})"


def short(epsilon: float) -> str:
    """An epsilon as it is written: rounded up, so that no more is claimed than is true.

    >>> short(3.14159), short(123.4), short(0.01234)
    ('3.15', '124', '0.0124')
    """
    if not math.isfinite(epsilon) or epsilon == 0:
        return f"{epsilon:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(epsilon))))
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:.{digits}f}"


def of_run(outcome: Outcome) -> list[Statement]:
    """What a run may claim; nothing of one that adds no noise, or whose own parts cannot be imported here."""
    try:
        experiment = resolve(outcome.config)
    except FedblendError:
        return []
    if not is_private(experiment):
        return []
    clients = outcome.facts.get("clients", {})
    holding = int(clients.get("holding", clients.get("number", 0)))
    # Cohorts are drawn from the experiment's seed, which every site of a real federation is told.
    secret_cohorts = outcome.facts.get("engine", {}).get("engine") != "flower"
    try:
        return statements(experiment, holding, outcome.records, secret_cohorts)
    except FedblendError as error:
        return [Statement("weights", "a client", experiment.delta, reason=str(error))]


def guarantees(groups: Sequence[Group]) -> list[Guarantee]:
    """What each method that adds noise may claim, over its seeds."""
    made = []
    for g in groups:
        by_what: dict[str, list[Statement]] = {}
        for outcome in g.counted:
            for one in of_run(outcome):
                by_what.setdefault(one.what, []).append(one)
        made += [_weakest(g.name, same) for same in by_what.values()]
    return made


def _weakest(method: str, alike: Sequence[Statement]) -> Guarantee:
    first = alike[0]
    reason = next((one.reason for one in alike if one.reason), "" if first.by_round else "no round has been made")
    by_round: dict[int, float] = {}
    for one in alike:
        for round, value in one.by_round:
            by_round[round] = max(value, by_round.get(round, 0.0))
    epsilon = None if reason else max(by_round.values())
    return Guarantee(method, first.what, first.unit, epsilon, first.delta, reason, {} if reason else by_round)


def drawable(made: Sequence[Guarantee]) -> dict[str, Mapping[int, float]]:
    """Epsilon by round of each method whose every payload is covered: of all that left its clients together."""
    last = {one.method: one for one in made}
    return {name: one.by_round for name, one in last.items() if one.by_round}
