"""Uploads: the payload that a client sends each round, and its validation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fedblend.core.aggregator import Aggregator, Tensors, WeightedUpload
from fedblend.core.context import Net, Task
from fedblend.core.module import evaluating
from fedblend.core.registry import Count, part
from fedblend.core.state import RunState
from fedblend.core.upload import Upload, relative_change
from fedblend.methods.aggregators.mean import WeightedMean
from fedblend.methods.requirements import require_classes


@part("upload", "model")
class Model(Upload):
    """Send the client's weights after training (FedAvg)."""

    from_round: Count = 1
    """First round in which clients train, counted from 1; before it only the server trains (XorMixFL as a warm start:
    2).
    """

    def trains_in(self, round: int) -> bool:
        return round + 1 >= self.from_round

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return dict(weights)

    def like(self, weights: Tensors, task: Task) -> Tensors:
        return weights


ROUNDING = 1e-3  # Largest deviation from 1 of the sum of a mean of distributions


class MeansByClass(Upload):
    """Base of uploads that are means by class, in place of a model."""

    def require_possible(self, task: Task) -> None:
        """Raise :class:`FedblendError` for data without classes."""
        require_classes(self, task, "model")

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """The means, float32 [C, numbers], under the name ``bytes_kind``."""
        assert outputs is not None
        return {self.bytes_kind: outputs}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        return {self.bytes_kind: torch.zeros(task.outputs, task.features or task.outputs)}

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        return LabelMeanAggregator()

    def change(self, before: RunState, after: RunState, trained: Sequence[str]) -> float:
        old, new = (next(iter(one.global_outputs.values()), torch.zeros(1, 1)) for one in (before, after))
        return relative_change(old, new)


@part("upload", "outputs")
class Outputs(MeansByClass):
    """Send for each label n the mean of the softmax outputs on samples of that label, over the local steps.

    Mix2FLD, equation 2 (Oh et al. 2020; Jeong et al. 2018): C vectors of C numbers, independent of the model's size.
    The outputs are those that the steps compute before their updates. A label without samples, for which equation 2
    would be 0 / 0, has a row of zeros.
    """

    bytes_kind = "outputs"
    content = "outputs"

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


class LabelMeanAggregator(Aggregator):
    """Compute for each label the mean of the clients' means, over the clients with samples of that label.

    Mix2FLD, section II-B, without the devices that have no samples of a label. A label without samples on any client
    has a row of zeros, as in the clients' payloads.
    """

    def aggregate(self, uploads: Iterable[WeightedUpload]) -> dict[str, torch.Tensor]:
        payloads = [tensors for tensors, _ in uploads]
        means = {}
        for name in payloads[0]:
            rows = torch.stack([payload[name] for payload in payloads]).double()
            clients = (rows != 0).any(2).sum(0)
            means[name] = (rows.sum(0) / clients.clamp(min=1)[:, None]).float()
        return means


@part("upload", "prototypes")
class Prototypes(MeansByClass):
    """Send for each class the mean embedding of the client's samples, after its training (FedProto, Tan et al. 2022).

    Equation 3. An embedding is the input of the model's last layer, averaged over the positions of a feature map; of a
    model that is no row of layers it is the output. The server takes for each class the mean over the clients that have
    samples of it, which count alike, as in the authors' code; equation 6 weights them by samples and divides by their
    number once more, which would shrink the prototypes. Their clients take the means over the steps of the last epoch,
    as the model changes. A class of which a client has fewer than ``policy.min_mean`` samples has a row of zeros, which
    stands for no prototype: a prototype of one sample would be its embedding.

    Clients keep their models (``stateful_clients = true``, the preset's), and these may be of any weights. A client
    predicts by its own last layer (the paper also tries the nearest prototype); ``evaluate_model = "each"`` tests each
    with its own model.
    """

    bytes_kind = "prototypes"
    content = "embeddings"

    def features(self, model: nn.Module, sample: torch.Tensor) -> int:
        with torch.no_grad(), evaluating(model):
            stages = len(getattr(model, "stages", ()))
            width = _pooled(model(sample, 0, stages - 1) if stages > 1 else model(sample)).shape[1]
        return int(width)


def embedding(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The input of the last layer, [B, features], averaged over positions; the outputs where layers are unknown."""
    return _pooled(net(x, 0, net.layers - 1) if net.layers > 1 else net(x))


def _pooled(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states [B, features, ...] as [B, features]."""
    return hidden.flatten(2).mean(2) if hidden.dim() > 2 else hidden


@part("upload", "nothing")
class NoUpload(Upload):
    """Neither train nor send anything in a round; the server only has what clients shared before."""

    content = "nothing"


@part("upload", "silent")
class Silent(Upload):
    """Train but send nothing: with ``stateful_clients`` each client trains alone, without a federation.

    This is the baseline of a federation: with ``evaluate_model = "each"`` every client's model is tested on that
    client's own test samples.
    """

    content = "nothing"

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        return {}

    def like(self, weights: Tensors, task: Task) -> Tensors:
        return {}

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        return WeightedMean()
