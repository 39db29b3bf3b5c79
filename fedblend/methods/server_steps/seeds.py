"""Training at the server on samples: its own and shared ones (XorMixFL), or seeds with a teacher (Mix2FLD)."""

from __future__ import annotations

import torch
from torch.func import functional_call
from torch.nn import functional as F

from fedblend.core.registry import Count, NonNegative, Positive, part
from fedblend.core.server_step import Refined, ServerContext, Tensors
from fedblend.methods.server_steps.points import TrainingStep, descend, ready


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
