"""Uploads: the payload that a client sends each round, and its validation."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fedblend.core.aggregator import Aggregator, Tensors, WeightedUpload
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Task
from fedblend.core.registry import Count, part
from fedblend.core.upload import Upload
from fedblend.methods.aggregators.mean import WeightedMean


@part("upload", "model")
class Model(Upload):
    """Send the client's weights after training (FedAvg)."""

    from_round: Count = 1
    """First round in which clients train, counted from 1; before it only the server trains (XorMixFL as a warm start:
    2).
    """

    def trains_in(self, round: int) -> bool:
        """Whether ``round``, counted from 0, is ``from_round`` or later."""
        return round + 1 >= self.from_round

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The weights."""
        return dict(weights)

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """The round's weights."""
        return weights


ROUNDING = 1e-3
"""Largest deviation from 1 of the sum of a mean of distributions."""


@part("upload", "outputs")
class Outputs(Upload):
    """Send for each label n the mean of the softmax outputs on samples of that label, over the local steps.

    Mix2FLD, equation 2 (Oh et al. 2020; Jeong et al. 2018): C vectors of C numbers, independent of the model's size.
    The outputs are those that the steps compute before their updates. A label without samples, for which equation 2
    would be 0 / 0, has a row of zeros.
    """

    bytes_kind = "outputs"
    is_model = False
    watches = True

    def require_possible(self, task: Task) -> None:
        """Raise :class:`FedblendError` unless the task has classes."""
        if task.kind != "classification":
            raise FedblendError(
                "method.upload: 'outputs' sends means by class, but these data have no classes; valid: model"
            )

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The means [C, C]."""
        assert outputs is not None
        return {"outputs": outputs}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Float32 [C, C]."""
        return {"outputs": torch.zeros(task.outputs, task.outputs)}

    def fault(self, payload: Tensors, weights: Tensors, task: Task) -> str | None:
        """As :meth:`Upload.fault`; also rows that are neither a distribution nor zeros."""
        fault = super().fault(payload, weights, task)
        if fault:
            return fault
        rows = payload["outputs"]
        sums = rows.sum(1)
        if bool((rows < 0).any()) or bool((((sums - 1).abs() > ROUNDING) & (sums != 0)).any()):
            return "'outputs' has a row that is no distribution over the classes (nor all zeros)"
        return None

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """The mean by label over the clients that have samples of it."""
        return LabelMeanAggregator()


class LabelMeanAggregator(Aggregator):
    """Compute G_n, the mean of the clients' mean outputs for label n, over the clients with samples of that label.

    Mix2FLD, section II-B, without the devices that have no samples of a label. A label without samples on any client
    has a row of zeros.
    """

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        """{"outputs": [C, C]}."""
        rows = torch.stack([tensors["outputs"] for tensors, _ in uploads]).double()
        clients = (rows.sum(2) > 0).sum(0)
        return {"outputs": (rows.sum(0) / clients.clamp(min=1)[:, None]).float()}


@part("upload", "nothing")
class NoUpload(Upload):
    """Neither train nor send anything in a round; the server only has what clients shared before."""

    is_model = False
    trains = False


@part("upload", "silent")
class Silent(Upload):
    """Train but send nothing: with ``stateful_clients`` each client trains alone, without a federation.

    This is the baseline of a federation: with ``evaluate_model = "each"`` every client's model is tested on that
    client's own test samples.
    """

    is_model = False

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Nothing."""
        return {}

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """A mean; payloads are empty."""
        return WeightedMean()
