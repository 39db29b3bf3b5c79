"""Tuning of the aggregate on real samples at the server, for comparison with points (AggEnhance, Figure 9)."""

from __future__ import annotations

import numpy as np
import torch

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, Tensors
from fedblend.data.scale import Scaler
from fedblend.methods.augment.pictures import mirrored, shifted
from fedblend.methods.server_steps.points import require_classes
from fedblend.methods.server_steps.tuning import Tuning

SHIFT = 4
"""Largest shift of an augmented image, in pixels."""


@part("server_step", "prior-samples")
class PriorSamples(Tuning):
    """Tune the aggregate on real samples of each class at the server (AggEnhance, Ou et al. 2022, Figure 9).

    This is AggEnhance's comparison: real samples are class interior points too, but the server must not have them. They
    are drawn once from all clients' training samples, which breaks privacy and needs `unsafe = true`.
    """

    works_on = "raw"

    per_class: Count = 1
    """Real samples of each class, as in the paper; all samples of a class that has fewer."""
    augment: bool = False
    """Mirror half of the images left to right, and shift all by up to 4 pixels, anew in each epoch."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` for data without classes, and with ``augment`` for data that are no images."""
        require_classes("prior-samples", spec)
        if self.augment and len(spec.shape) != 3:
            raise FedblendError(
                f"method.server_step.augment: true needs images, but these data are of shape {list(spec.shape)}; "
                "valid: false"
            )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate tuned on the samples, and no further state: the samples are the same in every round."""
        assert server.prior is not None
        assert isinstance(server.scale, Scaler)
        x, y = server.prior(self.per_class)
        unit = server.scale.to_unit(server.scale(x))
        return self.tune(weights, unit, y, torch.ones(len(y)), server), {}

    def seen(self, points: torch.Tensor, server: ServerContext) -> torch.Tensor:
        """The batch, augmented with ``augment``."""
        return augmented(points, server.rng) if self.augment else points


def augmented(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Images [n, channels, height, width], half of them mirrored, each shifted by up to 4 pixels and padded with 0."""
    count, device = len(pictures), pictures.device
    turned = mirrored(pictures, torch.from_numpy(rng.random(count) < 0.5).to(device))
    up, left = (torch.from_numpy(rng.integers(0, 2 * SHIFT + 1, count)).to(device) - SHIFT for _ in range(2))
    return shifted(turned, up, left, pictures.new_zeros(()))
