"""On what terms a federation goes on; known without Flower."""

from __future__ import annotations

from dataclasses import dataclass

DEADLINE = 600.0
"""Seconds that any one exchange with the sites may take, unless told otherwise."""


@dataclass(frozen=True)
class FederationLimits:
    """``min_sites`` is how many must be connected (0: all clients), ``deadline`` the seconds they have to answer."""

    min_sites: int = 0
    deadline: float = DEADLINE
