"""The base class of server steps, which refine the aggregate, and what they may use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch

from fedblend.core.context import ModelSpec
from fedblend.core.part import Part
from fedblend.core.sharing import Pool
from fedblend.core.trees import Tensors

if TYPE_CHECKING:
    from fedblend.core.optimizer import Training

Refined = tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]


Response = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class ServerContext(ModelSpec):
    """What a server step may read in addition to the aggregate."""

    round: int
    """The round, counted from 0."""
    lr: float
    """The clients' learning rate of the round."""
    rng: np.random.Generator
    """Keyed by seed and round."""
    start: Tensors = field(default_factory=dict)
    """The weights that the round began with."""
    query: Callable[[Tensors], list[Response]] = lambda question: []
    """Sends a question to the clients of the round's good uploads; returns their answers in order of client."""
    measure: Callable[[str, float], None] = lambda name, share: None
    """Sets a share in the round's record (:attr:`fedblend.core.record.RoundRecord.measured`)."""
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    """What the step kept in the round before."""
    global_outputs: Tensors = field(default_factory=dict)
    """The aggregate of uploads that are no models: mean outputs by label."""
    pool: Pool | None = None
    """The pool that the server made of all shared entries; ``None`` where a sharing after training was not due."""
    prior: Callable[[int], tuple[torch.Tensor, torch.Tensor]] | None = None
    """``prior(n)`` returns n raw training samples (x, y) of each class, the same ones in all rounds."""


class ServerStep(Part):
    """Base of all server steps.

    A step that works with single uploads sends questions (:attr:`ServerContext.query`), which :meth:`respond` answers
    on the rank that trained the client.
    """

    to_define = ("refine",)
    renamed: ClassVar[Mapping[str, str]] = {
        "reads_pool": 'reads = ("stored", "seeds", "raw"), or other forms',
        "reads_inputs": 'reads = ("inputs",)',
        "reads_features": 'reads = ("moments",)',
        "looks_at_uploads": 'works_on = "uploads"',
        "queries_clients": 'works_on = "answers"',
        "breaks_privacy": 'works_on = "raw"',
    }
    works_on: Literal["aggregate", "uploads", "answers", "raw"] = "aggregate"
    """What the step needs: the "aggregate" alone; single "uploads"; clients' "answers" to its questions, so that the
    server never receives single uploads; or clients' "raw" samples (:attr:`ServerContext.prior`).
    """
    reads: tuple[str, ...] = ()
    """Forms of shared entries (:data:`~fedblend.core.sharing.Form`) that the step uses; none where it uses no pool."""
    needs_pool: bool = False
    """Whether the step has nothing to do without a pool."""
    needs: tuple[str, ...] = ()
    """Names of the pool's tensors that the step reads."""

    @property
    def uses_uploads(self) -> bool:
        """Whether the step works with single uploads, at the server or at clients."""
        return self.works_on in ("uploads", "answers")

    @property
    def active(self) -> bool:
        """Whether the step changes anything."""
        return type(self).refine is not ServerStep.refine

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` if the step cannot be used with this model or these data."""

    def require_training(self, train: Training, largest: int) -> None:
        """Raise :class:`FedblendError` for local training that the step cannot follow; ``largest`` client's samples."""

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        """What the step keeps at the server before the first round; ``weights`` are the first global ones."""
        return {}

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """Return the next global weights, made from the aggregate ``weights``, and what the step keeps."""
        raise TypeError(f"{type(self).__name__} defines no refine")

    def fault_of_question(self, question: Tensors, clients: int, spec: ModelSpec) -> str | None:
        """Why a site does not respond to a question in a federation with cohorts of ``clients``, or ``None``.

        A site responds in a round once to the questions whose tensors have the same names.
        """
        return f"the server step '{type(self).name}' sends no questions to clients"

    def respond(self, uploads: Mapping[int, Tensors], question: Tensors, spec: ModelSpec) -> dict[int, Response]:
        """The response of each client to a question, by client; each depends on that client's upload only."""
        raise TypeError(f"{type(self).__name__} defines no respond")
