"""What several tests of xormixfl take."""

from __future__ import annotations

import numpy as np
import torch


def rng(seed: int = 0) -> np.random.Generator:
    """A generator by its seed."""
    return np.random.default_rng(seed)


def pixels(n: int, seed: int = 0, side: int = 5) -> torch.Tensor:
    """Random pictures in 8 bits."""
    return torch.from_numpy(rng(seed).integers(0, 256, (n, 1, side, side), np.uint8))
