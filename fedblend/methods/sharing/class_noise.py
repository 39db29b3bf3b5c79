"""Noise by class that a server makes, of no client's samples (Virtual Homogeneity Learning)."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from fedblend.core.errors import FedblendError
from fedblend.core.registry import Count, NonNegative, part
from fedblend.core.sharing import Pool, ServerSide, Sharing, SharingPlan


@part("sharing", "class-noise")
class ClassNoise(Sharing):
    """Make virtual samples of pure noise by class at the server, and send all clients the same ones (VHL).

    A virtual sample of class c is

        x = up(m_c + deviation * e),   m_c ~ N(0, 1) once a class,   e ~ N(0, 1) for each sample

    on the model's input scale; ``up`` enlarges a grid of noise to the size of the image, bilinearly (Tang et al. 2022,
    Gaussian noise). So the virtual samples of different classes differ, and hold nothing of any client's samples. The
    paper's other generator, an untrained StyleGAN, is not here. Nothing leaves a client. Each client downloads the
    samples once. Inputs that are no images have no grid: each number has its own noise.
    """

    bytes_kind = "noise"
    plan = SharingPlan("inputs", who="server")

    samples: Count = 100
    """Virtual samples of each class."""
    grid: Count = 8
    """Numbers on each side of the grid of an image, at most the image's own."""
    deviation: NonNegative = 0.5
    """Standard deviation of samples of a class around the class's mean."""

    def make_pool(self, entries: Pool, server: ServerSide) -> Pool:
        """Inputs x [C * samples, ...] in order of class, and their classes y int64.

        Raises :class:`FedblendError` for data without classes.
        """
        spec, rng, task = server.spec, server.rng, server.spec.task
        if task.kind != "classification":
            raise FedblendError(
                f"method.sharing: 'class-noise' makes samples by class, but the data have no classes ({task.kind}); "
                "valid: data with classes"
            )
        shape = tuple(spec.scale(torch.zeros(1, *spec.shape)).shape[1:])
        image = len(shape) == 3
        coarse = (shape[0], *(min(self.grid, side) for side in shape[1:])) if image else shape
        means = rng.standard_normal((task.outputs, 1, *coarse), np.float32)
        noise = rng.standard_normal((task.outputs, self.samples, *coarse), np.float32)
        x = torch.from_numpy((means + np.float32(self.deviation) * noise).reshape(-1, *coarse))
        if image:
            x = F.interpolate(x, shape[1:], mode="bilinear")
        y = torch.arange(task.outputs).repeat_interleave(self.samples)
        return Pool({"x": x, "y": y}, np.full(len(y), -1))
