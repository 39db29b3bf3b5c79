"""The base classes of objectives, terms and personal models: what a client minimises.

An objective has two halves. :meth:`Objective.draw` draws its random numbers, outside of the training step.
:meth:`Objective.loss` is a pure function of parameters, batch and these numbers, so that autograd and ``torch.func``
can differentiate and stack it.

What these classes receive is defined in :mod:`fedblend.core.context`; authors may import all of it from here.
"""

# The fields of Method are explained in fedblend/experiment/fields.py.

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from pydantic import BeforeValidator, WithJsonSchema
from torch import nn

from fedblend.core.context import Batch, CohortSummary, Context, LocalTraining, ModelSpec, Net, Scale, StepPlan, Task
from fedblend.core.errors import FedblendError
from fedblend.core.part import Part
from fedblend.core.registry import build, part
from fedblend.core.trees import Tensors

if TYPE_CHECKING:
    from fedblend.core.aggregator import Aggregator
    from fedblend.core.optimizer import Training
    from fedblend.core.server_step import ServerStep
    from fedblend.core.sharing import Sharing
    from fedblend.core.upload import Upload

__all__ = [
    "Base",
    "Batch",
    "ClientPart",
    "CohortSummary",
    "Context",
    "LocalTraining",
    "Method",
    "ModelSpec",
    "Net",
    "NoPersonal",
    "Objective",
    "Personal",
    "Plain",
    "Scale",
    "StepPlan",
    "Task",
    "Tensors",
    "Term",
    "WithBase",
    "checked_loss",
    "with_bases",
]


class Method(Protocol):
    """A method: a composition of parts."""

    @property
    def name(self) -> str: ...
    @property
    def sharing(self) -> Sharing: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def terms(self) -> Sequence[Term]: ...
    @property
    def personal(self) -> Personal: ...
    @property
    def upload(self) -> Upload: ...
    @property
    def stateful_clients(self) -> bool: ...
    @property
    def aggregator(self) -> Aggregator: ...
    @property
    def server_step(self) -> ServerStep: ...


class ClientPart(Part):
    """Base of the parts that work at clients, objectives and terms, with what they keep from round to round.

    What a part keeps is a table of tensors at the server, and one at each client. Engines, ranks, checkpoints and
    Flower carry these tables without reading them. A client's table never leaves the client in a real federation.
    """

    renamed: ClassVar[Mapping[str, str]] = {
        "broadcasts": 'exchanges = "broadcast"',
        "sends": 'exchanges = "extras"',
        "sends_statistics": 'exchanges = "map-statistics"',
    }
    exchanges: Literal["nothing", "broadcast", "extras", "map-statistics"] = "nothing"
    """What travels of the part's table at the server. With "broadcast" the clients of every round receive the table,
    beside the model. With "extras" :meth:`after_training` also sends tensors beside the model, with the names, shapes
    and types of the table; with "map-statistics" these are statistics of samples, not made of models.
    """

    @property
    def broadcasts(self) -> bool:
        """Whether clients receive the part's table at the server."""
        return self.exchanges != "nothing"

    @property
    def sends(self) -> bool:
        """Whether clients send tensors beside the model."""
        return self.exchanges in ("extras", "map-statistics")

    def require_possible(self, method: Method, train: Training) -> None:
        """Raise ``ValueError`` where the part cannot be used with the method's other parts or with ``[train]``."""

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        """What the part keeps at the server before the first round; ``weights`` are the first global ones."""
        return {}

    def init_client_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        """What the part keeps at a client before its first round; ``weights`` are the global ones of that round."""
        return {}

    def after_training(
        self, spec: ModelSpec, training: LocalTraining
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """At a client after training: return the part's new client state, and the tensors to send with the model."""
        return dict(training.client_state), {}

    def after_aggregation(
        self, weights: Tensors, state: Tensors, summary: CohortSummary
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """At the server after aggregation: return the next global weights, and the part's new server state."""
        return dict(weights), dict(state)


class Objective(ClientPart):
    """Base of all objectives. A method author overrides :meth:`loss`, and :meth:`draw` if it is random."""

    to_define = ("loss or phases",)
    renamed: ClassVar[Mapping[str, str]] = {
        "reads_stored": 'reads = ("inputs", "stored", "seeds", "raw")',
        "breaks_privacy": 'reads = ("raw",)',
    }
    needs: tuple[str, ...] = ()
    """Names of the tensors that sharing must bring."""
    reads: tuple[str, ...] = ("inputs", "stored")
    """Forms of shared entries that the objective uses, if it needs any (:meth:`Context.entries` scales stored ones)."""
    counts_labels: bool = False
    """Whether :meth:`draw` reads the client's samples by class (:attr:`StepPlan.label_counts`)."""
    tracks: bool = False
    """Whether :meth:`loss` renews what the objective keeps at the client in each step (:meth:`Context.renew`)."""
    measures: tuple[str, ...] = ()
    """Names of the shares of samples that the record has; :meth:`loss` counts the samples (:meth:`Context.count`)."""
    reads_start: bool = False
    """Whether :meth:`loss` reads the round's global weights (:attr:`Context.start`)."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """The random half: arrays with one row a step, drawn from the client's stream of the round."""
        return {}

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """The pure half: the scalar loss of one batch, given one row of what was drawn."""
        raise TypeError(f"{type(self).__name__} defines no loss")

    def warning(self, measured: Mapping[str, float]) -> str:
        """What a user should know of a round's shares (:attr:`measures`); empty for nothing. It is shown once a run."""
        return ""

    def fallback(self) -> Objective:
        """Return the objective of a client that has nothing to mix with: the task's loss.

        Called only if the objective needs a pool and the client has none.
        """
        return Plain()

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        """Return the losses that one batch is stepped on, in turn; by default only :meth:`loss`.

        Terms are added to the last one.
        """
        return (self.loss,)


Base = Annotated[
    Any,
    BeforeValidator(lambda spec: build("objective", spec, "method.objective.base")),
    WithJsonSchema({"part": "objective"}),
]
"""The type of an option ``base``: an objective with its options, by name or as a table."""


def of_base(name: str, *default: Any) -> Any:
    """A property of a part with an option ``base``: the base's attribute of that name, or a default if there is one."""
    return property(lambda part: getattr(part.base, name, *default))


class WithBase(Objective):
    """Base of the objectives that change or extend the loss of another objective, their option ``base``."""

    base: Any
    needs = of_base("needs")
    reads = of_base("reads")
    counts_labels = of_base("counts_labels")
    measures = of_base("measures")
    reads_start = of_base("reads_start")
    layer = of_base("layer", None)
    """The layer whose hidden states the base mixes; ``None`` for a base that mixes inputs."""
    exclude_own = of_base("exclude_own", False)
    """Whether the base excludes the client's own entries."""

    def fallback(self) -> Objective:
        """The same change of the base's fallback; of the base itself, if that needs nothing.

        An objective that needs shared data of its own, beside its base, overrides this method.
        """
        return replace(self, base=self.base.fallback() if self.base.needs else self.base)  # type: ignore[type-var]

    def warning(self, measured: Mapping[str, float]) -> str:
        """The warning of the base."""
        return str(self.base.warning(measured))


def checked_loss(value: Any, part: str) -> torch.Tensor:
    """Return the loss of a ``part``. Raises :class:`FedblendError` unless it is a tensor of one number."""
    if isinstance(value, torch.Tensor) and not value.dim():
        return value
    found = f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
    raise FedblendError(f"{part}: its loss is {found}; valid: a tensor of one number (shape [])")


def with_bases(objective: Objective) -> list[Objective]:
    """An objective, its base, the base of that, and so on."""
    chain = [objective]
    while isinstance(chain[-1], WithBase):
        chain.append(chain[-1].base)
    return chain


class Personal(Part):
    """Base of personal models: a second model of each client, or a client's own layers of the one model.

    With a part that defines :meth:`terms`, a client trains a second model on its samples in each of its rounds. This
    personal model begins as the client's first global model, is kept at the client, and is never sent. It minimises the
    method's objective with the part's :meth:`terms`, in whose context ``start`` is the round's global model.

    The tensors that :meth:`own_layers` names stay at the client, where a part defines it: each client trains its own,
    which begin as the run's first weights. Only the other tensors are sent, in both directions, and only they are
    protected, aggregated and changed by the server.
    """

    to_define = ("terms or objective or own_layers",)
    renamed: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("active", "keeps_layers", "keeps"), "the methods own_layers, terms or after_training alone"
    )

    @property
    def active(self) -> bool:
        """Whether clients train a second model."""
        return type(self).terms is not Personal.terms

    @property
    def keeps(self) -> Literal["", "layers", "personal"]:
        """Field of :class:`fedblend.core.state.ClientState` with a client's own model, or ``""`` without one."""
        if type(self).own_layers is not Personal.own_layers:
            return "layers"
        return "personal" if self.active or type(self).after_training is not Personal.after_training else ""

    def own_layers(self, model: nn.Module) -> Collection[str]:
        """Names of the tensors (weights and buffers) that stay at clients.

        Raises :class:`FedblendError` for a model that has no such layers.
        """
        return ()

    def own_steps(self, steps: int) -> int | None:
        """Return how many of a client's first steps train only its own layers; later steps train only the others.

        ``None`` where every step trains all layers.
        """
        return None

    def shared_steps(self, steps: int) -> int:
        """How many of a client's last steps train the layers that are shared."""
        return steps - (self.own_steps(steps) or 0)

    def terms(self) -> Sequence[Term]:
        """Terms that are added to the objective of the personal model."""
        return ()

    def objective(self, base: Objective) -> Objective:
        """What clients minimise for the global model, given the method's objective or its fallback."""
        return base

    def after_training(self, spec: ModelSpec, training: LocalTraining) -> dict[str, torch.Tensor]:
        """At a client after its training of the global model: return its personal model, if the part makes one then.

        The states in ``training`` are the objective's: what it keeps after this training, and what its server sent.
        """
        return {}


@part("personal", "none")
class NoPersonal(Personal):
    """Clients train the global model only."""


class Term(ClientPart):
    """Base of the terms that add to any objective (FedProx's proximal term, distillation)."""

    to_define = ("loss",)
    renamed: ClassVar[Mapping[str, str]] = {"uses_outputs": 'outputs_kind = "outputs", or "prototypes"'}
    outputs_kind: str = ""
    """Kind of the mean outputs by label that the term reads, as uploads' bytes are counted; the server then sends them.
    Empty for a term that reads none.
    """

    @property
    def proximal_mu(self) -> float:
        """mu of a term that is mu / 2 ||w - w_t||^2 and nothing else: steps of SGD may then add mu (w - w_t) at once.

        0 for any other term, which is differentiated.
        """
        return 0.0

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """A scalar added to the loss of the objective's last phase (by default the only one)."""
        raise TypeError(f"{type(self).__name__} defines no loss")


@part("objective", "plain")
class Plain(Objective):
    """The task's loss on the client's own batch: cross-entropy, or squared error (FedMix, Algorithm 3)."""

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """Mean loss of the batch."""
        return context.task.loss(net(batch.x), batch.y)
