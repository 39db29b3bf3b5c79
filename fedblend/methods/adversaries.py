"""Adversaries: clients that send corrupted uploads, to test aggregators."""

from __future__ import annotations

import numpy as np
import torch

from fedblend.core.protection import Adversary
from fedblend.core.registry import Fraction, NonNegative, Positive, part
from fedblend.core.trees import Tensors

__all__ = ["Adversary", "NaNs", "NoAdversary", "NoiseSender", "SignFlip"]


@part("adversary", "none")
class NoAdversary(Adversary):
    """No client is an adversary."""


@part("adversary", "noise")
class NoiseSender(Adversary):
    """Some clients send the round's weights plus Gaussian noise instead of their trained weights."""

    share: Fraction = 0.2
    """Share of the clients that are adversaries, the same ones in all rounds."""
    scale: NonNegative = 1.0
    """Standard deviation of the noise, in the units of weights."""

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:

        def noisy(tensor: torch.Tensor) -> torch.Tensor:
            drawn = np.asarray(rng.standard_normal(tuple(tensor.shape), np.float32))
            return tensor + (self.scale * torch.from_numpy(drawn)).to(tensor)

        return {n: noisy(start[n].to(t)) if t.is_floating_point() else t for n, t in upload.items()}


@part("adversary", "sign-flip")
class SignFlip(Adversary):
    """Some clients send their update with the sign flipped and scaled up: w - factor (w_k - w)."""

    share: Fraction = 0.2
    """Share of the clients that are adversaries, the same ones in all rounds."""
    factor: Positive = 10.0
    """Factor on the flipped update."""

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:

        def flipped(tensor: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
            return begin - self.factor * (tensor - begin)

        return {n: flipped(t, start[n].to(t)) if t.is_floating_point() else t for n, t in upload.items()}


@part("adversary", "nan")
class NaNs(Adversary):
    """Some clients send NaN for every number, like a client whose training diverged."""

    share: Fraction = 0.2
    """Share of the clients that are adversaries, the same ones in all rounds."""

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        return {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in upload.items()}
