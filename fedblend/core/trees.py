"""Trees of tensors, kept flat: a table by path, such as ``terms.0/control``; and tables of one model compared."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]
"""Tensors by name: a model, an upload, what a part keeps."""


def add_prefix(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors with ``prefix`` before each name."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def for_clients(prefix: str, tables: Mapping[int, Tensors]) -> dict[str, torch.Tensor]:
    """Return one table for several clients' tables, with ``prefix`` and the client before each name."""
    return {f"{prefix}{client}/{name}": t for client, table in tables.items() for name, t in table.items()}


def by_client(prefix: str, tensors: Tensors) -> dict[int, dict[str, torch.Tensor]]:
    """Return the tables that :func:`for_clients` joined."""
    tables: dict[int, dict[str, torch.Tensor]] = {}
    for path, tensor in strip_prefix(prefix, tensors).items():
        client, _, name = path.partition("/")
        tables.setdefault(int(client), {})[name] = tensor
    return tables


def strip_prefix(prefix: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def in_order(tensors: Tensors, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return the tensors in the order of ``names`` (a model's), others after them; files and messages reorder."""
    return {name: tensors[name] for name in (*(name for name in names if name in tensors), *tensors)}


def without(tensors: Tensors, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Return the tensors but those of these ``names``."""
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def differing(one: Tensors, other: Tensors) -> list[str]:
    """Return the names that one table lacks, or that differ in shape or type; none where both are of one model."""
    return sorted(name for name in one.keys() | other.keys() if _form(one.get(name)) != _form(other.get(name)))


def for_file(tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the tensors for a safetensors file, whose format allows no memory under two names: a copy for each."""
    written: dict[str, torch.Tensor] = {}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by address of the storage
    for name, tensor in tensors.items():
        flat = tensor.detach().contiguous().cpu()
        begin, others = flat.data_ptr(), spans[flat.untyped_storage().data_ptr()]
        end = begin + flat.numel() * flat.element_size()
        is_shared = not flat.numel() or any(begin < other_end and other < end for other, other_end in others)
        written[name] = flat.clone() if is_shared else flat
        others.append((begin, end))
    return written


def bytes_of(tensors: Tensors) -> int:
    """Bytes of the tensors as they would be sent."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def digest_of(tensors: Tensors) -> str:
    """Return the SHA-256 of tensors with their names, shapes and types, in order of name; hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        # NumPy lacks bfloat16.
        array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
        kind = str(tensor.dtype) if tensor.dtype == torch.bfloat16 else array.dtype.str
        digest.update(f"{name}\0{kind}\0{list(array.shape)}\0".encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()


def _form(tensor: torch.Tensor | None) -> tuple[torch.Size, torch.dtype] | None:
    return None if tensor is None else (tensor.shape, tensor.dtype)
