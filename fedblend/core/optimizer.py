"""The bases of optimisers and of learning rate schedules: what a step of local training makes of a gradient."""

from __future__ import annotations

from fedblend.core.part import Part


class Optimizer(Part):
    """Base of optimisers: their options. The engines make the steps."""

    is_sgd: bool = False
    """Whether a step is the learning rate times the gradient, or its momentum."""
    stacks: bool = True
    """Whether the stacked engine has this optimiser, too."""
    state_keys: tuple[str, ...] = ()
    """Names of what the optimiser keeps for each parameter, as ``torch.optim`` names them."""


class Schedule(Part):
    """Base of learning rate schedules, over the rounds of a run or over the steps of a client's round."""

    to_define = ("factor",)
    needs_length: bool = False
    """Whether the factor depends on the number of steps, which is not known over rounds."""

    def factor(self, step: int, steps: int | None = None) -> float:
        """The factor of the learning rate in ``step``, counted from 0, of ``steps`` (``None``: not known)."""
        raise TypeError(f"{type(self).__name__} defines no factor")
