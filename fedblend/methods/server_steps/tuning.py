"""Training at the server: of the aggregate on points (AggEnhance) or means, or of the model on seeds (XorMixFL)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch.func import functional_call
from torch.nn import functional as F

from fedblend._kernels.kernel_layers import use_kernels
from fedblend._kernels.simplify import TracedFunction
from fedblend.core.errors import FedblendError
from fedblend.core.module import same_tensors
from fedblend.core.registry import Count, Int, NonNegative, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, ServerStep, Tensors
from fedblend.data.scale import OneHot, Scaler
from fedblend.methods.augment.pictures import mirrored, shifted
from fedblend.methods.requirements import refusal, require_classes

Stacked = dict[str, torch.Tensor]
Spec = TypeVar("Spec", bound=ModelSpec)

SHIFT = 4  # Largest shift of an augmented image, in pixels


class TrainingStep(ServerStep):
    """Base of the steps that train the model at the server, each of its tensors by itself."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` for data without classes, for text, and for models with shared tensors."""
        require_classes(self, spec.task)
        if isinstance(spec.scale, OneHot):
            raise refusal(self, "needs images or features, but these data are text", "images or features")
        for name, first in same_tensors(spec.model).items():
            tied = f"'{first}' and '{name}' of this model are the same"
            raise refusal(self, f"trains each tensor by itself, but {tied}", "a model without shared tensors")


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


@dataclass(frozen=True)
class Tuning(TrainingStep):
    """Base of the steps that train the aggregate on points with plain SGD, in evaluation mode."""

    numeric_inputs = True

    epochs: Annotated[Int, Field(ge=0)] = 10
    """Epochs over the points; 0 leaves the aggregate unchanged."""
    batch_size: Count = 32
    """Points in a batch."""
    lr: Positive | None = None
    """Learning rate on the points (default: the clients' learning rate in that round)."""

    def seen(self, points: torch.Tensor, server: ServerContext) -> torch.Tensor:
        """A batch of points as the model's input; a step may augment them."""
        return points

    def tune(
        self, weights: Tensors, points: torch.Tensor, labels: torch.Tensor, worth: torch.Tensor, server: ServerContext
    ) -> Stacked:
        """The weights trained on points [n, ...] in [0, 1] with labels [n] and sample weights ``worth`` [n].

        Weights are relative to their mean over all points: a batch of light points makes a small step.
        """
        server, lr = ready(server), server.lr if self.lr is None else self.lr
        points, labels, worth = (tensor.to(server.device) for tensor in (points, labels, worth / worth.mean()))

        def loss(weights: Tensors, points: torch.Tensor, labels: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
            each = F.cross_entropy(logits(server, weights, points), labels, reduction="none")
            return (each * worth).sum() / len(worth)

        def batches() -> Iterator[tuple[torch.Tensor, ...]]:
            for _ in range(self.epochs):
                order = torch.from_numpy(server.rng.permutation(len(labels))).to(server.device)
                for rows in order.split(self.batch_size):
                    yield self.seen(points[rows], server), labels[rows], worth[rows]

        return descend(loss, weights, batches(), lr, server)


@part("server_step", "train-on-means")
class TrainOnMeans(Tuning):
    """Train the aggregate in each round on the means that clients shared, with their mean targets.

    With means within a class (``split = "class"``) the server holds a few blurred samples of every class. Clients with
    few classes pull the aggregate towards their own; the server's steps pull it back. Unlike the objective
    `virtual-samples`, no client receives another client's means, and nothing is sent twice.
    """

    reads = ("inputs",)
    needs = ("x", "y")
    needs_pool = True

    epochs: Count = 1
    """Epochs over the means."""

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        assert isinstance(server.scale, Scaler)
        if server.pool is None or not len(server.pool):
            return dict(weights), {}
        x, y = server.pool.tensors["x"], server.pool.tensors["y"]
        return self.tune(weights, server.scale.to_unit(x), y, torch.ones(len(y)), server), {}


@part("server_step", "prior-samples")
class PriorSamples(Tuning):
    """Tune the aggregate on real samples of each class at the server (AggEnhance, Ou et al. 2022, Figure 9).

    This is AggEnhance's comparison: real samples are class interior points too, but the server must not have them. They
    are drawn once from all clients' training samples, which breaks privacy and needs `unsafe = true`.
    """

    works_on = "raw"

    per_class: Count = 1
    """Real samples of each class, as in the paper; all samples of a class that has fewer."""
    augment: bool = False
    """Mirror half of the images left to right, and shift all by up to 4 pixels, anew in each epoch."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` as its base, and with ``augment`` for data that are no images."""
        super().require_possible(spec)
        if self.augment and len(spec.shape) != 3:
            raise FedblendError(
                f"method.server_step.augment: true needs images, but these data are of shape {list(spec.shape)}; "
                "valid: false"
            )

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        assert server.prior is not None
        assert isinstance(server.scale, Scaler)
        x, y = server.prior(self.per_class)
        unit = server.scale.to_unit(server.scale(x))
        return self.tune(weights, unit, y, torch.ones(len(y)), server), {}

    def seen(self, points: torch.Tensor, server: ServerContext) -> torch.Tensor:
        return augmented(points, server.rng) if self.augment else points


def augmented(pictures: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    """Images [n, channels, height, width], half of them mirrored, each shifted by up to 4 pixels and padded with 0."""
    count, device = len(pictures), pictures.device
    turned = mirrored(pictures, torch.from_numpy(rng.random(count) < 0.5).to(device))
    up, left = (torch.from_numpy(rng.integers(0, 2 * SHIFT + 1, count)).to(device) - SHIFT for _ in range(2))
    return shifted(turned, up, left, pictures.new_zeros(()))


@part("server_step", "train-on-seeds")
class TrainOnSeeds(TrainingStep):
    """Train the server's model on its own and the shared samples, from the round's weights (XorMixFL, Algorithm 2).

    The optimiser is Adam, with a new state in each round. The model is in evaluation mode. After ``rounds`` rounds the
    step does nothing, so that other training can continue from there. Without samples the model is unchanged.
    """

    reads = ("stored", "seeds", "raw")
    needs = ("x", "y")

    epochs: Count = 100
    """Passes over the samples."""
    batch_size: Count = 128
    """Samples in a step; the last, smaller batch of a pass is kept."""
    lr: Positive = 0.001
    """Learning rate of Adam."""
    rounds: Count = 1
    """Number of first rounds in which the server trains."""

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        if server.round >= self.rounds or server.pool is None or not len(server.pool):
            return dict(weights), {}
        labels = server.task.targets(server.pool.tensors["y"])
        return self._trained(weights, server.pool.tensors["x"], labels, server), {}

    def _trained(
        self, weights: Tensors, x: torch.Tensor, y: torch.Tensor, server: ServerContext
    ) -> dict[str, torch.Tensor]:
        server, x, y = ready(server), x.to(server.device), y.to(server.device)
        tuned = {name: tensor.to(server.device, copy=True) for name, tensor in weights.items()}
        leaves = [tuned[name].requires_grad_() for name in server.trained if tuned[name].is_floating_point()]
        adam = torch.optim.Adam(leaves, lr=self.lr)
        for _ in range(self.epochs):
            order = torch.from_numpy(server.rng.permutation(len(y))).to(server.device)
            for rows in order.split(self.batch_size):
                loss = server.task.loss(functional_call(server.model, tuned, (server.scale(x[rows]),)), y[rows])
                adam.zero_grad()
                loss.backward(inputs=leaves)
                adam.step()
        return {name: tensor.detach().cpu() for name, tensor in tuned.items()}


@part("server_step", "distill-to-model")
class DistillToModel(TrainingStep):
    """Train the server's model on seed samples, with the clients' mean outputs as the teacher (Mix2FLD, equation 5).

    K_s steps w - lr * grad(CE(F, L) - beta sum_m G_m log F_m) on seeds drawn with replacement, from the last round's
    weights. G is the teacher of a sample's label n, G_n; for a soft label {a: lambda, b: 1 - lambda} it is lambda G_a +
    (1 - lambda) G_b. The model is in evaluation mode. Without seeds or outputs the model is unchanged.
    """

    reads = ("stored", "seeds", "raw")
    needs = ("x", "y")
    needs_pool = True

    steps: Count = 3200
    """Steps in a round, K_s."""
    batch_size: Count = 1
    """Seeds in a step."""
    beta: NonNegative = 0.01
    """Weight of the teacher."""
    lr: Positive | None = None
    """Learning rate (default: the clients' learning rate in that round)."""

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        if server.pool is None or not len(server.pool) or "outputs" not in server.global_outputs:
            return dict(weights), {}
        x = server.scale(server.pool.tensors["x"])
        labels = server.task.targets(server.pool.tensors["y"])
        if not labels.is_floating_point():
            labels = server.task.encode(labels)
        # CE(F, L) - beta sum G log F is one cross-entropy with the target L + beta G.
        targets = labels + self.beta * labels @ server.global_outputs["outputs"]
        x, targets = x.to(server.device), targets.to(server.device)
        drawn = torch.from_numpy(server.rng.integers(len(x), size=(self.steps, self.batch_size))).to(server.device)

        def loss(weights: Tensors, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            outputs = functional_call(server.model, dict(weights), (x,))
            return -(targets * F.log_softmax(outputs, -1)).sum(-1).mean()

        lr = server.lr if self.lr is None else self.lr
        return descend(loss, weights, ((x[rows], targets[rows]) for rows in drawn), lr, server), {}
