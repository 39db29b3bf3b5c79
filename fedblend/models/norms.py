"""What may normalise a convolution's outputs, and what is common to networks that offer the choice."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count

Norm = Literal["group", "batch", "none"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Normed:
    """A network whose convolutions may each be followed by a normalisation.

    AggEnhance (section 4.2) takes group norm (Wu and He 2018) with four groups in place of batch norm, since
    statistics of a batch mislead where clients hold different labels. Batch norm has running statistics besides,
    so a model with it can neither stand in a stack nor be trained on a batch of one sample.
    """

    name: ClassVar[str]

    norm: Norm = "group"
    """What normalises each convolution's outputs; "batch" needs the engine "loop"."""
    groups: Count = 4
    """Groups of channels in a group norm; it must divide the channels of every convolution."""

    def norms(self, channels: int, dimensions: int = 2) -> list[nn.Module]:
        """What follows a convolution with ``channels`` outputs: one layer, or none.

        Raises :class:`FedblendError` if the groups do not divide the channels.
        """
        if self.norm == "none":
            return []
        if self.norm == "batch":
            return [nn.BatchNorm2d(channels) if dimensions == 2 else nn.BatchNorm1d(channels)]
        if channels % self.groups:
            valid = ", ".join(str(n) for n in range(1, channels + 1) if channels % n == 0)
            raise FedblendError(
                f"model.groups: {self.groups} does not divide the {channels} channels of a convolution of "
                f"'{self.name}'; valid there: {valid}"
            )
        return [nn.GroupNorm(self.groups, channels)]
