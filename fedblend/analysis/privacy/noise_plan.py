"""The (epsilon, delta) of an experiment before it runs, and the noise that a wanted epsilon needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from fedblend.analysis.privacy.statements import Statement, statements
from fedblend.core.errors import FedblendError
from fedblend.core.record import RoundRecord
from fedblend.core.setup import Setup, cohort_of
from fedblend.experiment.config import Experiment, as_table, resolve
from fedblend.experiment.parts import has_option
from fedblend.experiment.privacy_facts import noise_facts
from fedblend.experiment.toml_tables import set_field
from fedblend.runs.groups import flatten

FIELDS = {"weights": "protection.multiplier", "means": "method.sharing.multiplier"}
"""The field with the noise on each kind of payload, as a multiple of the most that one client or sample changes it."""

FARTHEST = 2.0**40  # Largest factor on the noise that a search tries; one over it is the smallest
PRECISION = 1e-3  # Relative precision of the search; multipliers are then rounded up to three digits


def planned(setup: Setup, secret_cohorts: bool = True) -> list[Statement]:
    """The statements that a run has after all of its rounds; one that ends early or loses uploads releases less.

    ``secret_cohorts`` is as in :func:`statements`. Raises :class:`FedblendError` where the number of sharings is known
    after the run only.
    """
    experiment, sizes = setup.experiment, setup.population.sizes
    sharing, upload = experiment.method.sharing, experiment.method.upload
    shares = sharing.plan.leaves
    if shares and (experiment.channel.loses or (experiment.arrival is not None and sharing.refresh is not None)):
        why = "payloads may be lost and sent again" if experiment.channel.loses else "clients share new data (refresh)"
        raise FedblendError(f"method.sharing: '{sharing.name}': {why}, so that only the run itself has an epsilon")
    records = [
        RoundRecord(
            round + 1,
            cohort=cohort_of(setup, round).tolist() if upload.trains_in(round) else None,
            shared={} if shares and sharing.shares_in(round, experiment.rounds) else None,
            # Statements are about evaluated rounds.
            loss=0.0 if round + 1 == experiment.rounds else None,
        )
        for round in range(experiment.rounds)
    ]
    holding, samples = int((sizes > 0).sum()), int(sizes.sum())
    return statements(as_table(experiment), noise_facts(experiment), holding, records, secret_cohorts, samples)


def least_noise(setup: Setup, target: float, secret_cohorts: bool = True) -> tuple[dict[str, float], Statement]:
    """The least multipliers, by field, with which a run has at most the epsilon ``target``, and its statement then.

    The statement is the last one of the run that has an epsilon. Where uploads and means both need noise, their
    multipliers keep their ratio; one that is 0 or not given counts as 1. Raises :class:`FedblendError` if no noise
    gives such an epsilon.
    """
    if not 0 < target < math.inf:
        raise FedblendError(f"target: {target:g} is no epsilon to reach; valid: a number above 0, such as 3")
    given = _multipliers(setup.experiment)

    def reached(values: Mapping[str, float]) -> Statement:
        found = planned(replace(setup, experiment=_with(setup.experiment, values)), secret_cohorts)
        return next((one for one in reversed(found) if one.epsilon is not None), found[-1])

    def is_enough(factor: float) -> bool:
        statement = reached({field: value * factor for field, value in given.items()})
        if statement.epsilon is None:
            raise FedblendError(f"no noise gives an epsilon: {statement.reason or 'no round is made'}")
        return statement.epsilon <= target

    high = 1.0
    while not is_enough(high):
        high *= 2
        if high > FARTHEST:
            raise FedblendError(f"no noise reaches epsilon {target:g} in {setup.experiment.rounds} rounds")
    low = high / 2
    while low > 1 / FARTHEST and is_enough(low):
        low, high = low / 2, low
    while high > low * (1 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    values = {field: _rounded_up(value * high) for field, value in given.items()}
    return values, reached(values)


def _multipliers(experiment: Experiment) -> dict[str, float]:
    """The multiplier of each kind of payload that may have noise, by field; 1 where it has none."""
    fields = [FIELDS[kind] for kind in noise_facts(experiment) if has_option(experiment, FIELDS[kind])]
    table = flatten(as_table(experiment))
    return {field: table.get(field) or 1.0 for field in fields}


def _with(experiment: Experiment, values: Mapping[str, float]) -> Experiment:
    table = as_table(experiment)
    for field, value in values.items():
        set_field(table, field, value)
        if field == FIELDS["weights"]:
            table["protection"].pop("scale", None)
    return resolve(table)


def _rounded_up(value: float) -> float:
    """Return a number with three digits, not below ``value``.

    >>> _rounded_up(1.2341), _rounded_up(0.05), _rounded_up(5231.0)
    (1.24, 0.05, 5240.0)
    """
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return float(f"{math.ceil(round(value / unit, 6)) * unit:.6g}")
