"""Data sets: one module a format; importing this package registers them all."""

from __future__ import annotations

from fedblend.data.loaders import (
    cifar,
    digits,
    emnist,
    femnist,
    fer2013,
    har,
    heart,
    hub,
    image_folder,
    leaf_shakespeare,
    mnist,
    mnist5k,
    npz,
    shakespeare,
    toy,
    voc,
)

__all__ = [
    "cifar",
    "digits",
    "emnist",
    "femnist",
    "fer2013",
    "har",
    "heart",
    "hub",
    "image_folder",
    "leaf_shakespeare",
    "mnist",
    "mnist5k",
    "npz",
    "shakespeare",
    "toy",
    "voc",
]
