"""Tables of weights: in which order they are, and whether two are of one model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


def in_order(tensors: Tensors, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors in the order of ``names`` (a model's), others after them; files and messages have another order."""
    return {name: tensors[name] for name in (*(name for name in names if name in tensors), *tensors)}


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Names that only one of two tables has, or with another shape or type; none where both are of one model."""
    return sorted(name for name in one.keys() | other.keys() if _form(one.get(name)) != _form(other.get(name)))


def _form(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
