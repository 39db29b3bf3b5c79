"""The names of a model's tensors."""

from __future__ import annotations

from torch import nn


def same_tensors(model: nn.Module) -> tuple[str, str] | None:
    """Two names of one tensor, where layers share a weight; ``None`` where every name has its own."""
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        other = first.setdefault(id(tensor), name)
        if other != name:
            return other, name
    return None
