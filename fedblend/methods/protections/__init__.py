"""Protections: transformations of a client's upload before it leaves the client, such as clipping and noise."""

from __future__ import annotations

from fedblend.core.protection import Mechanism, Protection, ReleaseContext
from fedblend.core.registry import part
from fedblend.methods.protections.noise import ClipAndNoise
from fedblend.methods.protections.prune import Prune

__all__ = ["ClipAndNoise", "Mechanism", "NoProtection", "Protection", "Prune", "ReleaseContext"]


@part("protection", "none")
class NoProtection(Protection):
    """Send uploads unchanged."""

    def mechanism(self) -> str:
        """Why there is no epsilon."""
        return "uploads leave the clients as they are"
