"""Partitions: which client holds which samples. Importing this package registers them all."""

from __future__ import annotations

from fedblend.data.partitions import classes, iid, natural
from fedblend.data.partitions.prepare import prepare

__all__ = ["classes", "iid", "natural", "prepare"]
