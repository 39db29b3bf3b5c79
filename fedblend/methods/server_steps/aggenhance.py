"""AggEnhance: tuning of the aggregate on class interior points of the clients' models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional as F

from fedblend._kernels.simplify import TracedFunction
from fedblend.core.errors import brief
from fedblend.core.registry import Count, Float, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, Response, ServerContext, Tensors
from fedblend.methods.requirements import refusal
from fedblend.methods.server_steps.tuning import Stacked, Tuning, logits, ready

MODELS_AT_ONCE = 16  # Models whose points are searched together: a compromise of memory and the overhead of each call
POINTS_AT_ONCE = 200  # Points in one forward pass when a model votes


@part("server_step", "aggenhance")
class AggEnhance(Tuning):
    """Tune the aggregate on class interior points (AggEnhance, Ou et al. 2022, Algorithms 1 and 2).

    In each round, for every class c and every client's model w_k, gradient descent moves a point s down the loss
    l(w_k; (s, c)) (equation 11), from (the last round's point + noise) / 2. Every model votes for the points that it
    assigns to their class, with its probability. The best point of each class joins the set S. The aggregate is trained
    on all of S. Points are in [0, 1], the unit scale of images. Models are in evaluation mode throughout.

    A point is interior to its class where the loss is below log 2 (corollary 3.2), that is where the class's
    probability exceeds 1/2. The record has two shares: of all points, those that are interior on the model that they
    were made with (``interior_own``); of the best points, those on the aggregate before tuning (``interior_global``).
    """

    works_on = "uploads"

    steps: Count = 100
    """Gradient steps for each point."""
    step_size: Positive = 0.1
    """Step size of these steps, on inputs in [0, 1]."""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """What makes the steps; equation 11 leaves it open ("e.g., SGD-based"). With "adam" more points become interior."""
    keep: Count | None = None
    """Points in S, the newest ones (Figure 16; default: all)."""
    decay: Annotated[Float, Field(gt=0, le=1)] = 1.0
    """Weight of a point relative to a point of the next round; 1 gives equal weights (Figure 16)."""

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` as its base, and for models that cannot be stacked."""
        super().require_possible(spec)
        for layer in spec.model.modules():
            if isinstance(layer, nn.RNNBase):
                problem = f"moves many models together, which PyTorch cannot with a fused {type(layer).__name__}"
                raise refusal(self, problem, "other layers")

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        """The aggregate tuned on the points; and the points, their labels and the rounds that they were made in."""
        best = self.best(beginning(server), server)
        if best is not None:
            (votes,) = ballots([weights], best[None], server)
            server.measure("interior_global", float((votes > 0.5).float().mean()))
        kept = server.state if best is None else self._joined(server.state, best, server.round)
        if not kept:
            return dict(weights), {}
        # Ages count from the newest point, whose weight is 1: no sum of weights can vanish.
        worth = self.decay ** (kept["rounds"].max() - kept["rounds"]).float()
        return self.tune(weights, kept["points"], kept["labels"], worth, server), kept

    def best(self, begin: torch.Tensor, server: ServerContext) -> torch.Tensor | None:
        """The round's points [C, ...], searched from ``begin`` [C, ...]; ``None`` without any client's points."""
        # Responses may come from clients, which are not trusted: shapes are checked, points and votes are clipped to
        # [0, 1].
        points = [a["points"].clamp(0, 1) for a in server.query({"begin": begin}) if _like(a.get("points"), begin)]
        if not points:
            return None
        candidates = torch.stack(points)
        empty = torch.zeros(candidates.shape[:2])
        votes = [a["scores"].clamp(0, 1) for a in server.query({"points": candidates}) if _like(a.get("scores"), empty)]
        if len(votes) == len(points):
            own = torch.stack([vote[k] for k, vote in enumerate(votes)])
            server.measure("interior_own", float((own > 0.5).float().mean()))
        return elect(candidates, sum(votes, empty))

    def respond(self, uploads: Mapping[int, Tensors], question: Tensors, spec: ModelSpec) -> dict[int, Response]:
        """The points [C, ...] of each model, or its votes [K, C] for the points of all models [K, C, ...]."""
        if not uploads:
            return {}
        if "points" in question:
            votes = ballots(list(uploads.values()), question["points"], spec)
            return {client: {"scores": vote} for client, vote in zip(uploads, votes, strict=True)}
        first = next(iter(uploads.values()))
        models = {name: torch.stack([one[name] for one in uploads.values()]) for name in first}
        found = search(models, question["begin"], spec, self.steps, self.step_size, self.optimizer == "adam")
        return {client: {"points": points} for client, points in zip(uploads, found, strict=True)}

    def _joined(self, state: Stacked, best: torch.Tensor, round: int) -> Stacked:
        """The set of points with the new ones appended, and the oldest removed beyond ``keep``."""
        new = {"points": best, "labels": torch.arange(len(best)), "rounds": torch.full((len(best),), round)}
        whole = {name: torch.cat([state[name], t]) if state else t for name, t in new.items()}
        return whole if self.keep is None else {name: t[-self.keep :] for name, t in whole.items()}


@part("server_step", "aggenhance-secure")
class SecureAggEnhance(AggEnhance):
    """Apply AggEnhance under secure aggregation, where the server never sees a client's model (Ou et al., Figure 12).

    The server sends the starting points. Each client makes the points of its own model. The server sends all points to
    all clients, and each client sends its model's votes. Otherwise the step, and its points, are those of `aggenhance`.
    A client makes its points from the weights that it has sent, with the protection applied. So an (epsilon, delta) of
    the upload also holds for the points.
    """

    works_on = "answers"  # type: ignore[assignment]

    def fault_of_question(self, question: Tensors, clients: int, spec: ModelSpec) -> str | None:
        """The questions are a starting point for each class, and a point of each client for each class, in [0, 1]."""
        shape = (spec.task.outputs, *spec.shape)
        shapes = {name: tuple(tensor.shape) for name, tensor in question.items()}
        points = shapes.get("points", ())
        most = set(shapes) == {"points"} and points[1:] == shape and 1 <= points[0] <= clients
        if not (most or shapes == {"begin": shape}):
            return (
                f"the server step '{type(self).name}' asks for the points of its classes, and for votes on {clients} "
                f"points of each class at most, not with {brief(shapes)}"
            )
        if not all(bool(((tensor >= 0) & (tensor <= 1)).all()) for tensor in question.values()):
            return f"the server step '{type(self).name}' has points in [0, 1] only"
        return None


def _like(tensor: torch.Tensor | None, like: torch.Tensor) -> bool:
    return tensor is not None and tensor.shape == like.shape and tensor.dtype == like.dtype


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
