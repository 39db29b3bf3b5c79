"""A round whose outcome has no use for a next one: it is made again without the uploads of the largest changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedblend.core.cohort import EARLIER, BegunRound, Cohorts
from fedblend.core.engine import CohortResult, aggregator_of
from fedblend.core.errors import FedblendError, listed
from fedblend.core.record import RoundRecord
from fedblend.core.state import RunState

Finished = tuple[RunState, RoundRecord]


class Diverged(FedblendError):
    """A round's aggregate is out of bounds, or the loss of its model is not finite."""


def without_extremes(
    finish: Callable[..., Finished], cohorts: Cohorts, begun: BegunRound, result: CohortResult, diverged: str
) -> Finished:
    """Make the steps after training, :meth:`RoundLoop._finish`, without the uploads of the largest changes.

    As few are left out as make the round good; changes within a factor of ten of the largest go together. Where no
    upload can stay, simulated clients have diverged, and the round counts with all of them. With real clients the run
    stops, so that it can go on from its checkpoint; with a masked sum it stops at once, because no upload can be left
    out.
    """
    task, cohort = begun.task, listed([client for client, _, _ in result.good])
    start, aggregator = cohorts.setup.shared(task.weights), aggregator_of(cohorts.setup, task.round)
    stopped = f"round {task.round + 1}: {diverged}, with the uploads of clients {cohort}"
    is_real = cohorts.engine.secret_rng() is not None
    if is_real and aggregator.works_on == "sums":
        raise FedblendError(
            f"{stopped}, which are masked: none can be left out alone; {EARLIER}: end the SuperNode of the site at "
            "fault, or give smaller steps, and continue the run"
        )
    if len(result.uploads) < len(result.good) or (result.extras and not result.each_extras):
        result = cohorts.train(replace(task, keeps_uploads=True), result.cohort, result.lost)
    sizes: dict[int, float] = {}
    for client, _, _ in result.good:
        changes = [t.double() - start[n] if n in start else t for n, t in result.uploads[client].items()]
        beside = result.each_extras.get(client, {}).values()
        sizes[client] = max((float(t.abs().max()) for t in (*changes, *beside) if t.numel()), default=0.0)
    left = result
    while sizes:
        most = max(sizes.values())
        why = f"with its changes of up to {most:.3g} {diverged} (a learning rate, or inputs, too large?)"
        left = left.without({c: why for c, size in sizes.items() if size >= most / 10}, aggregator)
        sizes = {c: size for c, size in sizes.items() if size < most / 10}
        try:
            outcome = finish(begun, left)
        except FedblendError as error:
            if is_real and not isinstance(error, Diverged):
                raise
            continue
        if sizes:
            cohorts.require_enough(task, left)
            return outcome
        if is_real:
            raise FedblendError(f"{stopped} (a learning rate, or inputs, too large?); {EARLIER}")
    return finish(begun, result, bounded=False)
