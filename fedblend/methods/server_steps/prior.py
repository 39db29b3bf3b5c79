"""Real samples at the server in place of points (AggEnhance, Figure 9)."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, Tensors
from fedblend.data.scale import Scaler
from fedblend.methods.server_steps.points import require_classes
from fedblend.methods.server_steps.tuning import Tuning

SHIFT = 4
"""Pixels by which augmentation moves a picture at most."""


@part("server_step", "prior-samples")
class PriorSamples(Tuning):
    """The aggregate is tuned on real samples of each class that the server holds (Ou et al. 2022, Figure 9).

    AggEnhance's comparison: real samples are class interior points too, but the server must not have them. They are
    drawn once from all clients' training samples, which breaks privacy: it needs `unsafe = true`.
    """

    breaks_privacy = True

    per_class: Count = 1
    """Real samples of each class, as in the paper; all of a class that has fewer."""
    augment: bool = False
    """Turn pictures round (left to right, every second one) and move them by up to 4 pixels, anew in each epoch."""

    def require_possible(self, known: ModelSpec) -> None:
        """Raise :class:`FedblendError` unless the task has classes, and pictures where they are to be augmented."""
        require_classes("prior-samples", known)
        if self.augment and len(known.shape) != 3:
            raise FedblendError(
                f"method.server_step.augment: true moves pictures; these data are of shape {list(known.shape)}"
            )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate tuned on the samples; nothing is kept, since they are the same in every round."""
        assert server.prior is not None
        assert isinstance(server.scale, Scaler)
        x, y = server.prior(self.per_class)
        unit = server.scale.to_unit(server.scale(x))
        return self.tune(weights, unit, y, torch.ones(len(y)), server), {}

    def seen(self, points: torch.Tensor, server: ServerContext) -> torch.Tensor:
        """A batch, augmented if asked."""
        return augmented(points, server.rng) if self.augment else points


def augmented(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Pictures [n, channels, height, width], half of them mirrored, each moved by up to 4 pixels over black."""
    count, _, height, width = pictures.shape
    mirrored = torch.from_numpy(rng.random(count) < 0.5)
    turned = torch.where(mirrored[:, None, None, None], pictures.flip(-1), pictures)
    wide = F.pad(turned, (SHIFT,) * 4)
    down, right = (torch.from_numpy(rng.integers(0, 2 * SHIFT + 1, (count, 1))) for _ in range(2))
    rows, columns = torch.arange(height) + down, torch.arange(width) + right
    return wide[torch.arange(count)[:, None, None], :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
