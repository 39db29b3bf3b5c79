"""The base class of aggregators, which make one set of tensors from a round's uploads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch

from fedblend.core.part import Part
from fedblend.core.trees import Tensors

if TYPE_CHECKING:
    from fedblend.core.optimizer import Training

WeightedUpload = tuple[Tensors, float]


@dataclass(frozen=True)
class LocalWork:
    """What the server knows of the clients' training in a round, from the experiment and the numbers of samples."""

    steps_of: Callable[[int, int], int]
    """Steps of a client with so many samples, on the layers that it sends: steps_of(client, samples)."""
    lr: float
    """The learning rate of the round."""
    momentum: float
    """The momentum of the clients' SGD."""
    mu: float
    """The sum of mu of the proximal terms."""
    trained: Sequence[str]
    """Names of the tensors that clients train and send."""
    good: Sequence[tuple[int, int]] = ()
    """Client and samples of each good upload; empty before these are known."""
    clients: int = 0
    """Clients that were to send an upload; 0 before the good ones are known."""
    invalid: int = 0
    """Uploads that arrived and were refused for what they hold; 0 before the good ones are known."""


class Aggregator(Part):
    """Base of all aggregators: a function of the uploads and their weights, in order of client.

    An author overrides :meth:`aggregate`. One that needs the round's own weights as well overrides :meth:`finish`.
    One that is a function of sums overrides :meth:`partial` and :meth:`finish`, so that uploads need not be kept,
    nor gathered from other machines.
    """

    to_define = ("aggregate or finish or for_round",)
    renamed: ClassVar[Mapping[str, str]] = {
        "secure_aggregated": 'works_on = "sums"',
        "takes_extras": 'works_on = "extras"',
        "counts_steps": "require_training(self, train, phases, mu)",
    }
    works_on: Literal["uploads", "sums", "extras"] = "uploads"
    """"sums" where the server of a real federation learns a sum only. Robust aggregators work on "extras", too: what
    clients send beside the model, which is summed otherwise.
    """

    @property
    def is_plain_mean(self) -> bool:
        """Whether the aggregate is the mean of all uploads with equal weights."""
        return False

    def require_possible(self, cohort: int) -> None:
        """Raise :class:`FedblendError` if ``cohort`` uploads cannot be aggregated."""

    def require_training(self, train: Training, phases: int, mu: float) -> None:
        """Raise ``ValueError`` for local training that the aggregator cannot follow.

        An aggregator that counts a client's steps defines this method. ``phases`` are the steps for each batch, and
        ``mu`` is the sum of mu of the proximal terms.
        """

    @property
    def counts_steps(self) -> bool:
        """Whether the aggregate depends on the steps that a client makes in a round."""
        return type(self).require_training is not Aggregator.require_training

    def fault(self, upload: Tensors, start: Tensors) -> str:
        """Why an upload with the model's tensors cannot be aggregated, given the round's weights; empty if it can."""
        return ""

    def for_round(self, work: LocalWork) -> Aggregator:
        """The aggregator of a round; itself, unless it depends on how clients trained."""
        return self

    def weigh(self, client: int, samples: int) -> float:
        """The weight of a client's upload: the number of its samples."""
        return float(samples)

    def partial(self, uploads: Iterable[WeightedUpload]) -> Any:
        """Reduce the uploads of one process, to sums that processes can add or to a list of all."""
        return list(uploads)

    def unrounded(self, partial: Any) -> Any:
        """The reduced uploads, such that :meth:`finish` returns float64 if it can: noise is added before rounding."""
        return partial

    def finish(self, partial: Any, weights: Tensors) -> dict[str, torch.Tensor]:
        """The aggregate of all reduced uploads; ``weights`` are the global weights of the round."""
        return self.aggregate(partial)

    def aggregate(self, uploads: Sequence[WeightedUpload]) -> dict[str, torch.Tensor]:
        """The aggregate of (tensors, weight) pairs; at least one weight must be above 0."""
        raise TypeError(f"{type(self).__name__} defines no aggregate")


def counting(uploads: Iterable[WeightedUpload]) -> list[Tensors]:
    """The tensors of uploads with a weight above 0; weight 0 means training on no samples."""
    return [tensors for tensors, weight in uploads if weight > 0]
