"""Channel statistics of images (StatMix; the pixels' form of CCST's styles)."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from fedblend.core.context import ModelSpec
from fedblend.core.registry import Count, part
from fedblend.core.sharing import ClientData, Payload, Request, Sharing, SharingPlan
from fedblend.methods.requirements import entries_in, fault_of_form, require_held, require_images


@part("sharing", "channel-statistics")
class ChannelStatistics(Sharing):
    """Share the mean and the standard deviation of each channel of images (StatMix, Lewy et al. 2022).

    mu_c = mean of the pixels of channel c,   sigma_c = sqrt(mean of (pixel - mu_c)^2)

    on the model's input scale. What leaves a client are these 2 C numbers, of each of some images (StatMix; "single" in
    CCST, Chen et al. 2023) or over all its images ("overall" in CCST). CCST takes them of the features of a trained
    VGG, here they are of pixels. They tell how bright and how rich in contrast a single image is, and nothing of what
    it shows; `fedblend leaks` measures how well members can be told by them.
    """

    bytes_kind = "statistics"
    plan = SharingPlan("statistics")
    if_empty = "let clients hold more samples, or lower policy.min_mean: {min_mean}"

    of: Literal["image", "client"] = "image"
    """Statistics of single images, or of all images of a client together, which must be as many as the policy demands
    of a mean.
    """
    samples: Count | Literal["all"] = 50
    """Images of a client whose statistics it shares, drawn without replacement; with "client" all are used."""

    @property
    def made_of(self) -> Literal["sample", "samples"]:  # type: ignore[override]
        return "sample" if self.of == "image" else "samples"

    def require_possible(self, sizes: np.ndarray, minimum: int) -> None:
        """Raise :class:`FedblendError` if no client holds as many samples as the policy demands of a mean."""
        if self.of == "client":
            require_held(sizes, {"policy.min_mean": minimum})

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        if self.of == "client":
            return int(samples >= minimum)
        return samples if self.samples == "all" else min(samples, self.samples)

    def share(self, local: ClientData) -> Payload | None:
        """Means ``mean`` [n, C] and deviations ``std`` [n, C], float32; ``None`` with too few samples.

        Raises :class:`FedblendError` for samples that are no images.
        """
        require_images(self, local.x.shape[1:], "means, or none")
        n = len(local.y)
        if n < (local.minimum if self.of == "client" else 1):
            return None
        rows = local.rng.permutation(n)[: n if self.samples == "all" or self.of == "client" else self.samples]
        mean, std = channel_statistics(local.scale(local.x[torch.from_numpy(np.sort(rows))]).double())
        if self.of == "client":
            square = (std.square() + mean.square()).mean(0, keepdim=True)
            mean = mean.mean(0, keepdim=True)
            std = (square - mean.square()).clamp(min=0).sqrt()
        return {"mean": mean.float(), "std": std.float()}

    def fault(self, payload: Payload, samples: int, spec: ModelSpec) -> str | None:
        form = (entries_in(payload), spec.shape[0], torch.float32)
        if fault := fault_of_form(payload, {"mean": form, "std": form}):
            return fault
        if (payload["std"] < 0).any():
            return "'std' is negative; valid: numbers from 0"
        return None


def channel_statistics(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of each channel of each image: [n, C] of x [n, C, H, W]."""
    pixels = x.flatten(2)
    mean = pixels.mean(2)
    return mean, (pixels - mean[..., None]).square().mean(2).sqrt()
