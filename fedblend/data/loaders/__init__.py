"""Data sets, one module for each format or source; importing this package registers all of them."""

from __future__ import annotations

from fedblend.data.loaders import (  # noqa: F401
    cifar,
    emnist,
    fer2013,
    har,
    heart,
    hub,
    image_folder,
    leaf,
    mnist,
    npz,
    shakespeare,
    small,
    voc,
)
