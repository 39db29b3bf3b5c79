"""Tensors of several kinds in one table, told apart by the beginning of their names."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with ``prefix`` before each name."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those tensors whose names begin with ``prefix``, by what follows it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
