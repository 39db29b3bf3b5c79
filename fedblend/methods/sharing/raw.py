"""Sharing raw samples: the upper bound that breaks privacy."""

from __future__ import annotations

from fedblend.core.registry import part
from fedblend.core.sharing import ClientData, Payload, Sharing


@part("sharing", "raw")
class Raw(Sharing):
    """Every client gives all its samples away, as stored (FedMix's Global Mixup).

    It breaks privacy, and runs only in an experiment that says ``unsafe = true``.
    """

    bytes_kind = "raw"
    unsafe = True

    def share(self, local: ClientData) -> Payload | None:
        """Samples x and targets y as stored."""
        return {"x": local.x, "y": local.y} if len(local.y) else None
