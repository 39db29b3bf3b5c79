"""What an upload is: what a client sends after its training, and what the server makes of all of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fedblend.aggregators import Aggregator
from fedblend.objectives.task import Task
from fedblend.uploads.checks import fault_of

Tensors = Mapping[str, torch.Tensor]


class Upload:
    """Base of all uploads.

    ``bytes_kind`` is the word under which bytes are counted. ``is_model`` is true where the aggregate is the next
    model; else it is said to the server step and to the clients of the next round. ``trains`` is false where clients
    do nothing in a round, ``watches`` true where engines are to note the model's outputs while clients train.
    """

    bytes_kind: str = "weights"
    is_model: bool = True
    trains: bool = True
    watches: bool = False

    def require_possible(self, task: Task) -> None:
        """Raise :class:`FedblendError` where there is nothing to send of such data, before anything is trained."""

    def trains_in(self, round: int) -> bool:
        """Whether clients train and send something in a round, counted from 0."""
        return self.trains

    def payload(self, weights: Tensors, outputs: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """At a client: what it sends, of its weights after training and its mean outputs by label [C, C]."""
        raise TypeError(f"{type(self).__name__} defines no payload")

    def like(self, weights: Tensors, task: Task) -> Tensors:
        """Tensors with the names, shapes and types of a good payload."""
        raise TypeError(f"{type(self).__name__} defines no like")

    def fault(self, payload: Tensors, weights: Tensors, task: Task) -> str | None:
        """Why a payload cannot be used, or ``None`` if it can."""
        return fault_of(payload, self.like(weights, task))

    def aggregator(self, chosen: Aggregator) -> Aggregator:
        """What makes one of all payloads, where ``chosen`` is the method's aggregator of models."""
        return chosen
