"""Privacy in reports: methods that share raw samples, and the (epsilon, delta) that noise gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.analysis.privacy.statements import Statement, is_private, statements
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.experiment.config import resolve
from fedblend.runs.groups import Group, Outcome

PRIVACY_NOTE = "breaks privacy"


def part_class(config: Mapping[str, Any], kind: str) -> type | None:
    """The class of a method's part, or ``None`` where it cannot be imported."""
    try:
        return registry.find(kind, config["method"][kind]["name"])
    except (FedblendError, KeyError, TypeError):
        return None


def shares_raw_samples(config: Mapping[str, Any]) -> bool:
    """Whether a method shares raw samples, by its sharing, objective or server step, or as means of one sample."""
    sharing, *others = (part_class(config, kind) for kind in ("sharing", "objective", "server_step"))
    flags = [getattr(cls, flag, False) for cls in (sharing, *others) for flag in ("unsafe", "breaks_privacy")]
    table = config["method"].get("sharing", {})
    leaves_client = bool(getattr(sharing, "leaves_client", False))
    return any(flags) or (leaves_client and isinstance(table, Mapping) and table.get("samples_per_mean") == 1)


@dataclass(frozen=True)
class Guarantee:
    """The differential privacy of one kind of payload of a method: the weakest over its seeds."""

    method: str
    what: str
    """The kind of payload."""
    unit: str
    """What is protected, such as a client or a sample."""
    epsilon: float | None
    """Epsilon of the whole run; ``None`` without a guarantee."""
    delta: float
    reason: str
    """Why there is no guarantee; empty with one."""
    by_round: Mapping[int, float]
    """Epsilon from the start to each round."""

    @property
    def short(self) -> str:
        """Epsilon, or "none"."""
        return "none" if self.epsilon is None else epsilon_text(self.epsilon)

    @property
    def text(self) -> str:
        """Epsilon and delta, or the reason why there are none."""
        return f"none: {self.reason}" if self.epsilon is None else f"({self.short}, {self.delta:g})"


def epsilon_text(epsilon: float) -> str:
    """An epsilon with three digits, rounded up: a smaller number would claim too much.

    >>> epsilon_text(3.14159), epsilon_text(123.4), epsilon_text(0.01234)
    ('3.15', '124', '0.0124')
    """
    if not math.isfinite(epsilon) or epsilon == 0:
        return f"{epsilon:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(epsilon))))
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:.{digits}f}"


def run_statements(outcome: Outcome) -> list[Statement]:
    """The privacy statements of a run; none if it adds no noise, or if its parts cannot be imported."""
    try:
        experiment = resolve(outcome.config)
    except FedblendError:
        return []
    if not is_private(experiment):
        return []
    clients = outcome.facts.get("clients", {})
    holding = int(clients.get("holding", clients.get("number", 0)))
    # Cohorts are drawn from the experiment's seed, which every site of a real federation receives.
    secret_cohorts = outcome.facts.get("engine", {}).get("engine") != "flower"
    try:
        return statements(experiment, holding, outcome.records, secret_cohorts)
    except FedblendError as error:
        return [Statement("weights", "a client", experiment.delta, reason=str(error))]


def guarantees(groups: Sequence[Group]) -> list[Guarantee]:
    """The guarantees of each method that adds noise, the weakest over its seeds."""
    found = []
    for g in groups:
        by_payload: dict[str, list[Statement]] = {}
        for outcome in g.counted:
            for statement in run_statements(outcome):
                by_payload.setdefault(statement.what, []).append(statement)
        found += [_weakest(g.name, over_seeds) for over_seeds in by_payload.values()]
    return found


def _weakest(method: str, over_seeds: Sequence[Statement]) -> Guarantee:
    first = over_seeds[0]
    reason = next((one.reason for one in over_seeds if one.reason), "" if first.by_round else "no round has been made")
    by_round: dict[int, float] = {}
    for statement in over_seeds:
        for round, value in statement.by_round:
            by_round[round] = max(value, by_round.get(round, 0.0))
    epsilon = None if reason else max(by_round.values())
    return Guarantee(method, first.what, first.unit, epsilon, first.delta, reason, {} if reason else by_round)


def epsilon_by_round(found: Sequence[Guarantee]) -> dict[str, Mapping[int, float]]:
    """Epsilon by method and round, for all payloads together: the last guarantee of each method covers them all."""
    last = {guarantee.method: guarantee for guarantee in found}
    return {name: guarantee.by_round for name, guarantee in last.items() if guarantee.by_round}
