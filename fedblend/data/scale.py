"""Scales of a model's inputs: stored value * factor + offset.

No paper states its scale, but the scale changes results: FedMix's (1 - lambda) x moves inputs towards the scale's zero.
With white paper as 1, settings that reach 52 % reach 9 %. So the scale is a part of its own, and each run records it.
Means, mixtures and encodings are shared on the same scale.

Each scale is defined on the *unit* scale, [0, 1] with ink as 1 (:meth:`Scaler.to_unit`): pixels / 255, inverted where
paper is white; features from their smallest to their largest training value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

import torch
from pydantic import ConfigDict
from pydantic.dataclasses import dataclass as pydantic_dataclass
from torch import Tensor

from fedblend.core.dataset import Dataset
from fedblend.core.errors import tokens_refused
from fedblend.core.registry import part

Invert = bool | Literal["auto"]
"""Whether to invert images, so ink is 1. "auto": images of one channel whose median is above 127."""

CHUNK = 1 << 22  # Numbers that are processed together, so the training half is not copied


ROUNDING = 1e-3  # Largest part of a scale's range by which float32 may move a value of a scale that a server sends


@dataclass(frozen=True, eq=False)
class Scaler:
    """The affine map x -> x * factor + offset, and the map back to images.

    ``unit_factor`` and ``unit_offset`` map stored values to the unit scale; ``inverted``: ink is 1 there. All tensors
    are float32 [C, 1, ...], one number for each channel or feature (axis 1 of the stored data), and broadcast over
    leading axes.
    """

    name: str
    inverted: bool
    factor: Tensor
    offset: Tensor
    unit_factor: Tensor
    unit_offset: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """Scale stored values [..., C, ...], float32."""
        # Not in place, since a traced step without in-place operations can be simplified further.
        return x * self.factor + self.offset

    def to_unit(self, scaled: Tensor) -> Tensor:
        """Convert scaled values to the unit scale (ink as 1), clipped to [0, 1]."""
        return ((scaled - self.offset) / self.factor * self.unit_factor + self.unit_offset).clamp(0, 1)

    def from_unit(self, unit: Tensor) -> Tensor:
        """Convert values of the unit scale (ink as 1) to this scale: the inverse of :meth:`to_unit`, not clipped."""
        return (unit - self.unit_offset) / self.unit_factor * self.factor + self.offset

    def background(self, x: Tensor) -> Tensor:
        """The stored value of 0 on the unit scale (no ink), [C, 1, 1] in the type of the stored values ``x``."""
        value = -self.unit_offset / self.unit_factor
        return (value if x.is_floating_point() else value.round()).to(x.dtype)

    def ends(self) -> tuple[Tensor, Tensor]:
        """The numbers of 0 and 1 on the unit scale in float32, between which those of all values in [0, 1] are."""
        zero, one = (self.from_unit(torch.full_like(self.factor, value)) for value in (0.0, 1.0))
        return zero, one

    def diameter(self, shape: Sequence[int]) -> float:
        """The largest L2 distance on this scale of two samples of ``shape`` in [0, 1] on the unit scale."""
        zero, one = (end.double() for end in self.ends())
        return math.sqrt(float((one - zero).square().sum()) * math.prod(shape[1:]))

    def is_exact(self) -> bool:
        """Whether float32 resolves the scale: its range is factor / unit_factor, and its steps are small beside it.

        Both to 0.1 % of the range. An offset that is large beside the range moves values by more than noise hides.
        """
        zero, one = (end.double() for end in self.ends())
        expected = (self.factor.double() / self.unit_factor.double()).abs()
        step = torch.maximum(zero.abs(), one.abs()) * torch.finfo(torch.float32).eps
        fits = ((one - zero).abs() - expected).abs() <= ROUNDING * expected
        return bool((fits & (step <= ROUNDING * expected)).all())

    def to(self, device: torch.device | str) -> Scaler:
        moved = [t.to(device) for t in (self.factor, self.offset, self.unit_factor, self.unit_offset)]
        return Scaler(self.name, self.inverted, *moved)

    def describe(self) -> dict[str, Any]:
        """The scale as plain numbers, for the run's record."""
        numbers = {"factor": self.factor.flatten().tolist(), "offset": self.offset.flatten().tolist()}
        return {"name": self.name, "inverted": self.inverted, **numbers}


@dataclass(frozen=True)
class OneHot:
    """One-hot vectors of text: codes [..., T] -> float32 [..., T, V].

    An embedding is linear in one-hot vectors (embedding of c = one-hot(c) @ E). So a mixture or a mean of one-hot
    vectors gives the mixture or mean of embeddings for every E, and needs to be shared only once.
    """

    vocabulary: int
    name: str = "one-hot"

    def __call__(self, codes: Tensor) -> Tensor:
        """Convert codes [..., T] to one-hot vectors, float32 [..., T, V]."""
        return (codes.unsqueeze(-1) == torch.arange(self.vocabulary, device=codes.device)).to(torch.float32)

    def to_unit(self, scaled: Tensor) -> Tensor:
        """Clip to [0, 1]; one-hot vectors and their mixtures are in this range."""
        return scaled.clamp(0, 1)

    def from_unit(self, unit: Tensor) -> Tensor:
        """Return ``unit``: both scales are the same."""
        return unit

    def ends(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest number of a one-hot vector."""
        return torch.zeros(1), torch.ones(1)

    def diameter(self, shape: Sequence[int]) -> float:
        """The largest L2 distance of two texts [T]: sqrt(2 T)."""
        return math.sqrt(2 * math.prod(shape))

    def to(self, device: torch.device | str) -> OneHot:
        return self

    def describe(self) -> dict[str, Any]:
        return {"name": self.name, "vocabulary": self.vocabulary}


@dataclass(frozen=True)
class Tokens:
    """Ids of tokens as they are stored, int64: no scale changes them, and there are no pictures of them."""

    name: str = "tokens"

    def __call__(self, ids: Tensor) -> Tensor:
        return ids

    def to_unit(self, *_: object) -> NoReturn:
        """Raise :class:`FedblendError`: ids are no numbers to compute with."""
        raise tokens_refused("a part of this run")

    from_unit = ends = diameter = to_unit

    def to(self, device: torch.device | str) -> Tokens:
        return self

    def describe(self) -> dict[str, Any]:
        return {"name": self.name}


Fitted = Scaler | OneHot | Tokens
"""A scale that was fitted to data."""


@pydantic_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Inverting:
    """A scale from the unit scale's, which has ink as 1."""

    name: ClassVar[str]

    invert: Invert = "auto"
    """Whether to invert images, so ink is 1; "auto": images of one channel whose median is above 127."""

    def fit(self, data: Dataset) -> Fitted:
        return _fit(data, self.name, self.invert)


@part("scale", "standard")
class Standard(Inverting):
    """Mean 0 and deviation 1 over the training half, per channel or feature, ink as 1: the default.

    The deviation of a constant feature is taken as 1.
    """


@part("scale", "unit")
class Unit(Inverting):
    """[0, 1], ink as 1; features from their smallest to their largest training value."""


@part("scale", "symmetric")
class Symmetric(Inverting):
    """[-1, 1], ink as 1; features from their smallest to their largest training value."""


@part("scale", "none")
class Unscaled:
    """Stored values as floats: pixels 0 to 255, not inverted."""

    def fit(self, data: Dataset) -> Fitted:
        return _fit(data, "none", False)


def _fit(data: Dataset, name: str, invert: Invert) -> Fitted:
    if data.kind == "text":
        return OneHot(data.vocabulary)
    if data.kind == "tokens":
        return Tokens()
    x = data.train.x
    inverted = False
    if x.dtype == torch.uint8:
        counts = _histogram(x)
        inverted = _is_white_paper(counts) if invert == "auto" else bool(invert)
        sign = -1.0 if inverted else 1.0
        unit_factor = torch.full((x.shape[1],), sign / 255, dtype=torch.float64)
        unit_offset = torch.full_like(unit_factor, float(inverted))
        mean, deviation = _moments_of_histogram(counts, sign / 255, float(inverted))
    else:
        low, high = x.amin(dim=_all_but_1(x)).double(), x.amax(dim=_all_but_1(x)).double()
        unit_factor = 1 / torch.where(high > low, high - low, 1.0)
        unit_offset = -low * unit_factor
        mean, deviation = _moments(x, unit_factor, unit_offset)
    one = torch.ones_like(mean)
    spread = torch.where(deviation > 0, deviation, 1.0)
    slope, start = {"standard": (1 / spread, -mean / spread), "symmetric": (2 * one, -one)}.get(name, (one, 0 * one))
    factor, offset = (one, 0 * one) if name == "none" else (slope * unit_factor, slope * unit_offset + start)
    shape = (-1, *[1] * (x.dim() - 2))
    numbers = [n.to(torch.float32).reshape(shape) for n in (factor, offset, unit_factor, unit_offset)]
    return Scaler(name, inverted, *numbers)


def _all_but_1(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _histogram(x: Tensor) -> Tensor:
    """Counts of the 256 values in each channel, int64 [C, 256]."""
    channels = [torch.zeros(256, dtype=torch.int64) for _ in range(x.shape[1])]
    step = max(1, CHUNK // max(1, x[0, 0].numel()))
    for start in range(0, len(x), step):
        for channel, counts in enumerate(channels):
            counts += torch.bincount(x[start : start + step, channel].flatten(), minlength=256)
    return torch.stack(channels)


def _is_white_paper(counts: Tensor) -> bool:
    """Whether images have one channel and a median above 127."""
    if len(counts) != 1:
        return False
    return int(torch.searchsorted(counts[0].cumsum(0), (int(counts[0].sum()) + 1) // 2)) > 127


def _moments_of_histogram(counts: Tensor, factor: float, offset: float) -> tuple[Tensor, Tensor]:
    """Mean and deviation [C] of value * factor + offset, in double precision."""
    values = torch.arange(256, dtype=torch.float64) * factor + offset
    weights = counts.double() / counts.sum(1, keepdim=True)
    mean = weights @ values
    return mean, ((values - mean[:, None]).square() * weights).sum(1).sqrt()


def _moments(x: Tensor, factor: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation [C] of x * factor + offset, in double precision, a chunk of samples at a time."""
    shape = (-1, *[1] * (x.dim() - 2))
    factor, offset = factor.reshape(shape), offset.reshape(shape)
    count = x.numel() // x.shape[1]
    step = max(1, CHUNK // max(1, x[0].numel()))

    def total(function: Callable[[Tensor], Tensor]) -> Tensor:
        chunks = (x[i : i + step].double() * factor + offset for i in range(0, len(x), step))
        zero = torch.zeros(x.shape[1], dtype=torch.float64)
        return sum((function(c).sum(dim=_all_but_1(x)) for c in chunks), zero)

    mean = total(lambda c: c) / count
    # Two passes, because the one-pass formula is inexact for features with a small deviation.
    return mean, (total(lambda c: (c - mean.reshape(shape)).square()) / count).sqrt()
