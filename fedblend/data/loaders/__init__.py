"""Data sets: one module a format; importing this package registers them all."""

from __future__ import annotations

from fedblend.data.loaders import mnist, mnist5k, npz

__all__ = ["mnist", "mnist5k", "npz"]
