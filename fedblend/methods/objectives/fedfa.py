"""FedFA: statistics of hidden maps are perturbed, by as much as they differ within a batch and between clients."""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

import numpy as np
import pydantic
import torch
from pydantic import Field

from fedblend.core.errors import FedblendError
from fedblend.core.module import evaluating
from fedblend.core.objective import Batch, CohortSummary, Context, LocalTraining, ModelSpec, Net, Objective, StepPlan
from fedblend.core.registry import Count, Float, Fraction, part
from fedblend.core.trees import Tensors
from fedblend.methods.objectives import Tables

EPSILON = 1e-6  # Added to variances before their roots are taken (the authors' code)
STATISTICS = ("mean", "std")  # The statistics of a map: its mean and its standard deviation over positions
LARGEST = torch.finfo(torch.float32).max


@part("objective", "fedfa")
class FedFA(Objective):
    r"""Perturb mean and standard deviation of hidden maps in training (FedFA, Zhou and Konukoglu 2023).

    A map X [height, width] of a sample and channel has the mean mu and the standard deviation sigma over positions.
    After each of the ``layers``, with probability ``probability`` for the whole batch, every map becomes

        X^ = sigma^ (X - mu) / sigma + mu^,    mu^ = mu + e S_mu,    sigma^ = sigma + e' S_sigma

    with e, e' from N(0, 1) for each sample and channel. S^2 = (1 + gamma) Var_batch is the variance of the statistic
    over the batch, times a weight of the channel j of C by its variance V_j between clients:

        gamma_j = C t_j / sum_c t_c,    t_j = 1 / (1 + 1 / V_j)

    A client keeps a running estimate m of each statistic's mean over batches, 0 (mean) or 1 (standard deviation) at
    first: m <- momentum m + (1 - momentum) mean over the batch, at each perturbation. After its round it sends m and (m
    - c)^2, where c is the mean of m over the last round's clients. From the sums over good uploads the server computes
    the next c and V, the variance of m between these clients; the first V is 1. Both go to the next round's clients.
    So statistics over a client's samples leave it, however few samples these are.

    In the paper each client sends m alone and the server sees each; all clients take part in every round. In the
    authors' code clients go on from the mean c in each round. Here each goes on from its own m, so that V also has the
    differences in how often clients took part. Their code takes one variance of all clients and channels together for
    V, and unbiased variances. Test samples are not perturbed. Needs a network whose hidden states are maps of images.
    """

    exchanges, tracks = "map-statistics", True

    layers: Annotated[tuple[Count, ...], Field(min_length=1)] | None = None
    """Layers after which maps are perturbed, as `[1, 2]` (default: all whose outputs are maps)."""
    probability: Fraction = 0.5
    """Probability that the maps of a batch are perturbed, for each layer anew."""
    momentum: Annotated[Float, Field(ge=0, lt=1)] = 0.99
    """Share of the earlier estimate in a client's running estimate."""

    @pydantic.field_validator("layers")
    @classmethod
    def _check_layers(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and any(a >= b for a, b in pairwise(layers)):
            raise ValueError(f"{list(layers)} is not in rising order; valid: different layers, such as [1, 2]")
        return layers

    def channels(self, spec: ModelSpec) -> dict[int, int]:
        """Number of channels after each layer that is perturbed.

        Raises :class:`FedblendError` where a layer's output has no maps, or the model no layers to choose from.
        """
        maps = _channels_of_maps(spec)
        chosen = tuple(maps) if self.layers is None else self.layers
        if not chosen or not set(chosen) <= set(maps):
            raise FedblendError(
                f"method.objective.layers: {'not given' if self.layers is None else list(chosen)}: 'fedfa' perturbs "
                f"maps of images [channels, height, width], which this model has after "
                f"{'layers ' + ', '.join(map(str, maps)) if maps else 'no layer; valid: a convolutional network'}"
            )
        return {layer: maps[layer] for layer in chosen}

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        state = self.init_client_state(spec, weights)
        return {**state, **{_variance(name): torch.ones_like(tensor) for name, tensor in state.items()}}

    def init_client_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        return {
            f"{statistic}/{layer}": torch.full((channels,), float(statistic == "std"))
            for layer, channels in self.channels(spec).items()
            for statistic in STATISTICS
        }

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        """By layer: ``active`` bool [steps]; by statistic and layer: noise float32 [steps, width, C]."""
        steps, state = len(plan.sizes), plan.server_state or {}
        drawn: dict[str, np.ndarray] = {}
        for layer in _layers(state):
            drawn[f"active/{layer}"] = rng.random(steps) < self.probability
            for statistic in STATISTICS:
                name = f"{statistic}/{layer}"
                drawn[name] = rng.standard_normal((steps, plan.width, len(state[name])), np.float32)
        return drawn

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        hidden, start = batch.x, 0
        for layer in _layers(context.server_state):
            hidden, start = self.perturbed(net(hidden, start, layer), layer, drawn, context), layer
        return context.task.loss(net(hidden, start), batch.y)

    def perturbed(self, x: torch.Tensor, layer: int, drawn: Tensors, context: Context) -> torch.Tensor:
        """Maps [B, C, H, W] after a layer, perturbed where the layer is active; estimates are renewed there."""
        active = drawn[f"active/{layer}"]
        mean = x.mean((2, 3))
        std = ((x - mean[..., None, None]).square().mean((2, 3)) + EPSILON).sqrt()
        noisy = []
        for statistic, values in (("mean", mean), ("std", std)):
            name = f"{statistic}/{layer}"
            spread = values.var(0, correction=0) + EPSILON
            spread = spread * (1 + channel_weights(context.server_state[_variance(name)]))
            noisy.append(values + drawn[name][: len(x)] * spread.sqrt())
            if name in context.client_state:
                old = context.client_state[name]
                new = torch.lerp(values.detach().mean(0).to(old.dtype), old, self.momentum)
                context.renew(name, torch.where(active, new, old))
        mean_, std_ = (values[..., None, None] for values in noisy)
        moved = std_ * (x - mean[..., None, None]) / std[..., None, None] + mean_
        return torch.where(active, moved, x)

    def after_training(self, spec: ModelSpec, training: LocalTraining) -> Tables:
        kept = dict(training.client_state)
        squares = {_variance(name): (m - training.server_state[name]).square() for name, m in kept.items()}
        return kept, {**kept, **squares}

    def after_aggregation(self, weights: Tensors, state: Tensors, summary: CohortSummary) -> Tables:
        means = {name: total / summary.uploads for name, total in summary.extras.items()}
        renewed = {}
        for name in state:
            if _variance(name) in state:
                renewed[name] = means[name].float()
                # A bad client's squares may be anything: V stays a finite number of 0 or more.
                variance = means[_variance(name)] - (means[name] - state[name].double()).square()
                renewed[_variance(name)] = variance.clamp(0, LARGEST).float()
        return dict(weights), renewed


def channel_weights(variance: torch.Tensor) -> torch.Tensor:
    """gamma of each channel [C] by its variance between clients; the mean over channels is 1."""
    weight = (variance + EPSILON) / (1 + variance + EPSILON)
    return weight / weight.mean()


def _variance(name: str) -> str:
    return f"variance/{name}"


def _layers(state: Tensors) -> list[int]:
    return sorted(int(name.removeprefix("mean/")) for name in state if name.startswith("mean/"))


@torch.no_grad()
def _channels_of_maps(spec: ModelSpec) -> dict[int, int]:
    """Number of channels after each layer of a staged model but the last, where its output is [B, C, H, W]."""
    channels = {}
    with evaluating(spec.model) as model:
        hidden = spec.scale(torch.zeros(1, *spec.shape, dtype=torch.int64)).to(next(model.parameters()).device)
        for layer in range(1, len(getattr(model, "stages", ()))):
            hidden = model(hidden, layer - 1, layer)
            if hidden.dim() == 4:
                channels[layer] = hidden.shape[1]
    return channels
