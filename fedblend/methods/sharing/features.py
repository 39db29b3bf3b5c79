"""Features: hidden states of single samples."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field

from fedblend.core.registry import Count, Float, part
from fedblend.core.sharing import ClientData, Payload, Request, Sharing, SharingPlan


@part("sharing", "features")
class Features(Sharing):
    """Share hidden states after ``layer`` layers of single samples, with their targets (FLea, Xia et al. 2024).

    The clients of a round share ``fraction`` of their samples before they train, by the round's global model; the pool
    holds nothing of earlier rounds. A client shares the same samples in each of its rounds, evenly spaced among its
    samples. No mean hides a sample: whoever has the model can compare the features of candidates with those shared, and
    rebuild inputs where the layers lose little. The objective ``flea`` needs features.
    """

    plan = SharingPlan("hidden", "each-round", "cohort", sees_model=True)
    bytes_kind = "features"

    layer: Count = 1
    """Layers before the hidden states; the objective must have the same."""
    fraction: Annotated[Float, Field(gt=0, le=1)] = 0.1
    """Share of a client's samples that are shared, at least one sample."""

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        """``fraction`` of the samples, rounded down, but one at least."""
        return min(samples, max(1, int(self.fraction * samples)))

    def share(self, local: ClientData) -> Payload | None:
        """Hidden states x [n, ...] and targets y [n, outputs], one-hot where they are classes."""
        samples = len(local.y)
        if not samples:
            return None
        count = self.most_entries(samples, local.minimum)
        rows = torch.arange(count) * samples // count
        return {"x": local.hidden(local.scale(local.x[rows]), self.layer), "y": local.task.encode(local.y[rows])}
