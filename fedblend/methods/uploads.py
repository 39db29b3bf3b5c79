"""Uploads: what a client sends each round, and how it is checked."""

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
    """The client's weights after training (FedAvg)."""

    from_round: Count = 1
    """The first round in which clients train; before it only the server does (XorMixFL as a warm start: 2)."""

    def trains_in(self, round: int) -> bool:
        """From ``from_round`` on, which counts from 1."""
        return round + 1 >= self.from_round

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The weights."""
        return dict(weights)

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """The round's weights."""
        return weights


ROUNDING = 1e-3
"""How far a mean of distributions may sum from 1."""


@part("upload", "outputs")
class Outputs(Upload):
    """For each label n the mean of the softmax outputs on samples of that label, over the local steps.

    Mix2FLD, equation 2 (Oh et al. 2020; Jeong et al. 2018): C vectors of C numbers, whatever the model's size. The
    outputs are those that the steps compute anyway, each before its own update. A label of which a client saw no
    sample is a row of zeros, which no distribution is: equation 2 would be 0 / 0 there.
    """

    bytes_kind = "outputs"
    is_model = False
    watches = True

    def require_possible(self, task: Task) -> None:
        """Raise :class:`FedblendError` unless the task has classes."""
        if task.kind != "classification":
            raise FedblendError("method.upload: 'outputs' sends means by class; these data have none; valid: model")

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The means [C, C]."""
        assert outputs is not None
        return {"outputs": outputs}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Float32 [C, C]."""
        return {"outputs": torch.zeros(task.outputs, task.outputs)}

    def fault(self, payload: Tensors, weights: Tensors, task: Task) -> str | None:
        """Also refused: rows that are no distributions."""
        fault = super().fault(payload, weights, task)
        if fault:
            return fault
        rows = payload["outputs"]
        sums = rows.sum(1)
        if bool((rows < 0).any()) or bool((((sums - 1).abs() > ROUNDING) & (sums != 0)).any()):
            return "'outputs' holds a row that is no distribution over the classes (nor all zeros)"
        return None

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """The mean by label over the clients that hold it."""
        return LabelMeanAggregator()


class LabelMeanAggregator(Aggregator):
    """G_n: the mean of the clients' mean outputs for label n, each client that saw the label counting once.

    Mix2FLD, section II-B, with labels that a device never saw left out of the mean. A label that nobody saw stays a
    row of zeros.
    """

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        """{"outputs": [C, C]}."""
        rows = torch.stack([tensors["outputs"] for tensors, _ in uploads]).double()
        holders = (rows.sum(2) > 0).sum(0)
        return {"outputs": (rows.sum(0) / holders.clamp(min=1)[:, None]).float()}


@part("upload", "nothing")
class NoUpload(Upload):
    """Clients neither train nor send anything in a round; all that the server has is what they shared before."""

    is_model = False
    trains = False


@part("upload", "silent")
class Silent(Upload):
    """Clients train but send nothing: with ``stateful_clients`` each is alone, as without a federation.

    It is what a federation has to beat: with ``evaluate_model = "each"`` every client's model is tested
    on that client's own test samples.
    """

    is_model = False

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Nothing."""
        return {}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Nothing."""
        return {}

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """The mean of nothing, which is nothing."""
        return WeightedMean()
