"""What a protection is: what is done to what leaves a client, and at the server to what leaves the server."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from fedblend.core.registry import Part
from fedblend.core.trees import Tensors
from fedblend.core.upload import bytes_of


@dataclass(frozen=True)
class Mechanism:
    """Noise that can earn an (epsilon, delta): its distribution, and its size beside what one client can change.

    ``multiplier`` is the Gaussian's standard deviation over the largest L2 distance between what a client and another
    in its place would send, or the Laplace distribution's scale over the largest L1 distance. ``at_server`` says that
    it is added to the sum of a round's updates, not to each.
    """

    distribution: str
    multiplier: float
    at_server: bool


class Protection(Part):
    """Base of all protections; it changes nothing.

    An author overrides :meth:`protect`, and :meth:`release` where the server does something too.
    """

    def protect(self, upload: Tensors, start: Tensors, lr: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """At a client: what is sent in place of ``upload``, given the round's weights and learning rate."""
        return dict(upload)

    def release(self, weights: Tensors, start: Tensors, round: ReleaseContext) -> dict[str, torch.Tensor]:
        """At the server: what becomes of the aggregate ``weights`` before anything else is made of them.

        A mean comes in float64, as its sum was made, whatever models are stored in; what is returned is rounded after.
        """
        return dict(weights)

    def sent_bytes(self, upload: Tensors, start: Tensors) -> int:
        """Bytes of a protected upload as it travels."""
        return bytes_of(upload)

    def mechanism(self) -> Mechanism | str:
        """The noise that earns an (epsilon, delta), or why there is none to state."""
        return "uploads leave the clients as they are"


@dataclass(frozen=True)
class ReleaseContext:
    """What the server knows of a round: how many clients were drawn and arrived, their learning rate, and its noise."""

    cohort: int
    arrived: int
    lr: float
    rng: np.random.Generator


def changes(upload: Tensors, start: Tensors) -> dict[str, torch.Tensor]:
    """upload - start, of the tensors that hold real numbers."""
    return {name: tensor - start[name].to(tensor) for name, tensor in upload.items() if tensor.is_floating_point()}


def no_further(sent: Tensors, start: Tensors, change: Tensors) -> dict[str, torch.Tensor]:
    """``sent``, of :func:`moved`, with every number at most as far from ``start`` as its ``change``.

    The sum was rounded to the next number that can be stored. Where that is beyond the exact sum, the one before it
    lies between that and ``start``; so no norm of what is sent is larger than that of ``change``.
    """
    made = dict(sent)
    for name, c in change.items():
        begin = start[name].to(sent[name])
        beyond = (sent[name].double() - begin.double()).abs() > c.double().abs()
        made[name] = torch.where(beyond, torch.nextafter(sent[name], begin), sent[name])
    return made


def moved(upload: Tensors, start: Tensors, change: Tensors) -> dict[str, torch.Tensor]:
    """``start`` moved by ``change``, with those tensors of ``upload`` that no change is given for."""
    return {n: start[n].to(t) + change[n] if n in change else t for n, t in upload.items()}


class Adversary(Part):
    """Base of all adversaries: a share of the clients, drawn once, whose uploads are others than they should be.

    They train like all others, and no protection holds for what they send. An author overrides :meth:`corrupt`.
    """

    share: float = 0.0

    def among(self, clients: int, rng: np.random.Generator) -> np.ndarray:
        """Which clients are adversaries, bool [clients]: a share of them, rounded to whole clients."""
        chosen = np.zeros(clients, bool)
        if self.share:
            chosen[rng.choice(clients, round(self.share * clients), replace=False)] = True
        return chosen

    def corrupt(self, upload: Tensors, start: Tensors, rng: np.random.Generator) -> dict[str, torch.Tensor]:
        """What an adversary sends in place of ``upload``, given the weights that the round began with."""
        raise TypeError(f"{type(self).__name__} defines no corrupt")
