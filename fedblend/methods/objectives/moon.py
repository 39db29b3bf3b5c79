"""MOON: model-contrastive federated learning."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from fedblend.core.objective import Batch, Context, LocalTraining, ModelSpec, Net, Term
from fedblend.core.registry import NonNegative, Positive, part
from fedblend.core.trees import Tensors, without


@part("term", "moon")
class Moon(Term):
    """Draws a batch's representations to the global model's and away from the client's previous model's.

    mu times -log(e^{sim(z, z_glob) / tau} / (e^{sim(z, z_glob) / tau} + e^{sim(z, z_prev) / tau})), the mean over the
    batch, with the cosine similarity sim (Li, He and Song 2021, equations 3 and 4). z is the representation before the
    last layer by the model in training, z_glob by the round's global model, z_prev by the model that the client had
    after its last round, which the client keeps; before its first round that is the global model, so that the term is
    constant in that round (the authors' code takes a network of other random weights). No gradient flows into the two
    fixed models, which are in evaluation mode, as in the authors' code. The paper adds a projection head to the
    network; here z is the input of the last layer of the given network (the papers' networks are rows of layers), and
    of a network that is no such row its output. Each step takes three further forward passes.
    """

    mu: NonNegative = 5.0
    """Weight of the term; the paper's best on CIFAR10, with a projection head; the authors advise 0.001 to 10."""
    tau: Positive = 0.5
    """Temperature."""

    def init_client_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        return without(weights, spec.frozen)

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        z = representation(net, batch.x)
        with torch.no_grad():
            z_global = representation(net.with_weights(context.start, training=False), batch.x)
            z_previous = representation(net.with_weights(context.client_state, training=False), batch.x)
        near, far = (F.cosine_similarity(z, other, dim=-1) / self.tau for other in (z_global, z_previous))
        # -log(e^near / (e^near + e^far)) = log(1 + e^(far - near))
        return self.mu * F.softplus(far - near).mean()

    def after_training(
        self, spec: ModelSpec, training: LocalTraining
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The model that the client has now; nothing is sent beside it."""
        return {name: tensor.cpu() for name, tensor in without(training.weights, spec.frozen).items()}, {}


def representation(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The input of the network's last layer, [B, features]; the network's output where its layers are unknown."""
    return (net(x, 0, net.layers - 1) if net.layers > 1 else net(x)).flatten(1)
