"""What the core reads of a method and of local training; :mod:`fedblend.experiment` reads both from files."""

# The fields are explained in fedblend/experiment/fields.py.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from fedblend.core.aggregator import Aggregator
    from fedblend.core.objective import Objective, Personal, Term
    from fedblend.core.optimizer import Schedule
    from fedblend.core.server_step import ServerStep
    from fedblend.core.sharing import Sharing
    from fedblend.core.upload import Upload


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


class Training(Protocol):
    """How clients train in a round."""

    @property
    def cohort(self) -> int: ...
    @property
    def epochs(self) -> int: ...
    @property
    def steps(self) -> int | None: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def last_batch(self) -> Literal["keep", "drop", "merge"]: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def schedule_in_round(self) -> Schedule | None: ...
    @property
    def optimizer(self) -> Any: ...
    @property
    def optimizer_state(self) -> Literal["reset", "keep"]: ...
    @property
    def momentum(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def augment(self) -> Sequence[Any]: ...
    @property
    def clip_norm(self) -> float | None: ...
    @property
    def state_keys(self) -> tuple[str, ...]: ...

    def batches_of(self, samples: int) -> int:
        """Batches in a round of a client with so many samples."""

    def lr_in(self, round: int) -> float:
        """The learning rate of a round, counted from 0."""

    def factors(self, steps: int) -> list[float] | None:
        """The factors of the learning rate in a round's steps; ``None`` where it does not change."""
