"""How far what an attacker's images would have sent is from what was sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


def squared(made: Tensors, observed: Tensors) -> torch.Tensor:
    """sum ||made - observed||^2 over all tensors (DLG, Zhu et al. 2019, equation 4)."""
    return torch.stack([(made[name] - seen).square().sum() for name, seen in observed.items()]).sum()


def cosine(made: Tensors, observed: Tensors) -> torch.Tensor:
    """1 - <made, observed> / (||made|| ||observed||), all tensors as one vector (InvGrad, Geiping et al. 2020)."""
    inner = torch.stack([(made[name] * seen).sum() for name, seen in observed.items()]).sum()
    lengths = [torch.stack([t[name].square().sum() for name in observed]).sum() for t in (made, observed)]
    return 1 - inner / (lengths[0] * lengths[1]).clamp(min=torch.finfo(inner.dtype).tiny).sqrt()


def total_variation(x: torch.Tensor) -> torch.Tensor:
    """Mean absolute difference of neighbours, down plus across, of images [..., H, W]."""
    return (x[..., 1:, :] - x[..., :-1, :]).abs().mean() + (x[..., 1:] - x[..., :-1]).abs().mean()
