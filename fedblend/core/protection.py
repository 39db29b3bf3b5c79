"""The base classes of protections, which change uploads and the aggregate, and of adversaries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedblend.core.part import Part
from fedblend.core.trees import Tensors, bytes_of


@dataclass(frozen=True)
class Mechanism:
    """Noise that gives an (epsilon, delta)."""

    distribution: str
    """``gaussian`` or ``laplace``."""
    multiplier: float
    """Standard deviation of Gaussian noise over the L2 sensitivity, or scale of Laplace noise over the L1 sensitivity.

    The sensitivity is the largest distance between what a client and another in its place would send.
    """
    at_server: bool
    """Whether the noise is added to the sum of a round's updates, not to each update."""


class Protection(Part):
    """Base of all protections. The base changes nothing.

    Override :meth:`protect`, and :meth:`release` for what the server does.
    """

    def protect(self, upload: Tensors, start: Tensors, lr: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """At a client: return what is sent for ``upload``, given the round's weights and learning rate."""
        return dict(upload)

    def release(self, weights: Tensors, start: Tensors, round: ReleaseContext) -> dict[str, torch.Tensor]:
        """At the server: return the aggregate with the server's noise, before it is used in any way.

        A mean is given in float64; the result is rounded to the model's type afterwards.
        """
        return dict(weights)

    def sent_bytes(self, upload: Tensors, start: Tensors) -> int:
        """Bytes of a protected upload as it is sent."""
        return bytes_of(upload)

    def bytes_on_air(self, upload: Tensors) -> int:
        """Bytes for which a channel plans, which are known before training: those of tensors like ``upload``."""
        return bytes_of(upload)

    def mechanism(self) -> Mechanism | str:
        """The noise that gives an (epsilon, delta), or the reason why there is none."""
        return f"the protection '{self.name}' states no noise (Protection.mechanism)"


@dataclass(frozen=True)
class ReleaseContext:
    """What :meth:`Protection.release` may use of a round."""

    cohort: int
    """Clients that trained."""
    arrived: int
    """Good uploads."""
    lr: float
    """The clients' learning rate."""
    rng: np.random.Generator
    """Source of the server's noise."""


def changes(upload: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    """upload - start, for floating-point tensors."""
    return {name: tensor - start[name].to(tensor) for name, tensor in upload.items() if tensor.is_floating_point()}


def no_further(sent: Tensors, start: Tensors, change: Tensors) -> dict[str, torch.Tensor]:
    """``sent``, of :func:`moved`, with every number at most as far from ``start`` as its ``change``.

    The sum was rounded to the next number that can be stored. Where that is beyond the exact sum, the one before it
    lies between that and ``start``; so no norm of what is sent is larger than that of ``change``.
    """
    clipped = dict(sent)
    for name, c in change.items():
        begin = start[name].to(sent[name])
        beyond = (sent[name].double() - begin.double()).abs() > c.double().abs()
        clipped[name] = torch.where(beyond, torch.nextafter(sent[name], begin), sent[name])
    return clipped


def moved(upload: Tensors, start: Tensors, change: Tensors) -> dict[str, torch.Tensor]:
    """``start`` moved by ``change``, with those tensors of ``upload`` that no change is given for."""
    return {n: start[n].to(t) + change[n] if n in change else t for n, t in upload.items()}


class Adversary(Part):
    """Base of all adversaries: a share of the clients, drawn once, that send corrupted uploads.

    Adversaries train like all clients; their uploads are not protected. Override :meth:`corrupt`.
    """

    to_define = ("corrupt",)
    share: float = 0.0

    def among(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Which clients are adversaries, bool [clients]: a share of them, rounded to whole clients."""
        chosen = np.zeros(clients, bool)
        if self.share:
            chosen[rng.choice(clients, round(self.share * clients), replace=False)] = True
        return chosen

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return what an adversary sends for ``upload``; ``start`` are the round's weights."""
        raise TypeError(f"{type(self).__name__} defines no corrupt")
