"""What several tests of sharing take."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from helpers import images, local, setup

from fedblend.core.dataset import Dataset
from fedblend.core.sharing import Payload, Pool, ServerSide
from fedblend.methods.sharing.means import SharedMeans

DATA = images(23, classes=3)


MADE = setup(DATA)


def share(sharing: SharedMeans, data: Dataset = DATA, **given_: Any) -> Payload | None:
    """What one client that holds all of ``data`` sends."""
    made = MADE if data is DATA else setup(data, model={"name": "mlp", "hidden": []})
    return sharing.share(local(data.train.x, data.train.y, made.task, made.scale, **given_))


def mean(t: torch.Tensor) -> torch.Tensor:
    """A mean over the samples, in float64."""
    return t.double().mean(0).float()


def entries(count: int, seed: int = 0) -> Pool:
    """Entries of as many clients, in float32."""
    rng = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 1, 4, 4, generator=rng), torch.rand(count, 3, generator=rng)
    return Pool({"x": x, "y": y}, np.arange(count))


def server_side(rng: np.random.Generator, clients: Any = (), base: Any = None, spec: Any = None) -> ServerSide:
    """What a server knows where the pool of the ``clients`` that were asked is made."""
    return ServerSide(spec, np.array(clients, np.int64), base, lambda: np.empty((0, 0), bool), rng)
