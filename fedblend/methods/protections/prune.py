"""Pruning: only the largest entries of an update are sent."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fedblend.core.protection import Protection, Tensors, changes
from fedblend.core.registry import Float, part
from fedblend.core.trees import bytes_of

INDEX_BYTES = 4  # Bytes of the index of an entry, where entries are sent with their indices


@part("protection", "prune")
class Prune(Protection):
    """Send only the entries of a client's update with the largest absolute values; the others are 0.

    This gradient compression was the first defence tested against deep leakage (Zhu et al. 2019; AggEnhance, section
    5.3). The threshold is over all entries of a model together; all entries at the threshold are sent. It gives no
    (epsilon, delta), because the choice of entries depends on the data.
    """

    keep: Annotated[Float, Field(gt=0, le=1)] = 0.1
    """Share of the entries that is sent; 1 sends all."""

    def protect(self, upload: Tensors, start: Tensors, lr: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """The weights that the round began with, changed in the kept entries only."""
        if self.keep == 1:
            return dict(upload)
        change = changes(upload, start)
        sizes = torch.cat([c.flatten() for c in change.values()]).abs()
        if not bool(torch.isfinite(sizes).all()):
            return dict(upload)  # These have no order; the server rejects them and names the tensor.
        count = self._count(len(sizes))
        threshold = torch.kthvalue(sizes, len(sizes) - count + 1).values
        # A kept entry is copied from the upload, because start + change would differ from it in the last bit.
        return {
            name: torch.where(change[name].abs() >= threshold, tensor, start[name].to(tensor))
            if name in change
            else tensor
            for name, tensor in upload.items()
        }

    def sent_bytes(self, upload: Tensors, start: Tensors) -> int:
        """Bytes of the kept entries with their indices, or of all entries without indices, whichever are fewer."""
        entries = sum(
            int(torch.count_nonzero(c)) * (c.element_size() + INDEX_BYTES) for c in changes(upload, start).values()
        )
        rest = bytes_of({n: t for n, t in upload.items() if not t.is_floating_point()})
        return min(entries + rest, bytes_of(upload))

    def bytes_on_air(self, upload: Tensors) -> int:
        """As :meth:`sent_bytes` where no two entries are equal; entries are of the largest type."""
        pruned = [tensor for tensor in upload.values() if tensor.is_floating_point()]
        kept = self._count(sum(tensor.numel() for tensor in pruned))
        width = max((tensor.element_size() for tensor in pruned), default=0) + INDEX_BYTES
        rest = bytes_of(upload) - bytes_of({str(i): tensor for i, tensor in enumerate(pruned)})
        return min(kept * width + rest, bytes_of(upload))

    def _count(self, entries: int) -> int:
        """How many of so many entries are kept."""
        return max(1, round(self.keep * entries))

    def mechanism(self) -> str:
        return "pruning adds no noise, and which entries it keeps depends on the data"
