"""What is checked before the first round, because it could not work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedblend.core.callbacks import Callback
from fedblend.core.columns import require_column
from fedblend.core.context import ModelSpec
from fedblend.core.errors import FedblendError, listed
from fedblend.core.setup import Experiment, Setup


def require_possible(setup: Setup, spec: ModelSpec, callbacks: Sequence[Callback]) -> None:
    """Raise :class:`FedblendError` for what could not work, before training."""
    experiment: Experiment = setup.experiment
    method = setup.method
    # Clients that hold samples do so in every round, also where more arrive.
    cohort, holding = experiment.train.cohort, int(np.count_nonzero(setup.population.sizes))
    if not holding:
        raise FedblendError(f"partition: none of its {len(setup.population)} clients hold samples; at least one must")
    # Of real sites with data of their own, those that take part may be fewer.
    if cohort > holding and not setup.population.elsewhere:
        raise FedblendError(
            f"train.cohort: {cohort} clients a round, but only {holding} of {len(setup.population)} clients "
            f"hold samples; valid: 1 to {holding}"
        )
    experiment.selection.require_possible(np.flatnonzero(setup.population.sizes), min(cohort, holding))
    columns = {f"slow.{name}": getattr(experiment.slow, name, None) for name in ("epochs", "seconds")}
    columns |= {"method.aggregator.by": getattr(method.aggregator, "by", None)}
    for field, given in columns.items():
        if given not in (None, "samples", "clients"):
            require_column(given, len(setup.population), field)
    reading = [getattr(one, "name", type(one).__name__) for one in callbacks if one.reads_uploads]
    if reading and method.aggregator.works_on == "sums":
        raise FedblendError(
            f"callbacks: {listed(reading)} reads each client's upload, which '{method.aggregator.name}' in "
            "method.aggregator hides from the server; valid: another aggregator, such as mean"
        )
    if experiment.evaluates_each:
        setup.own_tests()
    method.aggregator.require_possible(min(cohort, holding))
    method.server_step.require_possible(spec)
    method.server_step.require_training(setup.training, int(setup.population.sizes.max()))
    setup.requests(setup.sizes(0))
    if method.objective.needs or method.server_step.needs_pool or method.sharing.plan.after_training:
        method.sharing.require_possible(setup.sizes(0), experiment.policy.min_mean)
