"""Personal models: what each client keeps for itself beside the global model (Ditto, pFedMe), or of it (FedPer)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass
from torch import nn
from torch.func import grad

from fedblend.core.context import Batch, Context, LocalTraining, ModelSpec, Net, StepPlan
from fedblend.core.errors import FedblendError
from fedblend.core.objective import Objective, Personal, Term, of_base
from fedblend.core.registry import Count, Fraction, Int, NonNegative, Positive, part
from fedblend.core.trees import Tensors
from fedblend.methods.objectives.terms import Proximal

NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm, nn.GroupNorm, nn.LayerNorm)
"""Normalisation layers."""


@part("personal", "ditto")
class Ditto(Personal):
    """A client trains a personal model v_k on h_k(v; w_t) = F_k(v) + lambda / 2 ||v - w_t||^2 (Li et al. 2021).

    The global model w is trained as without Ditto (Algorithm 1: its solver is independent of the personal models). In
    each of its rounds a client goes on from the v_k that it kept, for as many epochs, on batches of its own drawing;
    v_k begins as its first global model, in the authors' code as the run's first weights. F_k is the method's
    objective. v_k never leaves the client and is never averaged; ``evaluate_model = "each"`` tests every client with
    its v_k. lambda = 0 trains clients alone, a large lambda keeps them on the global model.
    """

    lam: NonNegative = 0.1
    """Weight lambda of the distance to the global model; the paper tries 0.05 to 2."""

    def terms(self) -> Sequence[Term]:
        return (Proximal(mu=self.lam),)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class OwnHead(Personal):
    """Base of the methods with a shared body and an own head: the last ``layers`` layers of the model.

    A layer is a module with trained weights of its own, such as a dense layer or a convolution, in the order in which
    the model declares them.
    """

    layers: Annotated[Int, Field(ge=0)] = 1
    """Last layers with trained weights that stay at the client; 0 leaves FedAvg."""

    def own_layers(self, model: nn.Module) -> Collection[str]:
        """Weights and buffers of the last layers. Raises :class:`FedblendError` for a model of fewer layers."""
        trained = [n for n, m in model.named_modules() if any(p.requires_grad for p in m.parameters(recurse=False))]
        if self.layers >= len(trained):
            raise FedblendError(
                f"method.personal.layers: {self.layers} is not valid: the model has {len(trained)} layers with trained "
                f"weights, of which one must be shared; valid: 0 to {len(trained) - 1}"
            )
        last = trained[len(trained) - self.layers :]
        return _tensors_of(model, last)


@part("personal", "fedper")
class FedPer(OwnHead):
    """Keep the last layers at each client, and train them with the shared body (Arivazhagan et al. 2019).

    A client's head begins as the run's first weights, is trained with the body in each of its rounds, and never leaves
    the client. The body is averaged. Each client is tested with its own head; one that has not trained yet has the
    first one.
    """


@part("personal", "fedrep")
class FedRep(OwnHead):
    """Keep the last layers at each client, and train them before the shared body, not with it (Collins et al. 2021).

    In a round a client first trains its head with the round's body, and then the body with its new head (Algorithm 1).
    All else is as in FedPer. The paper makes ten passes for the head, and one or five for the body.
    """

    head_share: Fraction = 0.5
    """Share of a client's steps that train the head; the steps after these train the body."""

    def own_steps(self, steps: int) -> int | None:
        """So many of the steps, rounded, and of two or more steps at least one for each phase that has a share.

        ``None``, that is both phases at once, for a single step, and where no layer is a client's own.
        """
        if not self.layers or (steps == 1 and 0 < self.head_share < 1):
            return None
        least, most = int(self.head_share > 0), steps - int(self.head_share < 1)
        return min(max(round(self.head_share * steps), least), most)


@part("personal", "fedbn")
class FedBN(Personal):
    """Keep the normalisation layers at each client: weights, biases and running statistics (Li et al. 2021).

    The paper's are batch norms; layers of group, layer and instance norm stay likewise. Each client is tested with its
    own layers; one that has not trained yet has the first ones.
    """

    def own_layers(self, model: nn.Module) -> Collection[str]:
        """All tensors of normalisation layers. Raises :class:`FedblendError` for a model without them."""
        own = _tensors_of(model, [name for name, module in model.named_modules() if isinstance(module, NORMS)])
        if not own:
            raise FedblendError(
                "method.personal: 'fedbn' keeps normalisation layers at clients, and the model has none with weights; "
                'valid: a model with such layers (for cnn and resnet18: norm = "batch" or "group")'
            )
        return own


def _tensors_of(model: nn.Module, layers: Collection[str]) -> list[str]:
    return [name for name in model.state_dict() if name.rpartition(".")[0] in layers]


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

    needs = of_base("needs")
    reads_start = of_base("reads_start")

    def __init__(self, base: Objective, solver: PFedMe) -> None:
        self.base, self.solver = base, solver

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
