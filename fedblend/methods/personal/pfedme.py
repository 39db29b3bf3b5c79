"""pFedMe: personal models as the solutions of Moreau envelopes around the clients' copies of the global model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch.func import grad

from fedblend.core.objective import Batch, Context, LocalTraining, ModelSpec, Net, Objective, Personal, StepPlan
from fedblend.core.registry import Count, Positive, part
from fedblend.core.trees import Tensors


@part("personal", "pfedme")
class PFedMe(Personal):
    """Minimise F_k(w) = min_theta f_k(theta) + lambda / 2 ||theta - w||^2 (Dinh et al. 2020, Algorithm 1).

    At each of its steps, on a batch, a client finds theta by ``steps`` steps of gradient descent from its w_k, and then
    sets w_k <- w_k - eta lambda (w_k - theta) with the learning rate eta of ``[train]``. It sends w_k. The server takes
    the mean over clients, which count alike (``aggregator.by = "clients"``, the preset's), and may move further or less
    far towards it: ``server_step = {name = "fedavgm", beta = 0, lr = ...}`` is the paper's beta. f_k is the method's
    objective, so that the method may mix data.

    The personal model, with which ``evaluate_model = "each"`` tests a client, is theta for the last w_k, by the same
    steps on the task's mean loss over all of the client's samples; the authors take the theta of the last batch. It is
    kept at the client and is never sent. In the authors' code theta goes on from the last batch's theta, its steps have
    a weight decay of 0.001, and the server weights clients by samples. With one step and lambda x personal_lr = 1 the
    global model is FedAvg's.
    """

    lam: Positive = 15.0
    """Weight lambda of the distance; eta lambda must be below 2 for w_k to settle. The paper tries 5 to 100."""
    steps: Count = 5
    """Steps of gradient descent for theta (the paper's K)."""
    personal_lr: Positive = 0.01
    """Learning rate of these steps; the authors take 0.01 to 0.1, with a ``train.lr`` of 0.005 or 0.01."""

    def objective(self, base: Objective) -> Objective:
        return MoreauEnvelope(base, self)

    def after_training(self, spec: ModelSpec, training: LocalTraining) -> dict[str, torch.Tensor]:
        """The personal model: theta for the client's w_k."""
        w = {name: training.weights[name] for name in spec.trained}

        def gradient(theta: Tensors) -> Tensors:
            computed = training.gradient({**training.weights, **theta})
            return {name: computed[name].to(w[name].device) for name in w}

        return {**training.weights, **self.nearest(gradient, w)}

    def nearest(self, gradient: Callable[[Tensors], Tensors], w: Tensors) -> dict[str, torch.Tensor]:
        """theta after all steps from ``w``, for a loss with this ``gradient``."""
        theta = dict(w)
        for _ in range(self.steps):
            slope = gradient(theta)
            theta = {n: t - self.personal_lr * (slope[n] + self.lam * (t - w[n])) for n, t in theta.items()}
        return theta


class MoreauEnvelope(Objective):
    """F(w) = min_theta f(theta) + lambda / 2 ||theta - w||^2, whose gradient is lambda (w - theta)."""

    def __init__(self, base: Objective, solver: PFedMe) -> None:
        self.base, self.solver = base, solver

    @property
    def needs(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(self.base.needs)

    @property
    def reads_start(self) -> bool:  # type: ignore[override]
        """Whether f reads the round's first weights."""
        return bool(self.base.reads_start)

    def draw(self, rng: np.random.Generator, plan: StepPlan) -> dict[str, np.ndarray]:
        return self.base.draw(rng, plan)

    def loss(self, net: Net, batch: Batch, drawn: Tensors, context: Context) -> torch.Tensor:
        """F(w), with theta as a constant: so the derivative by w is lambda (w - theta)."""

        def f(theta: Tensors) -> torch.Tensor:
            losses = [phase(net.with_weights(theta), batch, drawn, context) for phase in self.base.phases()]
            return torch.stack(losses).sum()

        w = net.weights
        theta = self.solver.nearest(grad(f), {name: tensor.detach() for name, tensor in w.items()})
        theta = {name: tensor.detach() for name, tensor in theta.items()}
        squares = torch.stack([(w[name] - tensor).square().sum() for name, tensor in theta.items()])
        return f(theta).detach() + 0.5 * self.solver.lam * squares.sum()
