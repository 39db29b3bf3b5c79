"""Privacy in reports: methods that share raw samples, and the (epsilon, delta) that noise gives."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedblend.analysis.privacy.statements import Statement, statements
from fedblend.core import registry
from fedblend.core.errors import FedblendError
from fedblend.experiment.index import Entry, index
from fedblend.runs.directory import CONFIG
from fedblend.runs.groups import Group, Outcome

PRIVACY_NOTE = "breaks privacy"

STRENGTHS = ((1.0, "strong"), (10.0, "moderate"))
"""Largest epsilon of each word. TensorFlow Privacy's guide asks for less than 10, and for less than 1 "for more
stringent privacy guarantees"."""

NO_STRENGTH = "protects nothing"  # The word for a larger epsilon

WORDS_NOTE = (
    "In words: strong up to epsilon 1, moderate up to 10. Above that the guarantee protects nothing. The share is the "
    "largest that the guarantee allows to an attacker who knows all other data, and guesses which of two values a "
    "client (or a sample) had. Without the payloads, half of the guesses are right."
)
"""What :attr:`Guarantee.words` means, for readers."""


def shares_raw_samples(outcome: Outcome) -> bool:
    """Whether a run shares raw samples, by its facts.

    Runs of fedblend 0.1 lack that fact: there, whether a sharing, objective or server step of fedblend does.
    """
    if (facts := outcome.facts.get("privacy")) is not None:
        return bool(facts["raw_samples"])
    sharing, *others = (_entry(outcome.config, kind) for kind in ("sharing", "objective", "server_step"))
    size = outcome.config["method"]["sharing"].get("samples_per_mean") if sharing and sharing.leaves_client else None
    single = size is not None and 1 in (size, outcome.config.get("policy", {}).get("min_mean"))
    return single or any(part and part.sends_raw_samples for part in (sharing, *others))


def _entry(config: Mapping[str, Any], kind: str) -> Entry | None:
    """The entry of a method's part in the index; ``None`` for a part of the user's own."""
    part = config["method"].get(kind)
    return index().parts[kind].get(str(part.get("name"))) if isinstance(part, Mapping) else None


@dataclass(frozen=True)
class Guarantee:
    """The differential privacy of one kind of payload of a method: the weakest over its seeds."""

    method: str
    what: str
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

    @property
    def words(self) -> str:
        """How strong the guarantee is, and how often an attacker can be right under it."""
        if self.epsilon is None:
            return "no guarantee"
        return f"{strength(self.epsilon)}: a guess is right {right_guesses(self.epsilon, self.delta)} of the time"


def strength(epsilon: float) -> str:
    """The word for an epsilon.

    >>> strength(1.0), strength(9.9), strength(11_015.0)
    ('strong', 'moderate', 'protects nothing')
    """
    return next((word for most, word in STRENGTHS if epsilon <= most), NO_STRENGTH)


def right_guesses(epsilon: float, delta: float) -> str:
    """The largest probability of telling two values of one client or sample apart, each with a prior of one half.

    It is (e^epsilon + delta) / (1 + e^epsilon) (Kairouz, Oh and Viswanath 2015), rounded up.

    >>> right_guesses(0.0, 0.0), right_guesses(1.0, 1e-5), right_guesses(6.0, 1e-5), right_guesses(11_015.0, 1e-5)
    ('up to 50.0 %', 'up to 73.2 %', 'up to 99.8 %', 'practically all')
    """
    inverse = math.exp(-epsilon)
    percent = math.ceil(1000 * (1 + delta * inverse) / (1 + inverse)) / 10
    return f"up to {percent:.1f} %" if percent < 100 else "practically all"


def epsilon_text(epsilon: float) -> str:
    """An epsilon with three digits, rounded up: a smaller number would claim too much.

    >>> epsilon_text(3.14159), epsilon_text(11_014.2), epsilon_text(0.01234)
    ('3.15', '11,015', '0.0124')
    """
    if not math.isfinite(epsilon) or epsilon == 0:
        return f"{epsilon:g}"
    digits = max(0, 2 - math.floor(math.log10(abs(epsilon))))
    return f"{math.ceil(epsilon * 10**digits) / 10**digits:,.{digits}f}"


def run_statements(outcome: Outcome) -> list[Statement]:
    """The privacy statements of a run, by the noise in its facts; none if nothing protects what leaves clients."""
    facts = outcome.facts.get("privacy")
    noise = _noise_of_old_run(outcome.config) if facts is None else facts.get("noise")
    if noise is None:
        return []
    clients = outcome.facts.get("clients", {})
    holding = int(clients.get("holding", clients.get("number", 0)))
    # Cohorts are drawn from the experiment's seed, which every site of a real federation receives.
    secret_cohorts = outcome.facts.get("engine", {}).get("engine") != "flower"
    try:
        return statements(outcome.config, noise, holding, outcome.records, secret_cohorts, clients.get("samples"))
    except KeyError as field:
        raise FedblendError(f"{outcome.path / CONFIG}: {field} is missing; restore the file") from None
    except FedblendError as error:
        return [Statement("weights", "a client", outcome.config["delta"], reason=str(error))]


def _noise_of_old_run(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The noise of a run of fedblend 0.1, whose facts lack it; ``None`` if its parts cannot be built."""
    protection, sharing = config.get("protection"), config["method"].get("sharing")
    noisy_uploads = isinstance(protection, Mapping) and protection.get("name") != "none"
    if not noisy_uploads and not (isinstance(sharing, Mapping) and sharing.get("multiplier")):
        return None
    # These import PyTorch.
    from fedblend.experiment.config import resolve
    from fedblend.experiment.privacy_facts import privacy_facts

    try:
        return privacy_facts(resolve(config)).get("noise")
    except registry.UntrustedCode:
        return {"weights": "the facts of this run of fedblend 0.1 lack its noise, and its own code is not imported"}
    except FedblendError:
        return None


def guarantees(groups: Sequence[Group]) -> list[Guarantee]:
    """The guarantees of each method with any protection, the weakest over its seeds."""
    found = []
    for g in groups:
        by_payload: dict[str, list[Statement]] = {}
        for outcome in g.counted:
            for statement in run_statements(outcome):
                by_payload.setdefault(statement.what, []).append(statement)
        found += [weakest(g.name, over_seeds) for over_seeds in by_payload.values()]
    return found


def weakest(method: str, over_seeds: Sequence[Statement]) -> Guarantee:
    """Return the guarantee of a method from the statements of its seeds."""
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
