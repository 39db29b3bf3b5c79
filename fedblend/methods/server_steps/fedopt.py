"""Server optimisers take the cohort's mean change as a gradient: FedAvgM, FedAdagrad, FedAdam and FedYogi."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass

from fedblend.core.context import ModelSpec
from fedblend.core.registry import Float, Positive, part
from fedblend.core.server_step import Refined, ServerContext, ServerStep
from fedblend.core.trees import Tensors, add_prefix, strip_prefix

Beta = Annotated[Float, Field(ge=0, lt=1)]


@part("server_step", "fedavgm")
class FedAvgM(ServerStep):
    """m <- beta m + Delta, w <- w_t + lr m, with Delta the aggregate minus w_t (Hsu et al. 2019).

    m is 0 at first and covers the trained weights; buffers are the aggregate's. Learning rate 1 and beta 0 is FedAvg.
    """

    lr: Positive = 1.0
    """Learning rate of the server."""
    beta: Beta = 0.9
    """Momentum of the server."""

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        return add_prefix("m/", spec.zeros(weights))

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        change = {name: weights[name] - server.start[name] for name in server.trained}
        momentum = {name: self.beta * m + change[name] for name, m in strip_prefix("m/", server.state).items()}
        moved = {name: server.start[name] + self.lr * m for name, m in momentum.items()}
        return {**weights, **moved}, add_prefix("m/", momentum)


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Adaptive(ServerStep):
    """Base of the adaptive ones: m <- beta_1 m + (1 - beta_1) Delta, w <- w_t + lr m / (sqrt(v) + tau).

    Reddi et al. 2021, Algorithm 2: no bias correction; m is 0 and v is tau^2 at first. A method differs in v.
    """

    lr: Positive = 0.1
    """Learning rate of the server; the authors' best for their six tasks are 0.003 to 1, with Adagrad 0.03 to 10."""
    beta_1: Beta = 0.9
    """Decay of the mean of changes."""
    beta_2: Beta = 0.99
    """Decay of the mean of squared changes."""
    tau: Positive = 1e-3
    """Adaptivity: what is added to the root of v, which is tau^2 at first; the authors' best are 0.00001 to 0.1."""

    def init_server_state(self, spec: ModelSpec, weights: Tensors) -> dict[str, torch.Tensor]:
        zeros = spec.zeros(weights)
        return add_prefix("m/", zeros) | add_prefix("v/", {name: z + self.tau**2 for name, z in zeros.items()})

    def refine(self, weights: Tensors, server: ServerContext) -> Refined:
        change = {name: weights[name] - server.start[name] for name in server.trained}
        before = strip_prefix("m/", server.state)
        m = {name: self.beta_1 * before[name] + (1 - self.beta_1) * d for name, d in change.items()}
        v = {name: self.second(old, change[name].square()) for name, old in strip_prefix("v/", server.state).items()}
        moved = {name: server.start[name] + self.lr * m[name] / (v[name].sqrt() + self.tau) for name in change}
        return {**weights, **moved}, add_prefix("m/", m) | add_prefix("v/", v)

    def second(self, v: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        """The next v, given the squared change of a tensor."""
        raise TypeError(f"{type(self).__name__} defines no second")


@part("server_step", "fedadagrad")
class FedAdagrad(Adaptive):
    """v <- v + Delta^2, so that steps only get shorter (beta_2 plays no part).

    There is no momentum (beta_1 = 0), as in the authors' code.
    """

    beta_1: Beta = 0.0
    """Decay of the mean of changes."""

    def second(self, v: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        return v + squared


@part("server_step", "fedadam")
class FedAdam(Adaptive):
    """v <- beta_2 v + (1 - beta_2) Delta^2."""

    def second(self, v: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        return self.beta_2 * v + (1 - self.beta_2) * squared


@part("server_step", "fedyogi")
class FedYogi(Adaptive):
    """v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2), which changes more slowly where changes get small."""

    def second(self, v: torch.Tensor, squared: torch.Tensor) -> torch.Tensor:
        return v - (1 - self.beta_2) * squared * (v - squared).sign()
