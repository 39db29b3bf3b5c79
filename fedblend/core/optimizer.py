"""Local training: the bases of optimisers and of learning rate schedules, and what the core reads of ``[train]``."""

# The fields of Training are explained in fedblend/experiment/fields.py.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, Protocol

from fedblend.core.part import Part


class Optimizer(Part):
    """Base of optimisers: their options. The engines make the steps."""

    renamed: ClassVar[Mapping[str, str]] = {"is_sgd": 'steps = "sgd"', "stacks": 'steps = "torch"'}
    steps: Literal["sgd", "adam", "torch"] = "adam"
    """The rule of its steps: SGD, whose steps are the learning rate times the gradient or its momentum; Adam; or that
    of ``torch.optim``, which the stacked engine does not have.
    """
    state_keys: tuple[str, ...] = ()
    """Names of what the optimiser keeps for each parameter, as ``torch.optim`` names them."""


class Schedule(Part):
    """Base of learning rate schedules, over the rounds of a run or over the steps of a client's round."""

    to_define = ("factor",)
    renamed: ClassVar[Mapping[str, str]] = {"needs_length": "require_over_rounds(self)"}

    def require_over_rounds(self) -> None:
        """Raise ``ValueError`` where the factor depends on the number of steps, which is not known over rounds."""

    def factor(self, step: int, steps: int | None = None) -> float:
        """The factor of the learning rate in ``step``, counted from 0, of ``steps`` (``None``: not known)."""
        raise TypeError(f"{type(self).__name__} defines no factor")


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
