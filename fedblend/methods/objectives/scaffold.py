"""SCAFFOLD: control variates that correct the drift of clients."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fedblend.core.objective import Batch, CohortSummary, Context, LocalTraining, ModelSpec, Net, Term
from fedblend.core.registry import part
from fedblend.core.trees import Tensors
from fedblend.methods.objectives import Tables


@part("term", "scaffold")
class Scaffold(Term):
    """Each local step follows g_k(y) - c_k + c in place of the gradient g_k(y) (Karimireddy et al. 2020, Algorithm 1).

    The client keeps its control variate c_k, the server keeps c; both are 0 at first and have the form of the trained
    weights. After K steps of learning rate eta from the global model x to y_k, a client sets

    - option II: c_k+ = c_k - c + (x - y_k) / (K eta);
    - option I: c_k+ = the gradient of its mean loss over all of its samples at x (one more pass over them),

    and sends y_k and c_k+ - c_k, so that an upload is twice as large. The server sets c <- c + (1/N) sum (c_k+ - c_k)
    over the round's good uploads, N clients in all. The term's loss is <c - c_k, y>, whose gradient is the correction.

    The models' mean is the next global model (the paper's server learning rate eta_g = 1; ``server_step = {name =
    "fedavgm", beta = 0, lr = ...}`` sets another).

    Often wrong elsewhere: the sum is divided by N, not by the size of the cohort. Clients count alike, in c and in the
    models' mean (``aggregator.by = "clients"``, the preset's), not by their samples. K counts the steps that the client
    made, not epochs, and eta is the round's learning rate, not the first. Momentum moves y_k by more than eta times
    gradients, so that option II would not measure gradients: it is refused there, and so is any optimiser but SGD. With
    option I any optimiser steps on the corrected gradient. Option II measures clipped gradients where
    ``train.clip_norm`` is set, and gradients of the penalised loss with ``train.weight_decay``; where the learning rate
    changes within the round, K eta is its sum.
    """

    exchanges = "extras"

    option: Literal["I", "II"] = "II"
    """How a client's control variate is renewed: from its steps (II), or from a further gradient (I)."""

    def require_possible(self, method: Any, train: Any) -> None:
        """Refuse momentum where gradients are measured by steps."""
        if self.option == "II" and train.optimizer.steps != "sgd":
            raise ValueError(
                f"train.optimizer: the steps of '{train.optimizer.name}' are no multiples of gradients, but 'scaffold' "
                'measures gradients by steps; valid: sgd, or option = "I"'
            )
        if self.option == "II" and train.momentum:
            raise ValueError(
                f"train.momentum: {train.momentum} makes steps longer than gradients, but 'scaffold' measures "
                'gradients by steps; valid: momentum = 0, or option = "I"'
            )

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        return spec.zeros(weights)

    init_client_state = init_server_state

    def loss(self, params: Tensors, net: Net, batch: Batch, context: Context) -> torch.Tensor:
        apart = {name: c - context.client_state[name] for name, c in context.server_state.items()}
        return torch.stack([(c * params[name]).sum() for name, c in apart.items()]).sum()

    def after_training(self, spec: ModelSpec, training: LocalTraining) -> Tables:
        before, server = training.client_state, training.server_state
        if self.option == "I":
            gradient = training.gradient(training.start)
            renewed = {name: gradient[name] for name in before}
        elif not training.steps * training.lr:
            renewed = dict(before)  # nothing moved, so that nothing is measured
        else:
            scale = 1.0 / (training.steps * training.lr)
            moved = {name: training.start[name] - training.weights[name] for name in before}
            renewed = {name: c - server[name] + scale * moved[name] for name, c in before.items()}
        return renewed, {name: renewed[name] - before[name] for name in before}

    def after_aggregation(self, weights: Tensors, state: Tensors, summary: CohortSummary) -> Tables:
        return dict(weights), {n: (c + summary.extras[n] / summary.clients).to(c.dtype) for n, c in state.items()}
