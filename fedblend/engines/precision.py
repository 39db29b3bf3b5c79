"""In which numbers convolutions and matrix products are computed while clients train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch

Precision = Literal["float32", "tf32", "bfloat16"]


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """Inside, layers compute in this precision; their weights and the losses stay float32."""
    if precision != "bfloat16":
        return nullcontext()
    # Its cache of rounded weights would outlive them in a traced step.
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


def allow_tf32(precision: Precision) -> None:
    """Let GPUs round the factors of float32 products to ten bits, or not; nothing else knows such products."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextmanager
def no_tf32() -> Iterator[None]:
    """Inside, no GPU rounds the factors of products: how models are tested, whatever they were trained in."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    allow_tf32("float32")
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
