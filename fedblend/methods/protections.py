"""Protections: transformations of a client's upload before it leaves the client, such as clipping and noise."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import numpy as np
import pydantic
import torch
from pydantic import Field

from fedblend.core.errors import FedblendError
from fedblend.core.protection import Mechanism, Protection, ReleaseContext, Tensors, changes, moved, no_further
from fedblend.core.registry import Float, NonNegative, Positive, part
from fedblend.core.trees import bytes_of

LEAST = 1e-30
"""Smallest noise. Smaller numbers lose digits in float32, down to 1e-45, where noise is 0 and hides nothing."""

STEPS = 10  # Noisy numbers are rounded to steps of 2^-10 to 2^-9 times the noise's size
INDEX_BYTES = 4  # Bytes of the index of an entry, where entries are sent with their indices


@part("protection", "none")
class NoProtection(Protection):
    """Send uploads unchanged."""

    def mechanism(self) -> str:
        return "uploads leave the clients as they are"


@part("protection", "noise")
class ClipAndNoise(Protection):
    """Scale a client's update w_k - w down to a norm of at most ``clip``, and add noise.

    With clipping, the updates of any two clients differ by at most 2 ``clip``. Noise in proportion to that gives an
    (epsilon, delta) for all data of a client (McMahan et al. 2018; Dwork and Roth 2014). Norms are L2 for Gaussian
    noise and L1 for Laplace noise. AggEnhance adds Laplace noise without clipping, to weights (section 5.3) or
    gradients (appendix A.4). That hinders an attacker but gives no (epsilon, delta).

    With clipping, an update that is not finite counts as 0, so that the rejection of a client reveals nothing about its
    data. Norm and noise are of all floating-point tensors, batch norm's running statistics among them. Integer tensors,
    such as batch norm's counters, can have no noise: the round's own are sent in their place.
    """

    distribution: Literal["gaussian", "laplace"] = "gaussian"
    """Distribution of the noise on each number."""
    scale: NonNegative = 0.0
    """Standard deviation of Gaussian noise, or scale b of Laplace noise, in the units of `on`."""
    multiplier: NonNegative | None = None
    """Scale as a multiple of `clip`, in place of `scale`."""
    clip: Positive | None = None
    """Largest norm of an update (default: no clipping, and so no epsilon)."""
    on: Literal["weights", "gradients"] = "weights"
    """Units of `scale` and `clip`: those of weights, or of gradients, which are an update over the learning rate."""
    side: Literal["client", "server"] = "client"
    """Where the noise is added: by each client to its update, or by the server to the sum of a round's updates."""

    @pydantic.model_validator(mode="after")
    def _agree(self) -> ClipAndNoise:
        if self.multiplier is not None and self.clip is None:
            raise ValueError(
                f"multiplier: {self.multiplier} is a multiple of clip, which is not given; give clip, or scale"
            )
        if self.multiplier is not None and self.scale:
            raise ValueError(f"multiplier: {self.multiplier} and scale: {self.scale} both set the noise; give only one")
        if (self.multiplier or self.scale) and self.size < LEAST:
            field = "scale" if self.multiplier is None else "multiplier"
            raise ValueError(
                f"{field}: noise of {self.size:g} is too small for float32 and would be rounded away; valid: noise of "
                f"{LEAST:g} or more (clip times multiplier, or scale), or 0"
            )
        return self

    @property
    def size(self) -> float:
        """The noise's standard deviation or scale, in the units of ``on``."""
        return self.scale if self.multiplier is None or self.clip is None else self.multiplier * self.clip

    def protect(self, upload: Tensors, start: Tensors, lr: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """At a client: its update, clipped, and with noise where ``side`` is "client"."""
        size = self.size if self.side == "client" else 0.0
        if self.clip is None and not size:
            return dict(upload)
        upload = {name: tensor if tensor.is_floating_point() else start[name] for name, tensor in upload.items()}
        unit = lr if self.on == "gradients" else 1.0
        change = changes(upload, start)
        if self.clip is not None:
            change = self._clipped(change, self.clip * unit)
        if size:
            noise = self._noise(unit)
            return moved(upload, start, {name: self._noisy(c, noise, rng) for name, c in change.items()})
        # The update as sent must be within the norm, because the server's noise is sized for it.
        return no_further(moved(upload, start, change), start, change)

    def release(self, weights: Tensors, start: Tensors, round: ReleaseContext) -> dict[str, torch.Tensor]:
        """At the server: add noise to the sum of updates, and divide by the number of clients that were drawn.

        The number of uploads that arrived may depend on the data, so it is not the divisor; only the sensitivity of the
        sum is known. The result has the precision of ``weights``, which must not be rounded before.
        """
        if self.side == "client" or not self.size:
            return dict(weights)
        unit = round.lr if self.on == "gradients" else 1.0
        share, noise = round.arrived / round.cohort, self._noise(unit, round.cohort)
        change = {name: self._noisy(share * c, noise, round.rng) for name, c in changes(weights, start).items()}
        return moved(weights, start, change)

    def mechanism(self) -> Mechanism | str:
        """The noise relative to the sensitivity of 2 ``clip``."""
        if not self.size:
            return "protection adds no noise"
        if self.clip is None:
            return "protection.clip is not given, so that the influence of one client is not bounded"
        return Mechanism(self.distribution, self.size / (2 * self.clip), self.side == "server")

    def _clipped(self, change: dict[str, torch.Tensor], clip: float) -> dict[str, torch.Tensor]:
        order = 2 if self.distribution == "gaussian" else 1
        norms = [torch.linalg.vector_norm(c, order, dtype=torch.float64) for c in change.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms), order)
        # An update without a finite norm becomes 0. Slightly below 1, because products are rounded.
        factor = torch.where(torch.isfinite(norm), (clip * (1 - 1e-6) / norm.clamp(min=1e-300)).clamp(max=1.0), 0.0)
        # In float64: a factor of a huge update would be rounded to too few digits in float32.
        return {
            name: torch.where(torch.isfinite(norm), (c.double() * factor).to(c.dtype), 0.0)
            for name, c in change.items()
        }

    def _noise(self, unit: float, clients: int = 1) -> float:
        """The noise's size on weights, over ``clients``; ``unit`` is 0 in a round of learning rate 0.

        Raises :class:`FedblendError` for noise that would be rounded away, as with a tiny learning rate.
        """
        size = self.size * unit / clients
        if unit and size < LEAST:
            raise FedblendError(
                f"protection: noise of {size:g} on weights is too small for float32 and would be rounded away; valid: "
                f'{LEAST:g} or more; with on = "gradients" it is in proportion to the learning rate'
            )
        return size

    def _noisy(self, change: torch.Tensor, size: float, rng: np.random.Generator) -> torch.Tensor:
        """A change with noise on each number, rounded to steps that depend on the noise's size alone.

        The last digits of a float sum tell of its summands: only noise added to 0 gives all small numbers (Mironov
        2012, "On significance of the least significant bits for differential privacy").
        """
        if not size:
            return change
        shape, step = tuple(change.shape), math.ldexp(1.0, math.frexp(size)[1] - STEPS)
        drawn = rng.standard_normal(shape, np.float32) if self.distribution == "gaussian" else rng.laplace(size=shape)
        noisy = change.double() + size * torch.from_numpy(np.asarray(drawn)).to(change.device, torch.float64)
        return ((noisy / step).round() * step).to(change)


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
        return max(1, round(self.keep * entries))

    def mechanism(self) -> str:
        return "pruning adds no noise, and which entries it keeps depends on the data"
