"""Partitions: which client holds which samples. Importing this package registers them all."""

from __future__ import annotations

from fedblend.data.partitions import classes, counts, dirichlet, iid, lognormal, natural
from fedblend.data.partitions.prepare import prepare

__all__ = ["classes", "counts", "dirichlet", "iid", "lognormal", "natural", "prepare"]
