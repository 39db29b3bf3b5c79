"""Synthetic samples that each client learns by distribution matching (FedDM)."""

from __future__ import annotations

import copy
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn

from fedblend.core.context import ModelSpec
from fedblend.core.errors import FedblendError
from fedblend.core.random import lent_generator
from fedblend.core.registry import Count, Float, Positive, part
from fedblend.core.sharing import ClientData, Payload, Request, Sharing, SharingPlan
from fedblend.data.scale import Scaler
from fedblend.models.layers import with_features


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
        """In each round, if samples are matched under the global model."""
        follows = self.networks == "global"
        return SharingPlan("inputs", "each-round" if follows else "once", sees_model=follows)

    def most_entries(self, samples: int, minimum: int, request: Request | None = None) -> int:
        return self.per_class * (samples // max(1, minimum))

    def share(self, local: ClientData) -> Payload | None:
        """Inputs x [n, ...] and one-hot targets y [n, C], class after class; ``None`` without a class that may share.

        Raises :class:`FedblendError` for data without classes, and for text.
        """
        if local.task.kind != "classification" or not isinstance(local.scale, Scaler):
            what = "have none" if local.task.kind != "classification" else "are text"
            raise FedblendError(
                f"method.sharing: '{self.name}' learns images or features of each class, but these data {what}; "
                "valid: means"
            )
        counts = torch.bincount(local.y, minlength=local.task.outputs)
        labels = torch.nonzero(counts >= max(1, local.minimum))[:, 0]
        if not len(labels):
            return None
        shape = (len(labels) * self.per_class, *local.x.shape[1:])
        noise = torch.from_numpy(local.rng.standard_normal(shape, np.float32))
        x = self._matched(noise, labels, local, local.scale)
        return {"x": x, "y": local.task.encode(labels.repeat_interleave(self.per_class))}

    def _matched(self, synthetic: torch.Tensor, labels: torch.Tensor, local: ClientData, scale: Scaler) -> torch.Tensor:
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
        sent = {name: tuple(tensor.shape) for name, tensor in payload.items()}
        entries = next(iter(sent.get("x", ())), 0)
        shapes = {"x": (entries, *spec.shape), "y": (entries, spec.task.outputs)}
        if sent != shapes or any(tensor.dtype != torch.float32 for tensor in payload.values()):
            return f"it sent {sent}, not inputs and targets of the shapes {shapes} in float32"
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
