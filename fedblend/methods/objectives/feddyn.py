"""FedDyn: dynamic regularisation, so that clients' optima agree with the global one."""

from __future__ import annotations

from typing import Any

import torch

from fedblend.core.objective import Batch, CohortSummary, Context, LocalTraining, ModelSpec, Net, Term
from fedblend.core.registry import Positive, part
from fedblend.core.trees import Tensors


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
        """Refuse an aggregate that is no mean over clients."""
        if not method.aggregator.is_plain_mean:
            raise ValueError(
                f"method.aggregator: '{method.aggregator.name}' is no mean in which clients count alike, which the "
                'term \'feddyn\' needs; valid: aggregator = {name = "mean", by = "clients"}'
            )

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        """h = 0."""
        return spec.zeros(weights)

    def init_client_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        """g_k = 0."""
        return spec.zeros(weights)

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        """-<g_k, w> + alpha / 2 ||w - w_t||^2, summed over all trained weights."""
        parts = (
            0.5 * self.alpha * (params[name] - context.start[name]).square().sum() - (g * params[name]).sum()
            for name, g in context.client_state.items()
        )
        return torch.stack(list(parts)).sum()

    def after_training(
        self, spec: ModelSpec, training: LocalTraining
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """g_k - alpha (w_k - w_t); nothing is sent beside the model."""
        moved = {name: (training.weights[name] - training.start[name]).cpu() for name in training.client_state}
        return {name: g - self.alpha * moved[name] for name, g in training.client_state.items()}, {}

    def after_aggregation(
        self, weights: Tensors, state: Tensors, summary: CohortSummary
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """w_{t+1} and h. The sum of changes is |P| times the change of the mean."""
        share = self.alpha * summary.uploads / summary.clients
        kept = {name: h - share * (weights[name] - summary.start[name]) for name, h in state.items()}
        return {**weights, **{name: weights[name] - h / self.alpha for name, h in kept.items()}}, kept
