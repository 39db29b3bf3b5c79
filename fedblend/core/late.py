"""Late uploads: put aside in the round in which a client trains, and counted in that in which they arrive."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedblend.core.engine import CohortResult, TrainTask, aggregator_of
from fedblend.core.setup import Setup
from fedblend.core.state import RunState
from fedblend.core.trees import Tensors, add_prefix, by_client, for_clients, strip_prefix

LATE = "late"
"""Slot of the server's state with the uploads that are awaited, by client."""


def awaited(state: RunState) -> dict[int, dict[str, torch.Tensor]]:
    """The late uploads that have not arrived, by client: ``due``, int64 [3], is the round in which one arrives, that in
    which it was made, and the client's samples; ``change/NAME`` is how far the client moved the model."""
    return by_client("", state.server_part(LATE))


def delivered(setup: Setup, state: RunState, task: TrainTask, result: CohortResult) -> CohortResult:
    """The result without the uploads that are late, and with earlier ones that arrive in this round.

    An upload that was made s rounds ago counts as w + (1 + s)^-a (w_k - w_then), with a the option ``staleness``: the
    client's change is added to the current model, weighted down (FedBuff, Nguyen et al. 2022, section 5: a = 1/2).
    Integer tensors are the current model's.
    """
    waiting, begun = awaited(state), setup.shared(task.weights)
    late = {client: delay for client, work in result.work.items() if (delay := work.delay)}
    arriving = {client: waiting.pop(client) for client in [*waiting] if int(waiting[client]["due"][0]) <= task.round}
    good = {client: (samples, loss) for client, samples, loss in result.good}
    uploads = dict(result.uploads)
    for client in late.keys() & good.keys():
        due = torch.tensor([task.round + late[client], task.round, good.pop(client)[0]])
        waiting[client] = {"due": due, **add_prefix("change/", _change(uploads.pop(client), begun))}
    for client, table in arriving.items():
        _, made, samples = table["due"].tolist()
        factor = (1 + task.round - made) ** -setup.experiment.slow.staleness
        good[client] = (samples, None)
        uploads[client] = _moved(begun, strip_prefix("change/", table), factor)
    if not (late or arriving):
        return result
    aggregator = aggregator_of(setup, task.round)
    return replace(
        result,
        good=[(client, *good[client]) for client in sorted(good)],
        uploads=uploads,
        stale=sorted(arriving),
        partial=aggregator.partial((uploads[c], aggregator.weigh(c, good[c][0])) for c in sorted(good)),
        awaited=for_clients("", waiting),
    )


def _change(upload: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    return {name: upload[name] - w for name, w in start.items() if w.is_floating_point()}


def _moved(start: Tensors, change: Tensors, factor: float) -> dict[str, torch.Tensor]:
    return {name: w + factor * change[name] if name in change else w for name, w in start.items()}
