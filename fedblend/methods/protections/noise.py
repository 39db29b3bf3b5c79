"""Clipping and noise on updates."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pydantic
import torch

from fedblend.core.protection import Mechanism, Protection, ReleaseContext, Tensors, changes, moved, no_further
from fedblend.core.registry import NonNegative, Positive, part


@part("protection", "noise")
class ClipAndNoise(Protection):
    """A client's update is scaled down to a norm of at most ``clip``, and noise is added (the update is w_k - w).

    With clipping, whatever a client's data are, its update cannot be further than 2 ``clip`` from what another's in
    its place would be; noise in proportion to that earns an (epsilon, delta) that holds for all of a client's data
    (McMahan et al. 2018; Dwork and Roth 2014). Norms are L2 for Gaussian noise and L1 for Laplace noise. AggEnhance
    adds Laplace noise without clipping, to weights (section 5.3) or gradients (appendix A.4): that hinders an
    attacker, and proves nothing.

    An update that is not finite counts as 0, so that whether a client is refused says nothing of its data. Tensors of
    whole numbers (batch norm's counters) leave as they are.
    """

    distribution: Literal["gaussian", "laplace"] = "gaussian"
    """Distribution of the noise on each number."""
    scale: NonNegative = 0.0
    """Standard deviation of Gaussian noise, or scale b of Laplace noise, in the units that `on` says."""
    multiplier: NonNegative | None = None
    """Scale as a multiple of `clip`, in place of `scale`."""
    clip: Positive | None = None
    """Norm to which an update is scaled down if it is longer; unless given, none is, and no epsilon can be stated."""
    on: Literal["weights", "gradients"] = "weights"
    """Units of `scale` and `clip`: those of weights, or of gradients, which are an update over the learning rate."""
    side: Literal["client", "server"] = "client"
    """Who adds the noise: each client to its update, or the server to the sum of a round's updates."""

    @pydantic.model_validator(mode="after")
    def _agree(self) -> ClipAndNoise:
        if self.multiplier is not None and self.clip is None:
            raise ValueError(
                f"multiplier: {self.multiplier} is a multiple of clip, which is not given; give clip, or scale"
            )
        if self.multiplier is not None and self.scale:
            raise ValueError(f"multiplier: {self.multiplier} and scale: {self.scale} both say how much noise; give one")
        return self

    @property
    def size(self) -> float:
        """The noise's standard deviation or scale, in the units of ``on``."""
        return self.scale if self.multiplier is None or self.clip is None else self.multiplier * self.clip

    def protect(self, upload: Tensors, start: Tensors, lr: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """At a client: its update clipped, and made noisy if it is the client that does so."""
        size = self.size if self.side == "client" else 0.0
        if self.clip is None and not size:
            return dict(upload)
        unit = lr if self.on == "gradients" else 1.0
        change = changes(upload, start)
        if self.clip is not None:
            change = self._clipped(change, self.clip * unit)
        if size:
            return moved(upload, start, {name: c + self._drawn(c, size * unit, rng) for name, c in change.items()})
        # What leaves is all that the server's noise has to outweigh: it must be within the norm as it is sent.
        return no_further(moved(upload, start, change), start, change)

    def release(self, weights: Tensors, start: Tensors, round: ReleaseContext) -> dict[str, torch.Tensor]:
        """At the server: noise on the sum of updates, which is divided by the clients that were drawn.

        Not by those that arrived: how many do may depend on the data, and the sum's sensitivity is all that is known.
        In the precision of ``weights``, which is not to be rounded before.
        """
        if self.side == "client" or not self.size:
            return dict(weights)
        unit = round.lr if self.on == "gradients" else 1.0
        share = round.arrived / round.cohort
        change = {
            name: share * c + self._drawn(c, self.size * unit / round.cohort, round.rng)
            for name, c in changes(weights, start).items()
        }
        return moved(weights, start, change)

    def mechanism(self) -> Mechanism | str:
        """What the noise earns: it has to outweigh a distance of 2 ``clip``."""
        if not self.size:
            return "protection adds no noise"
        if self.clip is None:
            return "protection.clip is not given, so that nothing bounds what one client can change"
        return Mechanism(self.distribution, self.size / (2 * self.clip), self.side == "server")

    def _clipped(self, change: dict[str, torch.Tensor], clip: float) -> dict[str, torch.Tensor]:
        order = 2 if self.distribution == "gaussian" else 1
        norms = [torch.linalg.vector_norm(c, order, dtype=torch.float64) for c in change.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), order)
        # Of what has no length nothing is sent. A hair below 1, since products are rounded.
        factor = torch.where(torch.isfinite(norm), (clip * (1 - 1e-6) / norm).clamp(max=1.0), 0.0)
        return {name: torch.where(torch.isfinite(norm), c * factor.to(c.dtype), 0.0) for name, c in change.items()}

    def _drawn(self, like: torch.Tensor, size: float, rng: np.random.Generator) -> torch.Tensor:
        """Noise for each number of a tensor."""
        shape = tuple(like.shape)
        if self.distribution == "gaussian":
            drawn = rng.standard_normal(shape, np.float32)
        else:
            drawn = rng.laplace(size=shape).astype(np.float32)
        return (size * torch.from_numpy(np.asarray(drawn))).to(like)
