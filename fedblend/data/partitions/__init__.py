"""Partitions of the samples over clients; importing this package registers all of them."""

from __future__ import annotations

from fedblend.data.partitions import classes, counts, dirichlet, iid, lognormal, natural
from fedblend.data.partitions.prepare import prepare

__all__ = ["classes", "counts", "dirichlet", "iid", "lognormal", "natural", "prepare"]
