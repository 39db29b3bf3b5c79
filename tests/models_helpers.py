"""What several tests of models take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fedblend.core import registry

Spec = dict[str, Any]


SMALL: dict[str, tuple[Spec, tuple[int, ...]]] = {
    "cnn": ({"name": "cnn", "channels": [4, 8]}, (2, 8, 8)),
    "cnn, group norm": ({"name": "cnn", "channels": [4, 8], "norm": "group", "hidden": [5]}, (2, 9, 11)),
    "cnn1d": ({"name": "cnn1d", "channels": [4, 8], "hidden": [6]}, (3, 13)),
    "cnn1d, group norm": ({"name": "cnn1d", "channels": [4, 8], "norm": "group", "hidden": []}, (3, 12)),
    "mix2fld-cnn": ({"name": "mix2fld-cnn"}, (1, 8, 8)),
    "xormixfl-cnn": ({"name": "xormixfl-cnn", "channels": 4, "kernel": 3, "hidden": [7]}, (1, 11, 10)),
    "vgg16": ({"name": "vgg16", "width": 4, "hidden": [6, 6], "dropout": 0.0}, (3, 32, 32)),
    "convnet": ({"name": "convnet", "width": 4, "norm": "group"}, (3, 9, 9)),
    "resnet18": ({"name": "resnet18", "width": 4}, (3, 16, 16)),
    "resnet50": ({"name": "resnet50", "width": 4}, (3, 8, 8)),
}
"""Every network in a size of a moment and without batch norm, with the shape of its inputs."""


small = pytest.mark.parametrize(("spec", "shape"), SMALL.values(), ids=list(SMALL))


def built(spec: Spec, shape: tuple[int, ...], outputs: int = 3) -> nn.Module:
    """The network in float64, with weights that are none of them 0 or 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = registry.build("model", spec).build(shape, outputs).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def samples(shape: tuple[int, ...], n: int = 3, seed: int = 1) -> torch.Tensor:
    """Random inputs [n, ...] in float64."""
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
