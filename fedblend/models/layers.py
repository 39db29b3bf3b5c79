"""Models in stages, so that hidden states after k layers can be read and continued from."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass
from torch import nn

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count


class Staged(nn.Module):
    """A model as a row of layers. ``forward(x, start, stop)`` runs layers ``start`` up to ``stop``.

    ``forward(x)`` runs them all; ``forward(forward(x, 0, k), k)`` gives the same.
    """

    def __init__(self, *stages: nn.Module) -> None:
        super().__init__()
        self.stages = nn.ModuleList(stages)

    def forward(self, x: torch.Tensor, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Run layers ``start`` up to (not including) ``stop``."""
        for stage in list(self.stages)[start:stop]:
            x = stage(x)
        return x


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


def same_tensors(model: nn.Module) -> tuple[str, str] | None:
    """Two names of one tensor, where layers share a weight; ``None`` where every name has its own."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        other = first.setdefault(id(tensor), name)
        if other != name:
            return other, name
    return None
