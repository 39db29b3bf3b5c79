"""Data sets: one module a format; importing this package registers them all."""

from __future__ import annotations

from fedblend.data.loaders import digits, image_folder, mnist, mnist5k, npz, shakespeare, toy

__all__ = ["digits", "image_folder", "mnist", "mnist5k", "npz", "shakespeare", "toy"]
