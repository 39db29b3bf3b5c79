"""Class interior points: search, votes and election (AggEnhance, Algorithm 2)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch.func import functional_call
from torch.nn import functional as F

from fedblend._kernels.kernel_layers import use_kernels
from fedblend._kernels.simplify import TracedFunction
from fedblend.core.module import same_tensors
from fedblend.core.server_step import ModelSpec, ServerContext, ServerStep, Tensors
from fedblend.data.scale import OneHot, Scaler
from fedblend.methods.requirements import refusal, require_classes

Stacked = dict[str, torch.Tensor]
Spec = TypeVar("Spec", bound=ModelSpec)

MODELS_AT_ONCE = 16  # Models whose points are searched together: a compromise of memory and the overhead of each call
POINTS_AT_ONCE = 200  # Points in one forward pass when a model votes


class TrainingStep(ServerStep):
    """Base of the steps that train the model at the server, each of its tensors by itself."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` for data without classes, for text, and for models with shared tensors."""
        require_classes(self, spec.task)
        if isinstance(spec.scale, OneHot):
            raise refusal(self, "needs images or features, but these data are text", "images or features")
        for name, first in same_tensors(spec.model).items():
            problem = f"trains each tensor of a model separately, but '{first}' and '{name}' are the same tensor"
            raise refusal(self, problem, "a model without shared tensors")


def ready(spec: Spec) -> Spec:
    """The same on its device; on a processor, kernels compute the convolutions and pools for which they are faster."""
    spec, device = spec.on_device(), torch.device(spec.device)
    if device.type != "cpu":
        return spec
    model = copy.deepcopy(spec.model)
    use_kernels(model, device)
    return replace(spec, model=model)


def logits(spec: ModelSpec, weights: Tensors, points: torch.Tensor) -> torch.Tensor:
    """A model's outputs for points in [0, 1]."""
    assert isinstance(spec.scale, Scaler)
    return functional_call(spec.model, dict(weights), (spec.scale.from_unit(points),))


def beginning(server: ServerContext) -> torch.Tensor:
    """A starting point for each class [C, ...]: noise, or its mean with the last round's point (lines 1 to 4)."""
    classes = server.task.outputs
    noise = torch.from_numpy(server.rng.random((classes, *server.shape), np.float32))
    last = server.state.get("points")
    return noise if last is None or len(last) < classes else (last[-classes:] + noise) / 2


def search(
    models: Stacked, begin: torch.Tensor, spec: ModelSpec, steps: int, step_size: float, adam: bool = False
) -> torch.Tensor:
    """A point for each model and class [K, C, ...] (lines 5 to 7).

    ``models`` has a leading dimension of models. Every point starts at its class's ``begin`` [C, ...] and is clipped to
    [0, 1]. Steps are gradient descent's, or Adam's with its usual decays.
    """
    spec = ready(spec)
    begin, labels = begin.to(spec.device), torch.arange(len(begin), device=spec.device)

    def loss(weights: Stacked, points: torch.Tensor) -> torch.Tensor:
        # The sum, because points are independent: a step must not shrink with the number of classes.
        return F.cross_entropy(logits(spec, weights, points), labels, reduction="sum")

    def slopes(points: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        moving = points.detach().requires_grad_()
        with torch.enable_grad():
            total = torch.vmap(loss)(dict(zip(models, weights, strict=True)), moving).sum()
        (slope,) = torch.autograd.grad(total, moving)
        return slope

    slopes_at, found = TracedFunction(slopes), []
    for some in zip(*(values.to(spec.device).split(MODELS_AT_ONCE) for values in models.values()), strict=True):
        points = begin.expand(len(some[0]), *begin.shape).contiguous()
        mean, square = torch.zeros_like(points), torch.zeros_like(points)
        for number in range(1, steps + 1):
            slope = slopes_at(points, *some)
            if adam:
                mean, square = torch.lerp(slope, mean, 0.9), torch.lerp(slope.square(), square, 0.999)
                slope = mean / (1 - 0.9**number) / ((square / (1 - 0.999**number)).sqrt() + 1e-8)
            points = (points - step_size * slope).clamp(0, 1)
        found.append(points)
    return torch.cat(found).cpu()


def ballots(models: Sequence[Tensors], points: torch.Tensor, spec: ModelSpec) -> list[torch.Tensor]:
    """Each model's votes [K, C] for points [K, C, ...]: the probability of the point's class if largest, else 0."""
    spec, (count, classes) = ready(spec), points.shape[:2]
    labels = torch.arange(classes, device=spec.device).repeat(count)
    batches = points.to(spec.device).flatten(0, 1).split(POINTS_AT_ONCE)
    names = list(models[0])

    def class_chances(points: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return logits(spec, dict(zip(names, weights, strict=True)), points).softmax(1)

    chances_of, votes = TracedFunction(class_chances), []
    for one in models:
        weights = [one[name].to(spec.device) for name in names]
        chances = torch.cat([chances_of(some, *weights) for some in batches])
        own = chances.gather(1, labels[:, None])[:, 0]
        votes.append(torch.where(chances.argmax(1) == labels, own, 0.0).view(count, classes))
    return [vote.cpu() for vote in votes]


def elect(points: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """The point with the highest score of each class [C, ...]; of equal scores, the first client's (line 20)."""
    return points[score.argmax(0), torch.arange(points.shape[1])]


def descend(
    loss: Callable[..., torch.Tensor],
    weights: Tensors,
    batches: Iterable[tuple[torch.Tensor, ...]],
    lr: float,
    server: ServerContext,
) -> Stacked:
    """The weights after a step of plain SGD on ``loss(weights, *batch)`` for each batch."""
    moved = {name: tensor.to(server.device, copy=True) for name, tensor in weights.items()}
    trained = [name for name in server.trained if moved[name].is_floating_point()]

    def slopes(*tensors: torch.Tensor) -> list[torch.Tensor]:
        weights = {name: t.detach() for name, t in zip(moved, tensors, strict=False)}
        params = [weights[name].requires_grad_() for name in trained]
        with torch.enable_grad():
            total = loss(weights, *tensors[len(moved) :])
            # Zeros for a weight that the loss does not depend on.
            return list(torch.autograd.grad(total, params, materialize_grads=True))

    slopes_at, params = TracedFunction(slopes), [moved[name] for name in trained]
    for batch in batches:
        torch._foreach_add_(params, slopes_at(*moved.values(), *batch), alpha=-lr)
    return {name: tensor.cpu() for name, tensor in moved.items()}
