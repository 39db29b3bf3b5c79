"""AggEnhance: the aggregate is tuned on points that lie inside the classes of the clients' models."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from fedblend.data.scale import OneHot, Scaler
from fedblend.errors import FedblendError
from fedblend.objectives.task import Task
from fedblend.parts import Count, Positive, part
from fedblend.server_steps.base import Server, ServerStep, Tensors

Stacked = dict[str, torch.Tensor]


@part("server_step", "aggenhance")
class AggEnhance(ServerStep):
    """AggEnhance (Ou et al. 2022, Algorithms 1 and 2): tune the aggregate on class interior points.

    Each round, for every class c and every client's model w_k, a point s is moved down the loss l(w_k; (s, c))
    (equation 11) from (the last round's point + noise) / 2; every model votes for the points that it puts into
    their class, with its probability; the best point of each class joins the set S; and the aggregate is trained
    on all of S. Points live in [0, 1], the unit scale of pictures; models are in evaluation mode throughout.
    """

    needs_uploads = True

    steps: Count = 100
    """Steps down the loss that each point takes."""
    step_size: Positive = 0.1
    """Step size of these steps, on inputs in [0, 1]."""
    epochs: Annotated[int, Field(ge=0)] = 10
    """Epochs over the points; 0 leaves the aggregate as it is."""
    batch_size: Count = 32
    """Points a batch."""
    lr: Positive | None = None
    """Learning rate on the points; unless given, the clients' in that round."""
    keep: Count | None = None
    """Points kept, the newest ones; unless given, all (Figure 16)."""
    decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Weight of a point against one of the next round's; 1 weighs all alike (Figure 16)."""

    def require_possible(self, scale: Scaler | OneHot, task: Task) -> None:
        """Raise :class:`FedblendError` unless the task has classes, and inputs a unit scale."""
        if task.kind != "classification":
            raise FedblendError("method.server_step: 'aggenhance' makes points of classes; these data have none")
        if not isinstance(scale, Scaler):
            raise FedblendError("method.server_step: 'aggenhance' makes pictures or features; these data are text")

    def refine(self, weights: Tensors, server: Server) -> tuple[dict[str, torch.Tensor], Stacked]:
        """The aggregate tuned on the points; and these, with their labels and the rounds they were made in."""
        models = {name: torch.stack([upload[name] for upload, _ in server.uploads]) for name in weights}
        found = self._search(models, self._begin(server), server)
        best = elect(found, vote(models, found, server))
        kept = self._joined(server.state, best, server.round)
        return self._tune(weights, kept, server), kept

    def _begin(self, server: Server) -> torch.Tensor:
        """A place to begin for each class [C, ...]: noise, half way to the last points (lines 1 to 4)."""
        classes = server.task.outputs
        noise = torch.from_numpy(server.rng.random((classes, *server.shape), np.float32))
        last = server.state.get("points")
        return noise if last is None or len(last) < classes else (last[-classes:] + noise) / 2

    def _search(self, models: Stacked, begin: torch.Tensor, server: Server) -> torch.Tensor:
        """A point for each model and class [K, C, ...], all of them moved at once (lines 5 to 7)."""
        labels = torch.arange(len(begin))
        count = len(next(iter(models.values())))

        def loss(weights: Stacked, points: torch.Tensor) -> torch.Tensor:
            # The sum: each point is a problem of its own, whose step must not shrink with the number of classes.
            return F.cross_entropy(logits(server, weights, points), labels, reduction="sum")

        def step(weights: Stacked, points: torch.Tensor) -> torch.Tensor:
            slope = torch.vmap(torch.func.grad(loss, argnums=1))(weights, points)
            return (points - self.step_size * slope).clamp(0, 1)

        points = begin.expand(count, *begin.shape).contiguous()
        moved = make_fx(step)(models, points)
        with torch.no_grad():
            for _ in range(self.steps):
                points = moved(models, points)
        return points

    def _joined(self, state: Stacked, best: torch.Tensor, round: int) -> Stacked:
        """The set of points with the new ones at its end, and the oldest gone where there are too many."""
        new = {
            "points": best,
            "labels": torch.arange(len(best)),
            "rounds": torch.full((len(best),), round),
        }
        whole = {name: torch.cat([state[name], t]) if state else t for name, t in new.items()}
        return whole if self.keep is None else {name: t[-self.keep :] for name, t in whole.items()}

    def _tune(self, weights: Tensors, kept: Stacked, server: Server) -> dict[str, torch.Tensor]:
        """Train the aggregate on the points with plain SGD (Algorithm 1, line 8)."""
        lr = server.lr if self.lr is None else self.lr
        made = {name: tensor.clone() for name, tensor in weights.items()}
        trained = [name for name in server.trained if made[name].is_floating_point()]
        age = self.decay ** (server.round - kept["rounds"]).float()
        for _ in range(self.epochs):
            order = torch.from_numpy(server.rng.permutation(len(age)))
            for rows in order.split(self.batch_size):
                leaves = {name: made[name].requires_grad_() for name in trained}
                outputs = logits(server, {**made, **leaves}, kept["points"][rows])
                each = F.cross_entropy(outputs, kept["labels"][rows], reduction="none")
                loss = (each * age[rows]).sum() / age[rows].sum()
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                made |= {n: p.detach() - lr * g for (n, p), g in zip(leaves.items(), slopes, strict=True)}
        return {name: tensor.detach() for name, tensor in made.items()}


def logits(server: Server, weights: Stacked, points: torch.Tensor) -> torch.Tensor:
    """A model's outputs for points in [0, 1]."""
    assert isinstance(server.scale, Scaler)
    return functional_call(server.model, weights, (server.scale.from_unit(points),))


def vote(models: Stacked, points: torch.Tensor, server: Server) -> torch.Tensor:
    """The score of each point [K, C] (lines 9 to 17).

    It is the sum of its class's probabilities over the models that find its class the likeliest.
    """
    count, classes = points.shape[:2]
    labels = torch.arange(classes).repeat(count)
    score = torch.zeros(count * classes)
    with torch.no_grad():
        for i in range(count):
            one = {name: stack[i] for name, stack in models.items()}
            chances = logits(server, one, points.flatten(0, 1)).softmax(1)
            score += torch.where(chances.argmax(1) == labels, chances[torch.arange(len(labels)), labels], 0.0)
    return score.view(count, classes)


def elect(points: torch.Tensor, score: torch.Tensor) -> torch.Tensor:
    """The point of highest score of each class [C, ...]; the first client's where several are level (line 20)."""
    return points[score.argmax(0), torch.arange(points.shape[1])]
