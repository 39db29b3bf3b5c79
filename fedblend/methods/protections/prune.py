"""Pruning: only the largest entries of an update travel."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from fedblend.core.protection import Protection, Tensors, changes
from fedblend.core.registry import Float, part
from fedblend.core.upload import bytes_of

INDEX_BYTES = 4
"""Bytes of an entry's place, where entries travel with their places."""


@part("protection", "prune")
class Prune(Protection):
    """Gradient compression: of a client's update only the entries of largest size are sent, the rest are 0.

    The defence that deep leakage was first tried against (Zhu et al. 2019, who AggEnhance's section 5.3 follows). The
    threshold is over all of a model's entries together; of several at the threshold all are sent. It earns no
    (epsilon, delta): which entries travel depends on the data.
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
            return dict(upload)  # No order among these; the server refuses it by name.
        count = max(1, round(self.keep * len(sizes)))
        threshold = torch.kthvalue(sizes, len(sizes) - count + 1).values
        # A kept entry is the client's own number: start + change would differ from it in the last bit.
        return {
            name: torch.where(change[name].abs() >= threshold, tensor, start[name].to(tensor))
            if name in change
            else tensor
            for name, tensor in upload.items()
        }

    def sent_bytes(self, upload: Tensors, start: Tensors) -> int:
        """Bytes of the kept entries with their places, or of all entries without, whichever are fewer."""
        entries = sum(
            int(torch.count_nonzero(c)) * (c.element_size() + INDEX_BYTES) for c in changes(upload, start).values()
        )
        rest = bytes_of({n: t for n, t in upload.items() if not t.is_floating_point()})
        return min(entries + rest, bytes_of(upload))

    def mechanism(self) -> str:
        """Why there is no (epsilon, delta)."""
        return "pruning adds no noise, and which entries it keeps depends on the data"
