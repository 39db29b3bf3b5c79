"""Protections: what is done to what leaves a client."""

from __future__ import annotations

from fedblend.parts import part
from fedblend.protection.base import Mechanism, Protection, Round
from fedblend.protection.noise import ClipAndNoise
from fedblend.protection.prune import Prune

__all__ = ["ClipAndNoise", "Mechanism", "NoProtection", "Protection", "Prune", "Round"]


@part("protection", "none")
class NoProtection(Protection):
    """Uploads leave as they are."""
