"""Terms that are added to an objective: FedProx's, FedDyn's, distillation's, FedNTD's, MOON's and FedProto's."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from fedblend.core.objective import Batch, CohortSummary, Context, LocalTraining, ModelSpec, Net, Tensors, Term
from fedblend.core.registry import NonNegative, Positive, part
from fedblend.core.trees import without
from fedblend.methods.objectives import Tables
from fedblend.methods.requirements import require_classes
from fedblend.methods.uploads import embedding

EXCLUDED = -1e30  # Logit of a class that a softmax leaves out: its probability is 0, and so is its summand


@part("term", "proximal")
class Proximal(Term):
    """Add mu / 2 ||w - w_t||^2, which keeps a client near the round's global weights (FedProx, Li et al. 2020)."""

    mu: NonNegative = 0.1
    """Weight of the term."""

    @property
    def proximal_mu(self) -> float:
        """``mu``, unless a subclass has another loss."""
        return self.mu if type(self).loss is Proximal.loss else 0.0

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        # Tensor by tensor, because fused list operations cannot be stacked over clients.
        squares = ((param - context.start[name]).square().sum() for name, param in params.items())
        return 0.5 * self.mu * torch.stack(list(squares)).sum()


@part("term", "feddyn")
class FedDyn(Term):
    """Adds -<g_k, w> + alpha / 2 ||w - w_t||^2 to the loss (Acar et al. 2021, Algorithm 1).

    The client keeps g_k, 0 at first, and sets g_k <- g_k - alpha (w_k - w_t) after its training: the gradient of its
    own loss at w_k, where training has converged. The server keeps h, 0 at first. With P good uploads of m clients:

        h <- h - alpha / m sum_{k in P} (w_k - w_t),    w_{t+1} = 1 / |P| sum_{k in P} w_k - h / alpha

    Any optimiser may minimise the client's loss; g_k is that gradient where it has converged, whatever the optimiser.
    The mean is over clients, which count alike; other aggregators are refused. Where an upload is lost the client has
    renewed its g_k already, and the server's h lacks its summand: the paper does not consider lost uploads. In the
    authors' code client k has alpha n / (m n_k), n samples in all, which is alpha where all hold equally many; it also
    clips gradients to a norm of 10 (``train.clip_norm``).
    """

    alpha: Positive = 0.01
    """Weight alpha of the regularisation; the paper tries 0.1, 0.01 and 0.001."""

    def require_possible(self, method: Any, train: Any) -> None:
        if not method.aggregator.is_plain_mean:
            raise ValueError(
                f"method.aggregator: '{method.aggregator.name}' is no mean in which clients count alike, which the "
                'term \'feddyn\' needs; valid: aggregator = {name = "mean", by = "clients"}'
            )

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        return spec.zeros(weights)

    init_client_state = init_server_state

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        parts = (
            0.5 * self.alpha * (params[name] - context.start[name]).square().sum() - (g * params[name]).sum()
            for name, g in context.client_state.items()
        )
        return torch.stack(list(parts)).sum()

    def after_training(self, spec: ModelSpec, training: LocalTraining) -> Tables:
        begun, ended = training.start, training.weights
        return {n: g - self.alpha * (ended[n] - begun[n]) for n, g in training.client_state.items()}, {}

    def after_aggregation(self, weights: Tensors, state: Tensors, summary: CohortSummary) -> Tables:
        """w_{t+1} and h. The sum of changes is |P| times the change of the mean."""
        share = self.alpha * summary.uploads / summary.clients
        kept = {name: h - share * (weights[name] - summary.start[name]) for name, h in state.items()}
        return {**weights, **{name: weights[name] - h / self.alpha for name, h in kept.items()}}, kept


@part("term", "distill")
class Distill(Term):
    """Add beta psi(F, G_n), psi = -sum_m G_{n,m} log F_m: cross-entropy with the global mean output of a label.

    Mix2FLD, equation 3 (Oh et al. 2020). Its psi lacks the minus that a cross-entropy needs; with the minus the
    gradient at the logits is (F - L) + beta (F - G_n). Nothing is added before the server has sent outputs, nor for a
    label of which no client has had samples.
    """

    outputs_kind = "outputs"

    beta: NonNegative = 0.01
    """Weight of the term."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        outputs = net(batch.x)
        if "outputs" not in context.global_outputs:
            return 0.0 * outputs.sum()
        teacher = context.task.encode(batch.y) @ context.global_outputs["outputs"]
        return -self.beta * (teacher * F.log_softmax(outputs, -1)).sum(-1).mean()


@part("term", "fedntd")
class FedNTD(Term):
    """Add beta tau^2 KL(q_g || q_l) over the classes that are not a sample's own (Lee et al. 2022, equations 3 and 4).

    q(c) = exp(z_c / tau) / sum_{c' != y} exp(z_c' / tau) for the logits z of the round's global model (q_g) and of the
    model in training (q_l), without the sample's class y; the mean over the batch. No gradient flows into the global
    model, which is in evaluation mode. The factor tau^2, in the authors' code and not in equation 3, keeps the
    gradients' size for every tau. Each step takes one further forward pass.
    """

    beta: NonNegative = 1.0
    """Weight of the term."""
    tau: Positive = 1.0
    """Temperature."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """Raises :class:`FedblendError` for data without classes."""
        require_classes(self, context.task)
        own = context.task.encode(batch.y) * EXCLUDED
        with torch.no_grad():
            teacher = F.log_softmax((net.with_weights(context.start, training=False)(batch.x) + own) / self.tau, -1)
        student = F.log_softmax((net(batch.x) + own) / self.tau, -1)
        return self.beta * self.tau**2 * (teacher.exp() * (teacher - student)).sum(-1).mean()


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

    def after_training(self, spec: ModelSpec, training: LocalTraining) -> Tables:
        return without(training.weights, spec.frozen), {}


def representation(net: Net, x: torch.Tensor) -> torch.Tensor:
    """The input of the network's last layer, [B, features]; the network's output where its layers are unknown."""
    return (net(x, 0, net.layers - 1) if net.layers > 1 else net(x)).flatten(1)


@part("term", "prototypes")
class ToPrototypes(Term):
    """Add lambda times the squared distance of samples' embeddings to the global prototypes of their classes.

    lambda mean_i ||z_i - C^(y_i)||^2 / d over the batch, with embeddings z of d numbers (FedProto, Tan et al. 2022,
    equations 7 and 8; the distance is the mean square, as in the authors' code). Nothing is added for a class without
    a global prototype, nor before the server has sent any. Each step takes a further forward pass.
    """

    outputs_kind = "prototypes"

    lam: NonNegative = 1.0
    """Weight of the term."""

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        z = embedding(net, batch.x)
        if "prototypes" not in context.global_outputs:
            return 0.0 * z.sum()
        prototypes, label = context.global_outputs["prototypes"], context.task.encode(batch.y)
        known = label @ (prototypes != 0).any(1).float()
        return self.lam * ((z - label @ prototypes).square().mean(1) * known).mean()
