"""What parts receive: the task and its loss, the model, a batch, and the states of a client and of the server."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fedblend.core.dataset import TaskKind
from fedblend.core.errors import FedblendError
from fedblend.core.trees import Tensors, strip_prefix


@dataclass(frozen=True)
class Task:
    """What is predicted, and the loss it is scored with, a mean over the batch.

    - classification: cross-entropy of logits [B, C] with class indices [B], a distribution [C] that
      the whole batch shares, or one a sample [B, C];
    - multi-label: binary cross-entropy of logits [B, L] with shares [L] or [B, L] from 0 to 1, the mean over labels;
    - regression: squared error, summed over the outputs [B, q] (FedMix, footnotes 1 and 2).
    """

    kind: TaskKind
    outputs: int
    features: int = 0
    """Numbers of an embedding, where clients send mean embeddings; else 0."""

    def loss(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Mean loss of a batch; a target without batch dimension stands for every sample."""
        if self.kind == "regression":
            return (outputs - target).square().sum(-1).mean()
        if self.kind == "multi-label":
            return _label_losses(outputs, target).mean()
        if not target.is_floating_point():
            # F.cross_entropy but for targets to leave out, which cost a traced step a dozen operations.
            return -F.log_softmax(outputs, -1).gather(-1, target[:, None]).mean()
        # A shared distribution broadcasts, so no [B, C] copy of it is made.
        return -(F.log_softmax(outputs, -1) * target).sum(-1).mean()

    def targets(self, y: torch.Tensor) -> torch.Tensor:
        """Targets of shared entries as :meth:`loss` takes them.

        Labels may be of any whole type. Distributions may lack the last classes, whose share is then 0.
        """
        if not y.is_floating_point():
            return y.long()
        return y if y.shape[-1] == self.outputs else F.pad(y, (0, self.outputs - y.shape[-1]))

    def losses(self, outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of each sample [n]; targets as of :meth:`loss`."""
        if self.kind == "regression":
            return (outputs - target).square().sum(-1)
        if self.kind == "multi-label":
            return _label_losses(outputs, target).mean(-1)
        if not target.is_floating_point():
            return -F.log_softmax(outputs, -1).gather(-1, target[:, None])[:, 0]
        return -(F.log_softmax(outputs, -1) * target).sum(-1)

    def encode(self, target: torch.Tensor) -> torch.Tensor:
        """Targets as float vectors [n, outputs]: one-hot classes, or the stored numbers themselves."""
        if self.kind == "classification":
            # F.one_hot does the same, but not inside vmap and grad.
            return (target.long()[..., None] == torch.arange(self.outputs, device=target.device)).float()
        return target.float()


def _label_losses(outputs: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Binary cross-entropy of each logit, as PyTorch computes it; targets may broadcast."""
    return (1 - target) * outputs - F.logsigmoid(outputs)


class Batch(NamedTuple):
    """One batch: inputs [B, ...] on the model's scale (float32) and targets as stored."""

    x: torch.Tensor
    y: torch.Tensor


class Net(Protocol):
    """A model as an objective sees it: a function, and a derivative with respect to its input.

    Engines bring their own: plain autograd in the loop, ``torch.func`` where clients are stacked.
    """

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Outputs for inputs ``x``; ``start`` and ``stop`` pick layers of a staged model."""
        ...

    def input_gradient(
        self, scalar: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """For ``scalar(x) -> (value, aux)`` return d value / d x, value and aux, all differentiable."""
        ...

    def with_weights(self, weights: Tensors, training: bool = True) -> Net:
        """The same model with other weights, by name.

        Without ``training`` it is as in a test: dropout drops nothing, and batch norm uses its running statistics.
        """
        ...

    @property
    def weights(self) -> Tensors:
        """The weights that clients train, by name."""
        ...

    @property
    def layers(self) -> int:
        """Layers of a staged model, whose hidden states can be read; 0 of any other."""
        ...


class Scale(Protocol):
    """What turns stored samples into inputs, with the way to pictures and back (:mod:`fedblend.data.scale`)."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """Inputs of stored samples."""
        ...

    def to_unit(self, scaled: torch.Tensor, /) -> torch.Tensor:
        """Pictures of inputs: [0, 1], ink as 1."""
        ...

    def from_unit(self, unit: torch.Tensor, /) -> torch.Tensor:
        """Inputs of pictures."""
        ...

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of pictures of 0 and of 1."""
        ...

    def diameter(self, shape: Sequence[int], /) -> float:
        """The largest L2 distance of two inputs of ``shape``."""
        ...

    def to(self, device: torch.device | str, /) -> Any:
        """The same scale with its numbers on ``device``."""
        ...

    def describe(self) -> dict[str, Any]:
        """The scale in plain numbers, for the run's record."""
        ...


@dataclass(frozen=True)
class Context:
    """What an objective or a term may read in addition to the batch; the same in all steps of a client's round."""

    task: Task
    """The task, with its loss."""
    scale: Scale
    """What turns stored samples into inputs."""
    pool: Tensors = field(default_factory=dict)
    """The shared entries that this client may use: tensors with one row per entry."""
    start: Tensors = field(default_factory=dict)
    """The round's global weights, if the method has terms or its objective reads them; else empty."""
    global_outputs: Tensors = field(default_factory=dict)
    """Mean outputs by label [C, C] from the server, under the name ``outputs``; empty before there are any."""
    client_state: dict[str, torch.Tensor] = field(default_factory=dict)
    """The part's state at the client (:meth:`ClientPart.init_client_state`)."""
    server_state: Tensors = field(default_factory=dict)
    """The part's state at the server, if it broadcasts that."""
    note: Callable[[str, torch.Tensor], None] | None = None
    """Where given: records a number of the step under a name, for callbacks (:attr:`ClientUpdate.notes`)."""
    pool_stored: bool = False
    """Whether x of the pool is on the scale of stored samples, not of inputs."""
    counts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Samples counted in the round so far, by what the objective :attr:`~Objective.measures`; changed in place."""
    renews: bool = True
    """Whether the part may :meth:`renew` its state: an objective that ``tracks``."""

    def entries(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of entries of the pool, ``rows`` int64 [n]."""
        x, y = (self.pool[name].index_select(0, rows) for name in ("x", "y"))
        return self.scale(x) if self.pool_stored else x, self.task.targets(y)

    def of_part(self, slot: str) -> Context:
        """Return the same context with the states of the part at ``slot`` only."""
        prefix = f"{slot}/"
        states = strip_prefix(prefix, self.client_state), strip_prefix(prefix, self.server_state)
        return replace(self, client_state=states[0], server_state=states[1], renews=self.renews and slot == "objective")

    def count(self, name: str, number: torch.Tensor) -> None:
        """Add a number of samples to what is measured under ``name``; ignored where nothing is measured."""
        if name in self.counts:
            self.counts[name] = self.counts[name] + number.detach()

    def renew(self, name: str, tensor: torch.Tensor) -> None:
        """Set what an objective keeps at the client, from the next step on (:attr:`Objective.tracks`).

        Ignored where nothing is kept, as in the training of personal models. Raises :class:`FedblendError` in a part
        that does not track, and for a tensor that is not kept or has another shape; another type is converted.
        """
        if not self.client_state:
            return
        if not self.renews:
            raise FedblendError(
                f"method: a step renews '{name}' at the client, which only an objective with tracks = True may; a term "
                "renews what it keeps in after_training"
            )
        if (old := self.client_state.get(name)) is None:
            raise FedblendError(
                f"method.objective: a step renews '{name}', which init_client_state did not return; valid: "
                + ", ".join(sorted(self.client_state))
            )
        if tensor.shape != old.shape:
            raise FedblendError(
                f"method.objective: a step renews '{name}' of shape {list(old.shape)} by a tensor of shape "
                f"{list(tensor.shape)}; valid: the same shape"
            )
        self.client_state[name] = tensor.detach().to(old.dtype)


class StepPlan(NamedTuple):
    """A client's steps of one round, known in advance; :meth:`Objective.draw` draws numbers for them.

    ``sizes`` int64 [steps] are the batch sizes, ``width`` the largest; ``own`` marks the entries of
    the pool that came from this client, bool [entries]. ``label_counts`` int64 [C] are the client's samples by class,
    ``None`` where the data have no classes. ``server_state`` is what the objective keeps at the server, where it
    broadcasts that.
    """

    sizes: np.ndarray
    width: int
    round: int
    own: np.ndarray | None = None
    entries: int = 0
    label_counts: np.ndarray | None = None
    server_state: Tensors | None = None


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """The model that is trained, as server and clients both have it."""

    model: nn.Module
    """A module for :func:`torch.func.functional_call`, in evaluation mode."""
    trained: Sequence[str]
    """Names of the tensors that clients train and send."""
    shape: tuple[int, ...]
    """Shape of one input as stored."""
    scale: Scale
    """What turns stored samples into inputs."""
    task: Task
    """The task, with its loss."""
    frozen: Collection[str] = frozenset()
    """Names of the tensors that nobody trains, and that nobody keeps beside the global model."""
    bounded: bool = False
    """Whether the scale's ends bound all inputs, those of a site's own samples too: pixels of 256 levels, and text."""
    device: str = "cpu"
    """Where clients train. Server steps may compute there, but what they receive and return is on the CPU."""

    def on_device(self) -> Self:
        """The same with the scale's numbers on :attr:`device`."""
        return replace(self, scale=self.scale.to(self.device))

    def zeros(self, weights: Tensors) -> dict[str, torch.Tensor]:
        """Zeros in the shape of each trained tensor of ``weights``, by name."""
        return {name: torch.zeros_like(weights[name]) for name in self.trained}


@dataclass(frozen=True)
class LocalTraining:
    """A client's training of one round, as a part sees it at its end (:meth:`ClientPart.after_training`)."""

    start: Tensors
    """The weights that training began with."""
    weights: Tensors
    """The weights after training."""
    client_state: Tensors
    """What the part kept at the client before the round."""
    server_state: Tensors
    """What the part keeps at the server, where it broadcasts that."""
    lr: float
    """The learning rate of the round, the mean over these steps."""
    steps: int
    """The client's steps on the layers that it sends."""
    gradient: Callable[[Tensors], Tensors]
    """Computes the gradient of the task's mean loss over all of the client's samples at given weights, by name."""


@dataclass(frozen=True)
class CohortSummary:
    """A round's good uploads, as a part sees them at the server (:meth:`ClientPart.after_aggregation`)."""

    start: Tensors
    """The weights that the round began with."""
    extras: Tensors
    """Sums over the good uploads, float64, of what the part's clients sent beside the model."""
    uploads: int
    """Good uploads of the round."""
    clients: int
    """Clients of the federation that hold samples."""
