"""Tensors of several kinds in one table, told apart by the beginning of their names."""

from __future__ import annotations

from collections.abc import Mapping

import torch


def named(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with ``prefix`` before each name."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def for_clients(prefix: str, tables: Mapping[int, Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tables of several clients as one, with ``prefix`` and the client before each name."""
    return {f"{prefix}{client}/{name}": t for client, table in tables.items() for name, t in table.items()}


def by_client(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """The tables that :func:`for_clients` made one of."""
    tables: dict[int, dict[str, torch.Tensor]] = {}
    for path, tensor in under(prefix, tensors).items():
        client, _, name = path.partition("/")
        tables.setdefault(int(client), {})[name] = tensor
    return tables


def under(prefix: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those tensors whose names begin with ``prefix``, by what follows it."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
