"""Training at the server on its own and shared samples (XorMixFL, Algorithm 2)."""

from __future__ import annotations

import torch
from torch.func import functional_call

from fedblend.core.registry import Count, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, ServerStep, Tensors
from fedblend.methods.server_steps.points import ready, require_classes


@part("server_step", "train-on-seeds")
class TrainOnSeeds(ServerStep):
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

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` unless the task has classes."""
        require_classes("train-on-seeds", spec)

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
