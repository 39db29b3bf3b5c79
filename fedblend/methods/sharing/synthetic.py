"""Synthetic samples: learned by each client by distribution matching (FedDM), or a server's noise by class (VHL)."""

from __future__ import annotations

import copy
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from fedblend.core.context import ModelSpec, Scale
from fedblend.core.random import lent_generator
from fedblend.core.registry import Count, Float, NonNegative, Positive, part
from fedblend.core.sharing import ClientData, Payload, Pool, Request, ServerSide, Sharing, SharingPlan
from fedblend.methods.requirements import entries_in, fault_of_form, require_classes, require_numbers
from fedblend.models.layers import with_features


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
        require_classes(self, task)
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


@part("sharing", "matched-samples")
class MatchedSamples(Sharing):
    """Share synthetic samples of each class that a client learns by distribution matching (FedDM, Xiong et al. 2023).

    Gradient steps with momentum move the samples s of class c down

        || mean_i h_w(x_i) - mean_j h_w(s_j) ||^2 + || mean_i f_w(x_i) - mean_j f_w(s_j) ||^2,

    summed over the client's classes, with outputs f_w, and features h_w before the last layer. The x_i are
    a new random batch of the class in each step, w new weights:

    - `networks = "global"`: the round's global weights, moved in a random direction by `radius`. Clients share in each
      round, all that hold samples, which receive the model for it. With `upload = "nothing"` and `train-on-means` this
      is FedDM, except that FedDM also keeps the server's model within rho of the round's. A public reimplementation
      makes 1,000 steps on 256 samples of a class, and 500 epochs at the server; the defaults here are far fewer.
    - `networks = "random"`: new random weights of the experiment's model. Clients share once. This is distribution
      matching as in dataset condensation (Zhao and Bilen 2023), with outputs beside features.

    What leaves a client are `per_class` samples of each of its classes and their labels. Samples begin as noise
    N(0, 1) on the model's input scale, never as real ones, and stay in the range of inputs. A class of fewer samples
    than `policy.min_mean` has none. No noise is added, so that there is no (epsilon, delta): learned samples may
    resemble real ones, most where a class has few.
    """

    bytes_kind = "synthetic"

    networks: Literal["global", "random"] = "global"
    """Weights under which samples are matched; with "global" clients share in each round."""
    per_class: Count = 10
    """Synthetic samples of each class."""
    steps: Count = 200
    """Gradient steps on them."""
    batch_size: Count = 64
    """Real samples of each class in a step; all of a class that has fewer."""
    lr: Positive = 1.0
    """Learning rate of the synthetic samples."""
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.5
    """Momentum of these steps."""
    radius: Positive = 5.0
    """Distance of the weights from the global ones (rho), with "global"."""

    @property
    def plan(self) -> SharingPlan:  # type: ignore[override]
        follows = self.networks == "global"
        return SharingPlan("inputs", "each-round" if follows else "once", sees_model=follows)

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return self.per_class * (samples // max(1, minimum))

    def share(self, local: ClientData) -> Payload | None:
        """Inputs x [n, ...] and one-hot targets y [n, C], class after class; ``None`` without a class that may share.

        Raises :class:`FedblendError` for data without classes, and for text.
        """
        require_classes(self, local.task, "means")
        require_numbers(self, local.scale, "means")
        counts = torch.bincount(local.y, minlength=local.task.outputs)
        labels = torch.nonzero(counts >= max(1, local.minimum))[:, 0]
        if not len(labels):
            return None
        shape = (len(labels) * self.per_class, *local.x.shape[1:])
        noise = torch.from_numpy(local.rng.standard_normal(shape, np.float32))
        x = self._matched(noise, labels, local, local.scale)
        return {"x": x, "y": local.task.encode(labels.repeat_interleave(self.per_class))}

    def _matched(self, synthetic: torch.Tensor, labels: torch.Tensor, local: ClientData, scale: Scale) -> torch.Tensor:
        """The samples after all steps; ``labels`` are the classes, of which each has ``per_class`` samples in turn."""
        assert local.model is not None
        device = next(local.model.parameters()).device
        scale, model = scale.to(device), copy.deepcopy(local.model)
        # Drawn on the CPU: a GPU's generator draws other numbers.
        drawn = copy.deepcopy(model).cpu()
        x, y = local.x.to(device), local.y.numpy()
        synthetic = synthetic.to(device)
        velocity = torch.zeros_like(synthetic)
        for step in range(self.steps):
            weights = self._weights(model, drawn, local, step)
            rows = torch.from_numpy(_batch_of_each_class(local.rng, y, labels.numpy(), self.batch_size))
            groups = torch.searchsorted(labels, local.y[rows]).to(device)
            with torch.no_grad():
                real = _class_means(model, weights, scale(x[rows.to(device)]), groups)
            moving = scale.from_unit(scale.to_unit(synthetic)).requires_grad_()
            own = torch.arange(len(labels), device=device).repeat_interleave(self.per_class)
            learned = _class_means(model, weights, moving, own)
            loss = torch.stack([(a - b).square().sum() for a, b in zip(learned, real, strict=True)]).sum()
            (slope,) = torch.autograd.grad(loss, moving)
            velocity = self.momentum * velocity + slope
            synthetic = moving.detach() - self.lr * velocity
        return scale.from_unit(scale.to_unit(synthetic)).cpu()

    def _weights(self, model: nn.Module, drawn: nn.Module, local: ClientData, step: int) -> dict[str, torch.Tensor]:
        """The weights of a step, by name; random ones are drawn in ``drawn`` and copied into ``model``."""
        if self.networks == "random":
            with lent_generator(int(local.rng.integers(2**31)), "network", step):
                for layer in drawn.modules():
                    if callable(reset := getattr(layer, "reset_parameters", None)):
                        reset()
            model.load_state_dict(drawn.state_dict())
            return {name: tensor.detach() for name, tensor in model.named_parameters()}
        weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
        noise = torch.from_numpy(local.rng.standard_normal(sum(t.numel() for t in weights.values()), np.float32))
        parts = (self.radius * noise / noise.norm()).split([t.numel() for t in weights.values()])
        return {name: t + part.view(t.shape).to(t) for (name, t), part in zip(weights.items(), parts, strict=True)}

    def fault(self, payload: Payload, samples: int, spec: ModelSpec) -> str | None:
        """Why samples are not inputs of the model with a class each, or ``None``."""
        n = entries_in(payload)
        form = {"x": (n, *spec.shape, torch.float32), "y": (n, spec.task.outputs, torch.float32)}
        if fault := fault_of_form(payload, form):
            return fault
        classes = payload["y"].sum(0)
        if bool(((payload["y"] != 0) & (payload["y"] != 1)).any()) or bool((payload["y"].sum(1) != 1).any()):
            return "'y' has a row that is no single class"
        if bool((classes > self.per_class).any()):
            return f"it sent {int(classes.max())} samples of a class; valid: {self.per_class}"
        return None


def _batch_of_each_class(rng: np.random.Generator, y: np.ndarray, labels: np.ndarray, size: int) -> np.ndarray:
    """Rows of up to ``size`` random samples of each class among ``labels``, int64."""
    order = np.lexsort((rng.random(len(y)), y))
    place = np.arange(len(y)) - np.searchsorted(y[order], y[order])
    return order[(place < size) & np.isin(y[order], labels)]


def _class_means(
    model: nn.Module, weights: dict[str, torch.Tensor], x: torch.Tensor, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean features and mean outputs of each group [groups, d]; ``groups`` int64 [n] counts from 0."""
    share = nn.functional.one_hot(groups).float()
    share = share / share.sum(0)
    outputs, features = with_features(model, x, weights)
    return share.T @ features, share.T @ outputs
