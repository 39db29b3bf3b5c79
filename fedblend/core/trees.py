"""Tensors of several kinds in one table, told apart by the beginning of their names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch


def add_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with ``prefix`` before each name."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def for_clients(prefix: str, tables: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tables of several clients as one, with ``prefix`` and the client before each name."""
    return {f"{prefix}{client}/{name}": t for client, table in tables.items() for name, t in table.items()}


def by_client(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """The tables that :func:`for_clients` made one of."""
    tables: dict[int, dict[str, torch.Tensor]] = {}
    for path, tensor in strip_prefix(prefix, tensors).items():
        client, _, name = path.partition("/")
        tables.setdefault(int(client), {})[name] = tensor
    return tables


def strip_prefix(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those tensors whose names begin with ``prefix``, by what follows it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


Tensors = Mapping[str, torch.Tensor]


def in_order(tensors: Tensors, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors in the order of ``names`` (a model's), others after them; files and messages have another order."""
    return {name: tensors[name] for name in (*(name for name in names if name in tensors), *tensors)}


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Names that only one of two tables has, or with another shape or type; none where both are of one model."""
    return sorted(name for name in one.keys() | other.keys() if _form(one.get(name)) != _form(other.get(name)))


def _form(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
