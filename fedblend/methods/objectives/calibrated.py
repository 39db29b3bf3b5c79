"""FedLC and FedRS: the logits of classes that a client holds few samples of, or none, are changed in its loss."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated

import numpy as np
import torch
from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedblend.core.errors import FedblendError
from fedblend.core.objective import Base, Batch, Context, Net, Objective, StepPlan, WithBase, with_bases
from fedblend.core.registry import Fraction, NonNegative, part
from fedblend.core.trees import Tensors
from fedblend.methods.objectives.output_cache import NetAround
from fedblend.methods.requirements import refusal

MISSING = 1e-8
"""Samples that a class without samples counts as in FedLC: its logit falls by 100 tau and leaves the softmax."""


def _require_other(base: Objective) -> Objective:
    for one in with_bases(base):
        if isinstance(one, Calibrated):
            raise FedblendError(
                f"method.objective.base: '{one.name}' changes logits itself; valid: plain, augmix, and the objectives "
                "that mix"
            )
    return base


class CalibratedNet(NetAround):
    """A net whose outputs a function changes; hidden states stay as they are."""

    def __init__(self, net: Net, calibrate: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(net)
        self.calibrate = calibrate

    def __call__(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        outputs = self.net(x, start, stop)
        return self.calibrate(outputs) if stop is None else outputs

    def with_weights(self, weights: Tensors, training: bool = True) -> CalibratedNet:
        return CalibratedNet(self.net.with_weights(weights, training), self.calibrate)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Calibrated(WithBase):
    """Base of FedLC and FedRS: the loss of another objective, ``base``, on changed logits.

    How many samples of each class a client holds stays at the client. The model itself is not changed: tests and other
    clients use its logits as they are.
    """

    counts_labels = True

    base: Annotated[Base, AfterValidator(_require_other)] = Field(default="plain", validate_default=True)
    """The objective whose loss is taken, with its options; the method's sharing must provide the data that it needs."""

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """What the base draws, and ``label_counts`` float32 [steps, C]: nothing of it is random.

        Raises :class:`FedblendError` for data without classes.
        """
        if plan.label_counts is None:
            problem = "counts a client's samples by class, but the targets are no classes"
            raise refusal(self, problem, "plain, and the objectives that mix")
        counts = np.tile(plan.label_counts.astype(np.float32), (len(plan.sizes), 1))
        return {**self.base.draw(rng, plan), "label_counts": counts}

    def phases(self) -> tuple[Callable[[Net, Batch, Tensors, Context], torch.Tensor], ...]:
        return tuple(partial(self._on_calibrated, phase) for phase in self.base.phases())

    def _on_calibrated(
        self, phase: Callable[..., torch.Tensor], net: Net, batch: Batch, drawn: Tensors, context: Context
    ) -> torch.Tensor:
        return phase(CalibratedNet(net, partial(self.calibrate, drawn["label_counts"])), batch, drawn, context)

    def calibrate(self, counts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Changed logits [..., C] of a client with so many samples of each class, float32 [C]."""
        raise TypeError(f"{type(self).__name__} defines no calibrate")


@part("objective", "fedlc")
class FedLC(Calibrated):
    """Subtract tau n_c^(-1/4) from the logit of class c, of which the client holds n_c samples (Zhang et al. 2022).

    The loss of a sample is -log(e^(f_y - tau n_y^(-1/4)) / sum_c e^(f_c - tau n_c^(-1/4))), equation 8 with the sum
    over all classes, as in public codes. A class without samples counts as 1e-8 samples: it takes no part in the
    softmax, as in the limit of no sample, and the loss stays finite where a mixed target has a share of it. tau = 0 is
    the base.
    """

    tau: NonNegative = 1.0
    """Strength of the calibration."""

    def calibrate(self, counts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return logits - self.tau * counts.clamp(min=MISSING) ** -0.25


@part("objective", "fedrs")
class FedRS(Calibrated):
    """Multiply the logits of the classes that a client lacks by alpha: restricted softmax (Li and Zhan 2021).

    So the weights of these classes, which a client without their samples only pushes away, move more slowly. The
    paper's logits have no bias; here the whole logit is multiplied. The authors' code multiplies all classes, by alpha
    + (1 - alpha) n_c / max n. alpha = 1 is the base; alpha = 0 gives the lacking classes logits of 0.
    """

    alpha: Fraction = 0.5
    """Factor on the logits of classes that the client lacks."""

    def calibrate(self, counts: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(counts > 0, logits, self.alpha * logits)
