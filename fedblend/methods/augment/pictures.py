"""Augmentation of local training: crops and flips of the pictures of each batch.

As objectives, augmentations have two halves. :func:`draw` makes all random choices of a client's round outside the
step, one row for each sample of each batch, from a stream of (seed, round, client). :func:`augmented` is a function of
pictures and these rows. So every engine trains on the same pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch

from fedblend.core.errors import FedblendError
from fedblend.core.part import Part
from fedblend.core.registry import Count, Fraction, part


class Augmentation(Part):
    """Base of augmentations; a subclass is a part and defines :meth:`draw` and :meth:`apply`."""

    numbers: ClassVar[int]
    """Whole numbers that are drawn for each sample."""

    def require_possible(self, shape: Sequence[int]) -> None:
        """Raise :class:`FedblendError` for pictures of a ``shape`` (channels, height, width) that is too small."""

    def draw(self, rng: np.random.Generator, samples: int) -> np.ndarray:
        """The random choices of each sample, int64 [samples, numbers]."""
        raise TypeError(f"{type(self).__name__} defines no draw")

    def apply(self, x: torch.Tensor, drawn: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
        """Pictures [n, C, H, W] as stored, changed by their rows int64 [n, numbers].

        ``background`` [C, 1, 1] is the stored value of pixels that come from outside a picture.
        """
        raise TypeError(f"{type(self).__name__} defines no apply")


@part("augmentation", "random-crop")
class RandomCrop(Augmentation):
    """Pad each picture on all sides and cut out a part of its own size, at a random place.

    As ``torchvision.transforms.RandomCrop(side, padding)``. Padding has no ink: it is black, or white paper where the
    scale inverts pictures.
    """

    numbers = 2

    padding: Count = 4
    """Pixels of padding on each side: pictures are shifted by up to this number."""

    def require_possible(self, shape: Sequence[int]) -> None:
        """Raise :class:`FedblendError` where a shifted picture could show nothing of itself."""
        if self.padding >= min(shape[-2:]):
            raise FedblendError(
                f"train.augment: random-crop.padding: {self.padding} is not valid for pictures of {shape[-2]} x "
                f"{shape[-1]} pixels; valid: 1 to {min(shape[-2:]) - 1}"
            )

    def draw(self, rng: np.random.Generator, samples: int) -> np.ndarray:
        """First row and first column of the part, from 0 to twice the padding."""
        return rng.integers(2 * self.padding + 1, size=(samples, 2))

    def apply(self, x: torch.Tensor, drawn: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
        up, left = (drawn - self.padding).unbind(1)
        return shifted(x, up, left, background)


@part("augmentation", "horizontal-flip")
class HorizontalFlip(Augmentation):
    """Mirror a picture left to right, with a probability; as ``torchvision.transforms.RandomHorizontalFlip``."""

    numbers = 1

    probability: Fraction = 0.5
    """Probability of a flip."""

    def draw(self, rng: np.random.Generator, samples: int) -> np.ndarray:
        """1 for pictures that are mirrored, else 0."""
        return (rng.random((samples, 1)) < self.probability).astype(np.int64)

    def apply(self, x: torch.Tensor, drawn: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
        return mirrored(x, drawn[:, 0] == 1)


def mirrored(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Pictures [n, C, H, W], those that are ``chosen``, bool [n], mirrored left to right."""
    return torch.where(chosen[:, None, None, None], x.flip(-1), x)


def shifted(x: torch.Tensor, up: torch.Tensor, left: torch.Tensor, background: torch.Tensor) -> torch.Tensor:
    """Pictures [n, C, H, W], each shifted by so many pixels, int64 [n]; pixels from outside are ``background``."""
    height, width = x.shape[-2:]
    rows = torch.arange(height, device=x.device) + up[:, None]
    columns = torch.arange(width, device=x.device) + left[:, None]
    inside = ((rows >= 0) & (rows < height))[:, None, :, None] & ((columns >= 0) & (columns < width))[:, None, None, :]
    moved = x.gather(2, rows.clamp(0, height - 1)[:, None, :, None].expand_as(x))
    moved = moved.gather(3, columns.clamp(0, width - 1)[:, None, None, :].expand_as(x))
    return torch.where(inside, moved, background)


def draw(augment: Sequence[Augmentation], rng: np.random.Generator, samples: int) -> np.ndarray:
    """The random choices of several augmentations side by side, int64 [samples, numbers]."""
    return np.concatenate([one.draw(rng, samples) for one in augment], 1)


def augmented(
    augment: Sequence[Augmentation], x: torch.Tensor, drawn: torch.Tensor, background: torch.Tensor
) -> torch.Tensor:
    """Pictures [n, C, H, W] after the augmentations, one after another, by their rows of :func:`draw`."""
    for one in augment:
        own, drawn = drawn[:, : one.numbers], drawn[:, one.numbers :]
        x = one.apply(x, own, background)
    return x
