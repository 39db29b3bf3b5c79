"""Adversaries: clients that send what they should not, to see what aggregators make of it."""

from __future__ import annotations

import numpy as np
import torch

from fedblend.core.protection import Adversary
from fedblend.core.registry import Fraction, NonNegative, Positive, part
from fedblend.core.trees import Tensors

__all__ = ["Adversary", "NaNs", "NoAdversary", "NoiseSender", "SignFlip"]


@part("adversary", "none")
class NoAdversary(Adversary):
    """Every client sends what it should."""


@part("adversary", "noise")
class NoiseSender(Adversary):
    """Some clients send the round's weights with Gaussian noise on them in place of what they learned."""

    share: Fraction = 0.2
    """Share of the clients that do so, the same ones in all rounds."""
    scale: NonNegative = 1.0
    """Standard deviation of the noise, in the units of weights."""

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """The round's weights with noise on them."""

        def noisy(tensor: torch.Tensor) -> torch.Tensor:
            drawn = np.asarray(rng.standard_normal(tuple(tensor.shape), np.float32))
            return tensor + (self.scale * torch.from_numpy(drawn)).to(tensor)

        return {n: noisy(start[n].to(t)) if t.is_floating_point() else t for n, t in upload.items()}


@part("adversary", "sign-flip")
class SignFlip(Adversary):
    """Some clients send their update turned round and made longer: w - factor (w_k - w)."""

    share: Fraction = 0.2
    """Share of the clients that do so, the same ones in all rounds."""
    factor: Positive = 10.0
    """How many times longer the update becomes."""

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """The round's weights moved the wrong way."""

        def turned(tensor: torch.Tensor, begin: torch.Tensor) -> torch.Tensor:
            return begin - self.factor * (tensor - begin)

        return {n: turned(t, start[n].to(t)) if t.is_floating_point() else t for n, t in upload.items()}


@part("adversary", "nan")
class NaNs(Adversary):
    """Some clients send NaN for every number, as a client does whose training broke down."""

    share: Fraction = 0.2
    """Share of the clients that do so, the same ones in all rounds."""

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """NaN throughout."""
        return {n: torch.full_like(t, torch.nan) if t.is_floating_point() else t for n, t in upload.items()}
