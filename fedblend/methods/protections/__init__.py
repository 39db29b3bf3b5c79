"""Protections: what is done to what leaves a client."""

from __future__ import annotations

from fedblend.core.protection import Mechanism, Protection, ReleaseContext
from fedblend.core.registry import part
from fedblend.methods.protections.noise import ClipAndNoise
from fedblend.methods.protections.prune import Prune

__all__ = ["ClipAndNoise", "Mechanism", "NoProtection", "Protection", "Prune", "ReleaseContext"]


@part("protection", "none")
class NoProtection(Protection):
    """Uploads leave as they are."""
