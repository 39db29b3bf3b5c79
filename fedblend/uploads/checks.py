"""Uploads are never trusted: what is checked before one is used, and how bytes are counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fedblend.errors import legible

Tensors = Mapping[str, torch.Tensor]


def fault_of(upload: Tensors, like: Tensors) -> str | None:
    """Why an upload cannot be used (names, shapes, dtypes, finiteness), or ``None`` if it can."""
    if set(upload) != set(like):
        missing, extra = sorted(set(like) - set(upload)), sorted(set(upload) - set(like))
        return legible(f"its tensors are not the model's: missing {missing or 'none'}, unknown {extra or 'none'}")
    for name, tensor in upload.items():
        if tensor.shape != like[name].shape:
            return f"'{name}' is of shape {list(tensor.shape)}, the model's of {list(like[name].shape)}"
        if tensor.dtype != like[name].dtype:
            return f"'{name}' is of type {tensor.dtype}, the model's of {like[name].dtype}"
    floating = {name: tensor for name, tensor in upload.items() if tensor.is_floating_point()}
    if not _all_finite([*floating.values()]):
        for name, tensor in floating.items():
            if not is_finite(tensor):
                return f"'{name}' holds NaN or infinity (a learning rate too large?)"
    return None


def _all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no sum is NaN or infinite, with one look: on a GPU each waits for all that was begun before."""
    if not tensors:
        return True
    sums = [tensor.sum() for tensor in tensors]
    return bool(torch.isfinite(torch.stack([total.to(sums[0]) for total in sums])).all())


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite."""
    # One of these makes the sum so too, and a sum is cheaper than looking at each; it may also overflow by itself.
    return bool(torch.isfinite(tensor.sum())) or bool(torch.isfinite(tensor).all())


def bytes_of(tensors: Tensors) -> int:
    """Bytes of the tensors as they would be sent."""
    return sum(t.numel() * t.element_size() for t in tensors.values())
