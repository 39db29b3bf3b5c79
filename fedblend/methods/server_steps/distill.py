"""Output-to-model conversion: the server distils the clients' mean outputs into its model (Mix2FLD)."""

from __future__ import annotations

import torch
from torch.func import functional_call
from torch.nn import functional as F

from fedblend.core.registry import Count, NonNegative, Positive, part
from fedblend.core.server_step import ModelSpec, Refined, ServerContext, ServerStep, Tensors
from fedblend.methods.server_steps.points import descend, require_classes


@part("server_step", "distill-to-model")
class DistillToModel(ServerStep):
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

    def require_possible(self, spec: ModelSpec) -> None:
        """Raise :class:`FedblendError` unless the task has classes."""
        require_classes("distill-to-model", spec)

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
