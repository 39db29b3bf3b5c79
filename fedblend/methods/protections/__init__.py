"""Protections: transformations of a client's upload before it leaves the client, such as clipping and noise."""

from __future__ import annotations

from fedblend.core.protection import Protection
from fedblend.core.registry import part


@part("protection", "none")
class NoProtection(Protection):
    """Send uploads unchanged."""

    def mechanism(self) -> str:
        return "uploads leave the clients as they are"
